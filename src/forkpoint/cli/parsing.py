"""Arguments of a command line as dataclasses, and wrong ones as one message. Imports no torch."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import tyro
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from forkpoint.cli.last_resort import USER_ERROR, say


def read_arguments(kind: Any, arguments: list[str], *, prog: str, **options: Any) -> Any:
    """The arguments as `kind`, a dataclass or a union of them; `options` are those of tyro.

    Raises:
        SystemExit: help was asked for, or the arguments are wrong; tyro has printed which.
    """
    config = (FlagCreatePairsOff, OmitArgPrefixes)
    return tyro.cli(kind, prog=prog, args=arguments, config=config, **options)


def run_command(
    read: Callable[[list[str]], Any],
    arguments: list[str],
    remarks: Callable[[list[str]], list[str]] = lambda _: [],
) -> int:
    """Run the command that `read` makes of the arguments, and return its exit code.

    The exit code is 0 where help was asked for, and 2 where the arguments are wrong. `remarks`
    gives lines to add to the message then.
    """
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            command = read(arguments)
    except SystemExit as stop:
        if not stop.code:
            return 0
        lines = [_unframed(report.getvalue()), *remarks(arguments)]
        say("error: " + "\n".join(lines))
        return USER_ERROR
    return command.run()


def _unframed(report: str) -> str:
    """The text of tyro's report of wrong arguments, without its title, its frame and colours."""
    lines = [line.strip("│ ") for line in Text.from_ansi(report).plain.splitlines()[1:]]
    return "\n".join(line for line in lines if line.strip("╰╯─-"))
