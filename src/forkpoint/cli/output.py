"""Output of a command: tables for people, then one JSON line. Imports no torch."""

import codecs
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from forkpoint.report.text import visible

NARROW = 100
_FRAMES = {**dict.fromkeys("─━═╌╍┄┅┈┉", "-"), **dict.fromkeys("│┃║╎╏┆┇┊┋", "|"), "…": "."}


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Substitutes for characters that an encoding lacks: frames of tables stay frames."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    plainer = (_FRAMES.get(c, "+" if "\u2500" <= c <= "\u257f" else "?") for c in lacking)
    return "".join(plainer), error.end


codecs.register_error("forkpoint", _plainer)


def write_anything(stream: Any) -> None:
    """Let a text stream write what its encoding lacks in other characters, where it would raise.

    That is so where output goes to a file or a pipe under a locale without UTF-8, as on Windows,
    and for names of files that are no UTF-8.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="forkpoint")


class _Console(Console):
    """A console on which text is only shown: it cannot steer the terminal."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(visible(text), *arguments, **options)


class Output:
    """Text and tables to stdout, progress to stderr where that is a terminal, the result last."""

    def __init__(self, *, json_only: bool) -> None:
        self.json_only = json_only
        self.facts: dict[str, Any] = {}
        """Further fields of the JSON line, at its end."""
        self.width: int = NARROW if not sys.stdout.isatty() else Console().width
        self._console = _Console(width=self.width, highlight=False, markup=False)
        self._errors = _Console(stderr=True, highlight=False, markup=False)

    def show(self, *things: RenderableType) -> None:
        """Print text or tables, unless only the JSON line was asked for."""
        if not self.json_only:
            for thing in things:
                self._console.print(thing, soft_wrap=isinstance(thing, str))

    def result(self, values: dict[str, Any]) -> None:
        """Print the JSON line. Numbers that JSON lacks (NaN, infinities) become null."""
        print(json.dumps(plain({**values, **self.facts}), allow_nan=False))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is being done, on a terminal, while the block runs."""
        if not self._errors.is_terminal:
            yield
            return
        with self._errors.status(what):
            yield

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar on a terminal with the time left; call what it yields with the steps just done."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._errors,
            transient=True,
            disable=not self._errors.is_terminal,
        )
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)


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
