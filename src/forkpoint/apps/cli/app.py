"""Commands by name, with arguments that tyro parses. Imports no torch."""

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Any

import tyro
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, HelptextFromCommentsOff, OmitArgPrefixes

from forkpoint import __version__
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError

# Help is in docstrings. The search for help in comments would take half of the time.
MOST_CHARACTERS = 600
"""Largest part of a message about arguments that is shown. Arguments can be long."""
TYRO_CONFIG = (FlagCreatePairsOff, HelptextFromCommentsOff, OmitArgPrefixes)


@dataclass(frozen=True, kw_only=True)
class App:
    """A program with commands. Only the command that runs is imported."""

    prog: str
    about: str
    commands: Mapping[str, str]
    """Module and class of each command, by name. The fields of the class are the options."""

    def command(self, name: str) -> Any:
        """The class of a command. Raises ConfigError for an unknown name."""
        if name not in self.commands:
            raise ConfigError(
                f"there is no command {name!r}; there are {', '.join(self.commands)}. "
                f"{self.prog} --help says what each does."
            )
        module, _, kind = self.commands[name].partition(":")
        return getattr(importlib.import_module(module), kind)

    def run(self, arguments: list[str]) -> int:
        """Run one command and return its exit code.

        Raises SystemExit after the help of a command, and ConfigError for wrong arguments.
        """
        if not arguments or arguments[0] in ("-h", "--help"):
            found = Table(show_header=False, box=None)
            for name in self.commands:
                found.add_row(name, self.command(name).__doc__.partition("\n")[0])
            usage = f"usage: {self.prog} COMMAND [OPTIONS]; COMMAND --help lists its options"
            Output(json_only=False).show(usage, found, self.about)
            return 0
        if arguments == ["--version"]:
            print(f"forkpoint {__version__}")
            return 0
        for before, word in pairwise(arguments):
            # An unset variable of a shell. As a path it would be the present folder.
            if found := re.fullmatch(r"(--[\w-]+=)?", word):
                where = found[1] or f"after {before}"
                raise ConfigError(
                    f"the argument {where} is empty. Give a value, or leave the option out. "
                    f"{self.prog} {arguments[0]} --help lists the options."
                )
        name, *rest = arguments
        return _parsed(self.command(name), f"{self.prog} {name}", rest).run()


def _parsed(command: Any, prog: str, arguments: list[str]) -> Any:
    """Make a command from its arguments. Raises ConfigError, with tyro's reason, for wrong ones."""
    shown = StringIO()
    try:
        with redirect_stderr(shown):
            made = tyro.cli(command, prog=prog, args=arguments, config=TYRO_CONFIG)
    except SystemExit as stop:
        if not stop.code:
            raise
        reason = reason_in(shown.getvalue())
        raise ConfigError(f"{reason} {prog} --help lists the options.") from None
    print(shown.getvalue(), end="", file=sys.stderr)
    return made


def reason_in(box: str) -> str:
    """The message in a box that tyro has drawn, in which the help of options follows the message
    below a rule."""
    # The first line and the last line are the frame.
    lines = re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:-1]
    parts: list[list[str]] = [[]]
    for line in (line.strip("│| ") for line in lines):
        if line and set(line) <= {"─", "-"}:
            parts.append([])
        elif line:
            parts[-1].append(line)
    said, *below = [part for part in parts if part] or [[]]
    if "Got errors:" in said:  # one for each type of an option that takes several
        said = said[: said.index("Got errors:")]
    reason = re.sub(r"^Error parsing (\w+: )?", "", " ".join(said)).rstrip(".")
    reason = reason or "the arguments are wrong"
    if len(reason) > MOST_CHARACTERS:
        reason = f"{reason[: MOST_CHARACTERS // 2]}...{reason[-MOST_CHARACTERS // 2 :]}"
    for part in below:
        if part[0] == "Perhaps you meant:":
            near = [line.split()[0] for line in part if line.startswith("--")]
            return f"{reason}. Perhaps you meant {' or '.join(near)}."
    return f"{reason}."


NAMES = ("plan", "replay", "report", "verify", "calibrate", "doctor")
FORKPOINT = App(
    prog="forkpoint",
    about="Begin with forkpoint plan FILE on your rollouts. --version prints the version. Every "
    "command takes --debug, which shows the traceback of an error. Exit codes: 0 done, 1 a check "
    "failed, 2 invalid arguments or files, 3 nothing to verify, 70 a defect of forkpoint, 130 "
    "interrupted.",
    commands={name: f"forkpoint.apps.cli.{name}:{name.capitalize()}" for name in NAMES},
)
