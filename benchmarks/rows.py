"""Rows of measurements: one JSON object a metric, with all that is needed to read it later."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.timing import Timing


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One measured (or counted) figure."""

    bench: str
    """The name of the benchmark."""
    case: str
    metric: str
    unit: str
    value: float
    """The median where it was measured repeatedly."""
    p20: float | None = None
    p80: float | None = None
    baseline: str | None = None
    """The denominator of a ratio."""
    baseline_leaves_out: bool | None = None
    """Whether the baseline, too, leaves out rollouts and tails that give no gradient, so that the
    ratio is one of sharing alone. None where no rollouts are trained on, and in rows from before
    any were left out."""
    bound: float | None = None
    """The counted bound of a speed-up."""
    bar: float | None = None
    """The most that the value may be; above it the benchmark fails."""
    note: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the value misses its bar. NaN does."""
        return self.bar is not None and not self.value <= self.bar


def timed_row(
    bench: str, case: str, metric: str, timing: Timing, *, factor: float = 1.0, **rest: Any
) -> ResultRow:
    """The row of a timing in milliseconds, times `factor` where a part was timed for the whole."""
    return ResultRow(
        bench=bench,
        case=case,
        metric=metric,
        unit="ms",
        value=timing.p50 * factor,
        p20=timing.quantile(0.2) * factor,
        p80=timing.quantile(0.8) * factor,
        **rest,
    )


def write_rows(rows: Iterable[ResultRow], path: Path) -> None:
    """Append rows to a file of JSON lines, with the device, versions, commit and command."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**asdict(row), **environment()}) + "\n")
