"""The one way in which a benchmark runs: measure, write rows as they come, show them, and end."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rich.table import Table
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow, write_rows
from forkpoint.apps.cli.options import Flag
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError

OutputFile = DisallowNone[
    Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: NAME.jsonl)")]
]


Seconds = DisallowNone[
    Annotated[float | None, arg(metavar="S", help_behavior_hint="(default: no limit)")]
]


class Deadline:
    """Seconds that a benchmark may take; what does not fit any more is left out, and named."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.left_out: list[str] = []

    def over(self, what: str) -> bool:
        """Whether the time is up; then `what` is noted as left out."""
        if time.monotonic() < self._end:
            return False
        self.left_out.append(what)
        return True


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Options of every benchmark.

    Numbers are checked before anything is timed. Every figure is written as a row of JSON with its
    device, versions, commit and command.

    Attributes:
        output: The file of JSON lines that rows are appended to, as they come.
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
        json: Print one line of JSON and nothing else.
    """

    NAME: ClassVar[str]

    output: OutputFile = None
    max_seconds: Seconds = None
    json: Flag = False

    @property
    def path(self) -> Path:
        """The file of rows."""
        return self.output or Path(f"{self.NAME}.jsonl")

    def measure(self, deadline: Deadline) -> Iterable[ResultRow]:
        """Check, then time. A check that fails is a row above its bar."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ConfigError for options that cannot be honoured."""

    def run(self) -> int:
        """Measure, and return the exit code: 0 done, 1 a figure misses its bar."""
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise ConfigError(
                f"output is {self.path}, which is a folder or lies in none; give the path of a "
                "file to append to, in a folder that exists."
            )
        self.check()
        out = Output(json_only=self.json)
        begin, deadline = time.perf_counter(), Deadline(self.max_seconds)
        rows: list[ResultRow] = []
        with out.waiting(f"measuring {self.NAME}"):
            for row in self.measure(deadline):
                write_rows([row], self.path)
                rows.append(row)
        failed = [f"{row.case}: {row.metric}" for row in rows if row.failed]
        out.show(_table(self.NAME, rows))
        out.show(*(f"left out, the time was up: {what}" for what in deadline.left_out))
        out.show(*(f"above its bar: {what}" for what in failed))
        out.result(
            {
                "benchmark": self.NAME,
                "cases": len({row.case for row in rows}),
                "rows": len(rows),
                "failed": failed,
                "left_out": deadline.left_out,
                "output": self.path,
                "seconds": time.perf_counter() - begin,
            }
        )
        return 1 if failed else 0


def _table(name: str, rows: list[ResultRow]) -> Table:
    table = Table(title=name, title_justify="left")
    numbers = {"value", "p20", "p80", "bound", "bar"}
    columns = ("case", "figure", "value", "unit", "p20", "p80", "baseline", "bound", "bar")
    cells = [
        (r.case, r.metric, r.value, r.unit, r.p20, r.p80, r.baseline, r.bound, r.bar) for r in rows
    ]
    # Columns that no row fills are left out.
    shown = [n for n in range(len(columns)) if n < 4 or any(row[n] is not None for row in cells)]
    for n in shown:
        table.add_column(columns[n], justify="right" if columns[n] in numbers else "left")
    for row in cells:
        table.add_row(*(_shown(row[n]) for n in shown))
    return table


def _shown(cell: str | float | None) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:,.4g}"
