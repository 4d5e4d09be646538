"""Let one of several ranks fail at random moments of a step: see CONTRIBUTING.md.

python tests/fuzz/run_rank_failures.py --moments 20

An exception in a loss, in a block's forward and in its backward, memory that runs out, an interrupt
and a kill at any call of any function, and interrupts in `score` and in the backward of `logprobs`:
each at so many moments, under fully_shard and DistributedDataParallel. Every process has to end, or
raise an error that names the rank and the cause, within a minute. Where processes live on their
gradients are as before, and the next step is exact; elsewhere none exits with 0.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from failing_ranks import CAUSES, MESHES, WRAPS, Moment, tried

from forkpoint.parallel import watch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="of each kind and wrapper")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--wraps", nargs="+", choices=[*WRAPS, *MESHES], default=list(WRAPS))
    parser.add_argument("--quicker", type=float, default=1.0, help="divides the watch's waits")
    parser.add_argument("--json", type=Path, help="a line for each moment")
    given = parser.parse_args()
    for name in ("POLL_S", "BEAT_S", "DEAD_S", "GRACE_S"):
        setattr(watch, name, getattr(watch, name) / given.quicker)
    failed = False
    for wrap, kind in product(given.wraps, given.kinds):
        for seed in range(given.seed, given.seed + given.moments):
            outcome = tried(Moment(kind, wrap, seed, given.ranks))
            longest = max(end.seconds for end in outcome.ends)
            faults = "; ".join(outcome.faults) or "no fault"
            print(f"{wrap}, {kind}, seed {seed}: {outcome.how}, {longest:.1f} s, {faults}")
            failed = failed or bool(outcome.faults)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(asdict(outcome) | {"how": outcome.how}) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
