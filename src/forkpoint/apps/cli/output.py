"""Output of a command: text and tables, or one JSON line. Imports no torch."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.highlighter import RegexHighlighter
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from forkpoint.apps.report.text import visible

PIPE_WIDTH = 100
"""Columns of tables if stdout is no terminal."""
LINE_SECONDS = 30.0
"""Time between lines of progress if stderr is no terminal, such as the log of a batch job."""
_COLOURS_OF = {"passed": "bold green", "failed": "bold red", "chosen": "bold cyan"}


class _Verdicts(RegexHighlighter):
    """Colours verdicts, but not within a path or a longer word."""

    highlights = [  # noqa: RUF012  (declared so by rich)
        rf"(?<![\w./-])(?P<{name}>{words})(?![\w/-]|\.\w)"
        for name, words in zip(_COLOURS_OF, ("passed", "failed|FAILED", "chosen"), strict=True)
    ]


class _Console(Console):
    """A console whose text cannot steer the terminal."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(visible(text), *arguments, **options)


class Output:
    """Text and tables to stdout, or the JSON line alone; progress to stderr.

    Colours follow NO_COLOR and FORCE_COLOR.
    """

    def __init__(self, *, json_only: bool, silent: bool = False) -> None:
        """`silent`: another process shows everything."""
        self.json_only = json_only
        self.silent = silent
        self.facts: dict[str, Any] = {}
        """Further fields of the JSON line, at its end."""
        self._terminal = sys.stdout.isatty()
        self._console = _Console(
            width=None if self._terminal else PIPE_WIDTH,
            markup=False,
            emoji=False,
            highlighter=_Verdicts(),
            theme=Theme(_COLOURS_OF),
        )
        self.width: int = self._console.width
        self._errors = _Console(stderr=True, markup=False, highlight=False)
        self._shows_progress = self._errors.is_interactive and not silent

    def show(self, *things: RenderableType) -> None:
        """Print text or tables, unless only the JSON line was asked for.

        Lines of text are wrapped only on a terminal.
        """
        if not self.json_only and not self.silent:
            for thing in things:
                self._console.print(thing, soft_wrap=isinstance(thing, str) and not self._terminal)

    def result(self, values: dict[str, Any]) -> None:
        """Print the JSON line, if it was asked for. NaN and infinities become null."""
        if self.json_only and not self.silent:
            print(json.dumps(plain({**values, **self.facts}), allow_nan=False))

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Show what is being done while the block runs."""
        return self._errors.status(what) if self._shows_progress else nullcontext()

    @contextmanager
    def following(self, what: str) -> Iterator[Callable[[str], None]]:
        """As `waiting`; call what it yields with the newest state of the work."""
        if not self._shows_progress:
            yield lambda newest: None
            return
        with self._errors.status(what) as status:
            yield lambda newest: status.update(f"{what}: {newest}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with the time left, or lines if stderr is no terminal.

        Yields a function to call with the number of steps just done.
        """
        if not self._shows_progress:
            yield self._lines(what, total)
            return
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._errors,
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)

    def _lines(self, what: str, total: int) -> Callable[[int], None]:
        done, last = 0, time.monotonic()

        def advance(steps: int) -> None:
            nonlocal done, last
            done += steps
            if not self.silent and time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                self._errors.print(f"{what}: {done} of {total}")

        return advance


def table(
    title: str, rows: Iterable[Iterable[object]], columns: Iterable[str] = (), caption: str = ""
) -> Table:
    """A table whose first column is aligned left, and the others right.

    Without names of columns it has no header.
    """
    made = Table(
        title=title, title_justify="left", show_header=bool(columns), caption=caption or None
    )
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def options(command: Any) -> dict[str, Any]:
    """A command's options, flat, as the JSON line records them."""
    found: dict[str, Any] = {}
    for name, value in asdict(command).items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def plain(value: Any) -> Any:
    """The same tree as JSON can hold it: paths as text, NaN and infinities as null."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
