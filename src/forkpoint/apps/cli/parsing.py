"""Arguments of a command line as dataclasses, and wrong ones as one message. Imports no torch."""

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import tyro
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, HelptextFromCommentsOff, OmitArgPrefixes

from forkpoint.apps.cli.last_resort import USER_ERROR, say

SIZES = ("--memory-budget", "--memory-limit")


def read_arguments(kind: Any, arguments: list[str], *, prog: str, **options: Any) -> Any:
    """The arguments as `kind`, a dataclass or a union of them; `options` are those of tyro.

    Raises:
        SystemExit: help was asked for, or the arguments are wrong; tyro has printed which.
    """
    # Help is in docstrings; looking for it in comments would take half the time.
    config = (FlagCreatePairsOff, HelptextFromCommentsOff, OmitArgPrefixes)
    return tyro.cli(kind, prog=prog, args=arguments, config=config, **options)


def option_names(kind: Any) -> list[str]:
    """The options of a command, those of its parts as well: --max-microbatch-tokens, ..."""
    found: list[str] = []
    for field in fields(kind):
        if isinstance(field.default_factory, type):
            found += option_names(field.default_factory)
        else:
            found.append(f"--{field.name.replace('_', '-')}")
    return found


def options_given(arguments: list[str]) -> list[str]:
    """The names of the options among the arguments, as `option_names` spells them."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # Numbers may be negative; -h is not among what is asked here.
    names = (a.partition("=")[0] for a in arguments[:end] if re.match(r"--?[A-Za-z]", a))
    return [name.replace("_", "-") for name in names]


def with_units(arguments: list[str]) -> list[str]:
    """The arguments with the units of sizes that were written apart: --memory-budget 70 GB."""
    joined: list[str] = []
    for word in arguments:
        size = len(joined) > 1 and joined[-2].replace("_", "-") in SIZES
        if size and re.fullmatch(r"\d+(\.\d*)? [KMGT]i?B", f"{joined[-1]} {word}", re.IGNORECASE):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def full_help(kind: Any, *, prog: str) -> str:
    """Help with every option of a command. Paragraphs are broken where tyro leaves them long."""
    # Frames are of lines where the output can write them.
    shown = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, errors="replace")
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        read_arguments(kind, ["--help"], prog=prog)
    shown.seek(0)
    lines = [line.rstrip() for line in Text.from_ansi(shown.read()).plain.splitlines()]
    width = shutil.get_terminal_size().columns
    return "\n".join(
        part
        for line in lines
        for part in ([line] if len(line) <= width else textwrap.wrap(line, width))
    )


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
    text = "\n".join(line for line in lines if line.strip("╰╯─-"))
    return re.sub(r"For full helptext, (?:run|see):?\s+(.+) --help", r"See \1 --help.", text)
