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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from failing_ranks import CAUSES, WRAPS, Moment, Outcome, tried
from rich.console import Console
from rich.table import Table

from forkpoint.parallel import watch


def quicker(factor: float) -> None:
    """Divide the waits of the watch: the same ends, sooner."""
    for name in ("POLL_S", "BEAT_S", "DEAD_S", "GRACE_S"):
        setattr(watch, name, getattr(watch, name) / factor)


def table_of(outcomes: list[Outcome]) -> Table:
    """How the moments of each kind ended, and in what time."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("wrapper", "failure", "moments", "ended", "longest s", "faults"):
        table.add_column(name)
    rows: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        rows.setdefault((one.moment.wrap, one.moment.kind, one.how), []).append(one)
    for (wrap, kind, how), some in rows.items():
        longest = max(end.seconds for one in some for end in one.ends)
        faults = sum(bool(one.faults) for one in some)
        table.add_row(wrap, kind, str(len(some)), how, f"{longest:.1f}", str(faults))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="of each kind and wrapper")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--wraps", nargs="+", choices=WRAPS, default=list(WRAPS))
    parser.add_argument("--quicker", type=float, default=1.0, help="divides the watch's waits")
    parser.add_argument("--json", type=Path, help="a line for each moment")
    arguments = parser.parse_args()
    quicker(arguments.quicker)
    console, outcomes = Console(width=120), []
    for wrap in arguments.wraps:
        for kind in arguments.kinds:
            for number in range(arguments.moments):
                seed = arguments.seed + number
                outcome = tried(Moment(kind, wrap, seed, arguments.ranks))
                outcomes.append(outcome)
                for fault in outcome.faults:
                    print(f"{wrap}, {kind}, seed {seed}: {fault}", flush=True)
                if arguments.json:
                    with arguments.json.open("a") as file:
                        file.write(json.dumps(asdict(outcome) | {"how": outcome.how}) + "\n")
            console.print(f"{wrap}, {kind}: {arguments.moments} moments done", style="dim")
    console.print(table_of(outcomes))
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
