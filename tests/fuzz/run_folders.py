"""Fuzz the reading of replays' folders: see CONTRIBUTING.md.

python tests/fuzz/run_folders.py --cases 5000 --json folders.json
python tests/fuzz/run_folders.py --replay 123
"""

import argparse
import json
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz_folders import Tally, make_bases, try_one

EVERY_SECONDS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow it")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show one case")
    arguments = parser.parse_args()
    warnings.simplefilter("error")  # as under pytest
    transformers.logging.set_verbosity_error()
    tally, begin = Tally(), time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    if arguments.replay is not None:
        seeds = range(arguments.replay, arguments.replay + 1)
    with tempfile.TemporaryDirectory() as folder:
        bases = make_bases(Path(folder))
        said = time.monotonic()
        for seed in seeds:
            known = len(tally.failures)
            debug = ("--debug",) if arguments.replay is not None else ()
            try_one(bases, seed, Path(folder), tally, debug=debug)
            for failure in tally.failures[known:]:
                print(f"FAILED seed {failure['seed']}: {failure['what']}\n{failure['stderr']}")
            if time.monotonic() - said > EVERY_SECONDS:
                said = time.monotonic()
                print(f"{tally.cases} cases, {len(tally.failures)} failures", flush=True)
    report = {
        "seconds": round(time.monotonic() - begin, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        **tally.report(),
    }
    print(json.dumps({**report, "failures": len(tally.failures)}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
