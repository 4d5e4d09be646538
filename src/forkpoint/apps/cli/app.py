"""Reading the command line. Imports no torch."""

import sys
from typing import Any

from forkpoint import __version__
from forkpoint.apps.cli import colours
from forkpoint.apps.cli.calibrate import Calibrate
from forkpoint.apps.cli.demo import Demo
from forkpoint.apps.cli.doctor import Doctor
from forkpoint.apps.cli.losses import explained_options
from forkpoint.apps.cli.output import write_anything
from forkpoint.apps.cli.parsing import (
    full_help,
    option_names,
    options_given,
    read_arguments,
    run_command,
    with_units,
)
from forkpoint.apps.cli.plan import Plan
from forkpoint.apps.cli.replay import Replay
from forkpoint.apps.cli.report import Report
from forkpoint.apps.cli.short_help import OF_EVERY_COMMAND, PAGES, columns, overview
from forkpoint.apps.cli.suggestions import suggested
from forkpoint.apps.cli.verify import Verify
from forkpoint.errors import ConfigError

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "plan": Plan,
    "replay": Replay,
    "report": Report,
    "verify": Verify,
    "calibrate": Calibrate,
    "doctor": Doctor,
}
MOVED = {"bench": "python -m benchmarks, in a checkout of the repository"}
"""Commands that there were, and how what they did is run now."""
OF_A_LOSS = ("replay", "verify")
HELP = ("-h", "--help")
ALL_HELP = "--help-all"


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 a check failed, 2 wrong arguments,
    3 nothing to verify."""
    write_anything(sys.stdout)
    arguments = colours.take_off(arguments)
    if arguments == ["--version"]:
        print(f"forkpoint {__version__}")
        return 0
    if (text := _help(arguments)) is not None:
        print(text, flush=True)
        return 0
    code = run_command(_read, arguments, _remarks)
    sys.stdout.flush()
    return code


def _help(arguments: list[str]) -> str | None:
    """Help, where it is asked for: a screen, or all of it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    everything = ALL_HELP in arguments[:end]
    if arguments and not everything and not set(HELP) & set(arguments[:end]):
        return None
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        return _all_of(name) if everything else PAGES[name].text(name)
    if name and not name.startswith("-"):
        return None
    return "\n\n".join([overview(), *map(_all_of, COMMANDS)]) if everything else overview()


def _all_of(name: str) -> str:
    every = "\n".join(columns(OF_EVERY_COMMAND))
    return f"{full_help(COMMANDS[name], prog=f'forkpoint {name}')}\nof every command:\n{every}"


def _read(arguments: list[str]) -> Any:
    name = arguments[0]
    if name in COMMANDS:
        _check_options(name, arguments[1:])
        prog = f"forkpoint {name}"
        return read_arguments(COMMANDS[name], with_units(arguments[1:]), prog=prog)
    if name in MOVED:
        raise ConfigError(f"forkpoint {name} is no longer a command; run {MOVED[name]}.")
    if name.startswith("-"):
        raise ConfigError(
            f"{name} stands before a command; the command comes first, as in forkpoint plan FILE. "
            f"Commands are {', '.join(COMMANDS)}."
        )
    raise ConfigError(
        f"there is no command {name!r}{suggested(name, COMMANDS)}; there are "
        f"{', '.join(COMMANDS)}. "
        "forkpoint --help says what each does."
    )


def _check_options(name: str, arguments: list[str]) -> None:
    """Raises ConfigError for an option that the command does not have, before all else: what is
    missing besides may be what the option was to give."""
    known = option_names(COMMANDS[name])
    for option in options_given(arguments):
        if option in known:
            continue
        remarks = _remarks([name, *arguments])
        others = [other for other in COMMANDS if option in option_names(COMMANDS[other])]
        hint = "" if remarks else suggested(option, known)
        if others:
            hint = f"; {', '.join(others)} {'have' if len(others) > 1 else 'has'} it"
        message = f"forkpoint {name} has no option {option}{hint}."
        see = f"forkpoint {name} {ALL_HELP} lists its options."
        raise ConfigError("\n".join([f"{message} {see}", *remarks]))


def _remarks(arguments: list[str]) -> list[str]:
    """Lines on options of other libraries' losses, which of ours they mean."""
    return explained_options(arguments) if arguments[0:1] and arguments[0] in OF_A_LOSS else []
