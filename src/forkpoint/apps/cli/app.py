"""Commands by name, with arguments that tyro parses. Imports no torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tyro
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, HelptextFromCommentsOff, OmitArgPrefixes

from forkpoint import __version__
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError

# Help is in docstrings. The search for help in comments would take half of the time.
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

        Raises SystemExit after the help of a command (0) and for wrong arguments (2), which tyro
        has explained.
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
        name, *rest = arguments
        prog = f"{self.prog} {name}"
        return tyro.cli(self.command(name), prog=prog, args=rest, config=TYRO_CONFIG).run()


NAMES = ("demo", "plan", "replay", "report", "verify", "calibrate", "doctor")
FORKPOINT = App(
    prog="forkpoint",
    about="Begin with forkpoint demo, then forkpoint plan FILE on your rollouts. --version prints "
    "the version. Every command takes --debug, which shows the traceback of an error. Exit codes: "
    "0 done, 1 a check failed, 2 invalid arguments or files, 3 nothing to verify, 70 a defect of "
    "forkpoint, 130 interrupted.",
    commands={name: f"forkpoint.apps.cli.{name}:{name.capitalize()}" for name in NAMES},
)
