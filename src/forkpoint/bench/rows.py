"""Rows of measurements: one JSON object a metric, with all that is needed to read it later."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One measured (or counted) figure."""

    bench: str
    case: str
    metric: str
    unit: str
    value: float
    """The median where it was measured repeatedly."""
    p20: float | None = None
    p80: float | None = None
    baseline: str | None = None
    """Baseline that a ratio is taken over."""
    bound: float | None = None
    """The counted bound of a speed-up."""
    note: str | None = None


@cache
def environment() -> dict[str, object]:
    """Device, versions, commit and command of this process, the same for all of its rows."""
    packages = (
        *("torch", "triton", "transformers", "flash-attn-4", "fla-core", "tilelang"),
        "forkpoint",
    )
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
        device = torch.cuda.get_device_name()
    else:
        device = platform.processor() or platform.machine()
    return {
        "device": device,
        "versions": versions,
        "commit": _commit(),
        # Where files lay on the machine is nobody's business.
        "command": " ".join([*_program(), *(_named(word) for word in sys.argv[1:])]),
    }


def _program() -> list[str]:
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.name != "__main__.py":
        return ["python", f"{script.parent.name}/{script.name}"]
    return ["forkpoint"]


def _named(word: str) -> str:
    path = Path(word)
    return path.name if path.is_absolute() else word


def _commit() -> str:
    """Commit by FORKPOINT_COMMIT, for copies of a checkout; else the checkout's commit.

    "-dirty" where its sources differ from that, and "unknown" where there is no checkout.
    """
    if said := os.environ.get("FORKPOINT_COMMIT"):
        return said

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    dirty = "-dirty" if commit and git("status", "--porcelain", "--", "src") else ""
    return commit + dirty or "unknown"


def write_rows(rows: Iterable[ResultRow], path: Path) -> None:
    """Append rows to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**asdict(row), **environment()}) + "\n")


@dataclass(frozen=True)
class Timing:
    """Milliseconds over repeats."""

    samples_ms: Sequence[float]

    @property
    def p50(self) -> float:
        return statistics.median(self.samples_ms)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.samples_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def time_cuda(
    function: Callable[[], object], *, budget_ms: float = 250.0, most: int = 30, least: int = 3
) -> Timing:
    """Time a function by CUDA events, warm, repeated within a budget.

    Between repeats a buffer larger than the L2 cache is overwritten, so that nothing is read from
    where the repeat before left it.
    """
    return time_cuda_in_turn(function, budget_ms=budget_ms, most=most, least=least)[0]


def time_cuda_in_turn(
    *functions: Callable[[], object], budget_ms: float = 250.0, most: int = 30, least: int = 3
) -> list[Timing]:
    """Time several functions as `time_cuda` does, one repeat of each in turn.

    Under its power limit a GPU's clock changes within a second by more than the differences that
    are looked for; what is measured in turn has the same clocks. The budget is for each.
    """
    for function in functions:
        function()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for function in functions:
        function()
    end.record()
    torch.cuda.synchronize()
    once_ms = max(begin.elapsed_time(end) / len(functions), 1e-3)
    repeats = max(least, min(most, int(budget_ms / once_ms)))
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, pairs in zip(functions, events, strict=True):
            flush.zero_()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            function()
            last.record()
            pairs.append((first, last))
    torch.cuda.synchronize()
    return [Timing([a.elapsed_time(b) for a, b in pairs]) for pairs in events]
