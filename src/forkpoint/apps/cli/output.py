"""Output of a command: tables for people, or one JSON line. Imports no torch."""

import codecs
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

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

from forkpoint.apps.cli import colours
from forkpoint.apps.cli.progress import duration, lines, steps_line
from forkpoint.apps.report.text import visible

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
        rendered = super().render_str(visible(text), *arguments, **options)
        return colours.colour(rendered) if self.color_system else rendered


def _console(stream: TextIO, **options: Any) -> _Console:
    """A console that colours where that is wanted, whatever rich would find out by itself."""
    coloured = colours.wanted(stream)
    return _Console(
        file=stream,
        color_system="standard" if coloured else None,
        no_color=not coloured,
        highlight=False,
        markup=False,
        **options,
    )


class Output:
    """Text and tables to stdout, or the JSON line alone; progress to stderr."""

    def __init__(self, *, json_only: bool, silent: bool = False) -> None:
        """`silent`: another process speaks for this one too; errors are not shown here anyway."""
        self.json_only = json_only
        self.silent = silent
        self.facts: dict[str, Any] = {}
        """Further fields of the JSON line, at its end."""
        self._terminal = sys.stdout.isatty()
        self.width: int = NARROW if not self._terminal else Console().width
        self._console = _console(sys.stdout, width=self.width)
        # A bar needs a terminal that can move its cursor, which others are told to be one.
        self._bars = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._errors = _console(sys.stderr, force_terminal=self._bars)

    def show(self, *things: RenderableType) -> None:
        """Print text or tables, unless only the JSON line was asked for.

        Lines of text are broken on a terminal alone, between words.
        """
        if not self.json_only and not self.silent:
            for thing in things:
                self._console.print(thing, soft_wrap=isinstance(thing, str) and not self._terminal)

    def result(self, values: dict[str, Any]) -> None:
        """Print the JSON line, if it was asked for. NaN and infinities become null."""
        line = json.dumps(plain({**values, **self.facts}), allow_nan=False)
        if self.json_only and not self.silent:
            print(line)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs: lines of text where there is no terminal."""
        if self.silent:
            yield
            return
        with (
            self._errors.status(what)
            if self._bars
            else lines(lambda seconds: f"{what}: {duration(seconds)}")
        ):
            yield

    @contextmanager
    def following(self, what: str) -> Iterator[Callable[[str], None]]:
        """Say how far something is while the block runs, as `waiting` does; call what it yields
        with the newest text."""
        text = what
        if self._bars:
            with self._errors.status(what) as status:
                yield lambda newest: status.update(f"{what}: {newest}")
            return

        def follow(newest: str) -> None:
            nonlocal text
            text = f"{what}: {newest}"

        with lines(lambda seconds: f"{text}, {duration(seconds)}"):
            yield follow

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar on a terminal with the time left, lines of text elsewhere; call what it yields with
        the steps just done."""
        if self.silent:
            yield lambda steps: None
            return
        if not self._bars:
            done = 0

            def count(steps: int) -> None:
                nonlocal done
                done += steps

            with lines(lambda seconds: steps_line(what, done, total, seconds)):
                yield count
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
