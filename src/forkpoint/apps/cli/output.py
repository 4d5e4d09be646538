"""Output of a command: text and tables, or one JSON line. Imports no torch."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from forkpoint.apps.cli.text import visible
from forkpoint.errors import ConfigError
from forkpoint.rollouts.schema import finite

PIPE_WIDTH = 100
"""Width of tables in characters if stdout is not a terminal."""


class _Console(Console):
    """A console that escapes control characters of text."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(visible(text), *arguments, **options)


class Output:
    """Writes text and tables to stdout, or only the JSON line, and progress to stderr if it is a
    terminal."""

    def __init__(self, *, json_only: bool, silent: bool = False) -> None:
        """`silent`: show nothing, because another process shows everything."""
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
        """Print text or tables, unless --json is set.

        Lines of text are wrapped only on a terminal.
        """
        if not self.json_only and not self.silent:
            for thing in things:
                self._console.print(thing, soft_wrap=isinstance(thing, str) and not self._terminal)

    def result(self, values: dict[str, Any]) -> None:
        """Print the JSON line if --json is set. Paths become text, NaN and infinities null."""
        if self.json_only and not self.silent:
            print(json.dumps(finite({**values, **self.facts}), default=str, allow_nan=False))

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a status while the block runs.

        Yields a function that shows further text.
        """
        if not self._shows_progress:
            yield lambda newest: None
            return
        with self._errors.status(what) as status:
            yield lambda newest: status.update(f"{what}: {newest}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar with the remaining time. Yields a function that adds a number of
        finished steps."""
        with Progress(
            console=self._errors, transient=True, disable=not self._shows_progress
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)


def check_output(name: str, path: Path) -> None:
    """Raises ConfigError if the file of an option cannot be written. Its folders may be missing."""
    if path.is_dir():
        raise ConfigError(f"{name} is the folder {path}. Give the path of a file to write.")
    if path.exists() and not path.is_file():
        return  # a pipe or a device
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name} is {path}, and {nearest} is not a folder in which this user can write. Give "
            "another path."
        )


def table(
    title: str, rows: Iterable[Iterable[object]], columns: Iterable[str] = (), caption: str = ""
) -> Table:
    """Make a table. The first column is aligned left, the others right.

    Without `columns` it has no header.
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
    """Flat dictionary of a command's options, for the JSON line."""
    found: dict[str, Any] = {}
    for name, value in asdict(command).items():
        found |= value if isinstance(value, dict) else {name: value}
    return found
