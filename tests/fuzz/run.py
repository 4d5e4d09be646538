"""Fuzz for a time, or replay one seed: see CONTRIBUTING.md.

python tests/fuzz/run.py --seconds 7200 --seed 1 --json fuzz.json
python tests/fuzz/run.py --replay 123
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz_cases import draw_case
from fuzz_check import Tally, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow it")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show and check one case")
    parser.add_argument("--family", help="of the case replayed; by default what the seed draws")
    given = parser.parse_args()
    warnings.simplefilter("error")  # as under pytest
    transformers.logging.set_verbosity_error()
    if given.replay is not None:
        case = draw_case(given.replay, given.family)
        print(case)
        outcome = check(case)
        print(outcome)
        return int(bool(outcome.faults))
    tally, begin = Tally(), time.monotonic()
    while time.monotonic() - begin < given.seconds:
        failed = len(tally.failures)
        tally.run(draw_case(given.seed + tally.cases))
        for failure in tally.failures[failed:]:
            print(f"FAILED {failure['what']}\n{failure['case']}", flush=True)
        if tally.cases % 100 == 0:
            print(tally, flush=True)
    print(tally)
    if given.json is not None:
        given.json.write_text(json.dumps({"seed": given.seed, **vars(tally)}, indent=2) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
