"""Output of a command: text and tables, or one JSON line. Imports no torch."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from forkpoint.apps.cli.text import visible
from forkpoint.rollouts.schema import finite

PIPE_WIDTH = 100
"""Columns of tables if stdout is no terminal."""


class _Console(Console):
    """A console whose text cannot steer the terminal."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(visible(text), *arguments, **options)


class Output:
    """Text and tables to stdout, or the JSON line alone; progress to stderr if it is a terminal."""

    def __init__(self, *, json_only: bool, silent: bool = False) -> None:
        """`silent`: another process shows everything."""
        self.json_only = json_only
        self.silent = silent
        self.facts: dict[str, Any] = {}
        """Further fields of the JSON line, at its end."""
        self._terminal = sys.stdout.isatty()
        plain_text: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        self._console = _Console(width=None if self._terminal else PIPE_WIDTH, **plain_text)
        self.width: int = self._console.width
        self._errors = _Console(stderr=True, **plain_text)
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

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show what is being done while the block runs.

        Yields a function to call with the newest state of the work.
        """
        if not self._shows_progress:
            yield lambda newest: None
            return
        with self._errors.status(what) as status:
            yield lambda newest: status.update(f"{what}: {newest}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar with the time left. Yields a function to call with the steps just done."""
        with Progress(
            console=self._errors, transient=True, disable=not self._shows_progress
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)


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
    return json.loads(json.dumps(finite(value), default=str))
