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

EVERY_SECONDS = 30


def replay(seed: int, family: str | None) -> int:
    case = draw_case(seed, family)
    print(case)
    outcome = check(case)
    print(outcome)
    return int(bool(outcome.faults))


def fuzz(seconds: float, seed: int, path: Path | None) -> int:
    tally = Tally()
    begin = saved = time.monotonic()

    def save() -> None:
        tally.seconds = round(time.monotonic() - begin, 1)
        line = (
            f"{tally.seconds:.0f} s: {tally.cases} cases up to seed {seed + tally.cases - 1}, "
            f"{len(tally.failures)} failures, {tally.refused} refused, {tally.telling} telling, "
            f"worst gradient {tally.worst_gradient_error:.1e}, "
            f"log-prob {tally.worst_logprob_error:.1e}"
        )
        print(line, flush=True)
        if path is not None:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"seed": seed, **tally.report()}, indent=2) + "\n")
            partial.replace(path)

    while time.monotonic() - begin < seconds:
        failed = len(tally.failures)
        tally.run(draw_case(seed + tally.cases))
        for failure in tally.failures[failed:]:
            print(f"FAILED {failure['what']}\n{failure['case']}", flush=True)
        if time.monotonic() - saved > EVERY_SECONDS:
            saved = time.monotonic()
            save()
    save()
    return int(bool(tally.failures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow it")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show and check one case")
    parser.add_argument("--family", help="of the case replayed; by default what the seed draws")
    arguments = parser.parse_args()
    warnings.simplefilter("error")  # as under pytest
    transformers.logging.set_verbosity_error()
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.family)
    return fuzz(arguments.seconds, arguments.seed, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
