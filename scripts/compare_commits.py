"""Compares steps of two commits: gradients, losses, log-probs and the order of operations.

    python scripts/compare_commits.py OLD          a commit against the working tree
    python scripts/compare_commits.py OLD NEW      two commits
    python scripts/compare_commits.py OLD --match "hybrids: qwen3_5_text" critics
    python scripts/compare_commits.py OLD --list   the cases, without running them

The cases (scripts/compare_cases.py) are those of the tests of whole steps, in float64 on the CPU.
Each commit's `src` runs them in a process of its own, on the same weights and batches, with the
packages that are installed. An outcome is bitwise equal; within 1e-13, relative to the norm of all
gradients, of all log-probs or values, or to the loss; or worse. Events are compared with their
microbatches' sizes, but for names. Cases that were meant to change are counted by the reason
(`CHANGES`). Exits with 1 if an outcome is worse, is refused on one side, or had other inputs.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
from compare_cases import Case, Outcome, cases

ROOT = Path(__file__).parents[1]
BAR = 1e-13
SHOWN = 20
"""Lines of a kind, at most."""
AHEAD = 64
"""Outcomes of a side that wait for the other side's, at most."""


@dataclass(frozen=True)
class Change:
    """A change of rounding or of events that was meant."""

    commit: str
    """The first that has it."""
    texts: tuple[str, ...]
    """Parts that the names of its cases all have."""
    why: str


CHANGES = (
    Change(
        "320bc5a",
        ("temperatures:",),
        "rollouts of different temperatures share tokens, and lie beside each other by tokens",
    ),
)


@dataclass
class Counted:
    """How the cases of a group came out."""

    steps: int = 0
    bitwise: int = 0
    within: int = 0
    events: int = 0
    """Cases whose events are the same."""
    worst: float = 0.0
    faults: list[str] = field(default_factory=list)
    """Names of cases, with what is wrong; so are the others."""
    not_bitwise: list[str] = field(default_factory=list)
    other_events: list[str] = field(default_factory=list)


def difference(old: Outcome, new: Outcome) -> float:
    """The largest of the relative differences, 0 only if all is bitwise equal; inf for a fault."""
    if old.numbers.keys() != new.numbers.keys():
        return float("inf")
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    equal = True
    for name, mine in old.numbers.items():
        other = new.numbers[name]
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return float("inf")
        equal &= mine.tobytes() == other.tobytes()
        kind = name.split(" ")[0]
        squares[kind][0] += float(np.square(mine - other).sum())
        squares[kind][1] += float(np.square(mine).sum())
    if equal:
        return 0.0
    ratios = [
        float(np.sqrt(moved / total)) if total else float("inf") * bool(moved)
        for moved, total in squares.values()
    ]
    worst = max(ratios)
    # Signs of zeros, and differences whose squares vanish, are no bitwise equality either.
    return worst if worst == worst and worst > 0 else np.nextafter(0, 1) if worst == 0 else np.inf


def count(counted: Counted, case: Case, old: Outcome, new: Outcome) -> None:
    """Adds a case to its group."""
    counted.steps += 1
    if old.inputs != new.inputs:
        counted.faults.append(f"{case.name}: the sides have other weights or batches")
        return
    if old.refused or new.refused:
        counted.faults.append(
            f"{case.name}: old: {old.refused or 'ran'}; new: {new.refused or 'ran'}"
        )
        return
    found = difference(old, new)
    counted.worst = max(counted.worst, found)
    counted.bitwise += found == 0
    counted.within += 0 < found <= BAR
    if 0 < found <= BAR:
        counted.not_bitwise.append(f"{case.name}: off by {found:.1e}")
    if not found <= BAR:
        counted.faults.append(f"{case.name}: off by {found:.1e}")
    if old.events == new.events:
        counted.events += 1
    else:
        counted.other_events.append(f"{case.name}: {len(old.events)} and {len(new.events)} events")


# Sides -------------------------------------------------------------------------------------------


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def source_of(commit: str | None, folder: Path) -> Path:
    """A folder with the commit's library; the working tree's own without a commit."""
    if commit is None:
        return ROOT / "src"
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "src"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def outcomes(source: Path, chosen: Sequence[Case]) -> Iterator[Outcome]:
    """The cases at one side, as they are done. Raises RuntimeError where its process ends."""
    paths = os.pathsep.join([str(source), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("compare_side.py")), str(source)]
    side = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert side.stdin is not None and side.stdout is not None
    try:
        pickle.dump(list(chosen), side.stdin)
        side.stdin.close()
        for _ in chosen:
            yield pickle.load(side.stdout)
    except (EOFError, BrokenPipeError):
        raise RuntimeError(f"the process of {source} ended with {side.wait()}") from None
    finally:
        side.stdout.close()
        side.wait()


def ahead(found: Iterator[Outcome]) -> Iterator[Outcome]:
    """The same, fetched by a thread, so that no side waits for the other at every case."""
    waiting: Queue[Outcome | Exception | None] = Queue(AHEAD)

    def fetch() -> None:
        try:
            for outcome in found:
                waiting.put(outcome)
            waiting.put(None)
        except Exception as error:  # raised where it is waited for
            waiting.put(error)

    Thread(target=fetch, daemon=True).start()
    while (outcome := waiting.get()) is not None:
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def compare(
    sources: tuple[Path, Path], chosen: Sequence[Case], progress: bool
) -> dict[str, Counted]:
    """Each group's cases at both sides, which run at the same time."""
    found: dict[str, Counted] = defaultdict(Counted)
    begun = time.monotonic()
    sides = (ahead(outcomes(source, chosen)) for source in sources)
    for position, (case, old, new) in enumerate(zip(chosen, *sides, strict=True), start=1):
        count(found[case.group], case, old, new)
        if progress and position % 50 == 0:
            seconds = time.monotonic() - begun
            faults = sum(len(counted.faults) for counted in found.values())
            text = f"{position}/{len(chosen)} cases, {faults} worse, {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)
    return found


def meant(old: str) -> list[Change]:
    """Changes that OLD does not have."""
    ancestor = ["git", "merge-base", "--is-ancestor"]
    return [
        change
        for change in CHANGES
        if subprocess.run([*ancestor, change.commit, old], cwd=ROOT, check=False).returncode
    ]


def with_reasons(kind: str, texts: Sequence[str], changes: Sequence[Change]) -> Iterator[str]:
    """Counts of cases by the change that they are due to; those of none by their names."""
    left = list(texts)
    for change in changes:
        due = [text for text in left if all(part in text for part in change.texts)]
        left = [text for text in left if text not in due]
        if due:
            yield f"{kind}, {len(due)} as meant since {change.commit}: {change.why}"
    yield from (f"{kind}: {text}" for text in left[:SHOWN])
    if left[SHOWN:]:
        yield f"{kind}: {len(left) - SHOWN} more"


def table(found: dict[str, Counted], changes: Sequence[Change]) -> str:
    """The groups, one a line, with faults, and with other events and bits by their reasons."""
    names = ("steps", "bitwise", "<=1e-13", "worse", "same events", "largest")
    lines = [f"{'cases':24}" + "".join(f"{name:>12}" for name in names)]
    total = np.zeros(5, int)
    for group, counted in found.items():
        row = (counted.steps, counted.bitwise, counted.within, len(counted.faults), counted.events)
        total += row
        numbers = "".join(f"{number:12,}" for number in row)
        lines.append(f"{group:24}{numbers}{counted.worst:12.1e}")
    lines.append(f"{'all':24}" + "".join(f"{number:12,}" for number in total))
    for counted in found.values():
        lines += with_reasons("worse", counted.faults, ())
        lines += with_reasons("other events", counted.other_events, changes)
        lines += with_reasons("not bitwise", counted.not_bitwise, changes)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="a commit; without, the working tree")
    parser.add_argument("--match", nargs="+", default=[], help="cases whose name has one of these")
    parser.add_argument("--every", type=int, default=1, help="each n-th of these cases alone")
    parser.add_argument("--list", action="store_true", help="names of the cases, without a run")
    options = parser.parse_args()
    chosen = [c for c in cases() if not options.match or any(t in c.name for t in options.match)]
    chosen = chosen[:: options.every]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sources = [
            source_of(commit, Path(folder) / side)
            for side, commit in (("old", options.old), ("new", options.new))
        ]
        found = compare((sources[0], sources[1]), chosen, progress=True)
    print(table(found, meant(options.old)))
    return 1 if any(counted.faults for counted in found.values()) or not found else 0


if __name__ == "__main__":
    sys.exit(main())
