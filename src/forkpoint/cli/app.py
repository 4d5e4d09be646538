"""Reading the command line, and what its commands' errors become. Imports no torch."""

import contextlib
import functools
import io
import operator
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, subcommand

from forkpoint import __version__
from forkpoint.cli.bench import Bench
from forkpoint.cli.bench_steps import BENCHES, Steps
from forkpoint.cli.bench_steps import Plot as PlotBench
from forkpoint.cli.calibrate import Calibrate
from forkpoint.cli.demo import Demo
from forkpoint.cli.doctor import Doctor
from forkpoint.cli.output import write_anything
from forkpoint.cli.plan import Plan
from forkpoint.cli.replay import Replay
from forkpoint.cli.report import Report
from forkpoint.cli.verify import Verify
from forkpoint.errors import ConfigError, ForkpointError

DESCRIPTION = """Train language models on rollouts that share tokens, computing every shared token \
once.

Rollouts are prompts with sampled responses, as reinforcement learning trains on them; several \
responses to one prompt form a group and share its tokens. Begin with `forkpoint demo`, then \
`forkpoint plan FILE` to see what sharing would save on your own rollouts.

Exit codes: 0 done, 1 a check failed, 2 an error in what was given, 130 interrupted."""

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "plan": Plan,
    "replay": Replay,
    "report": Report,
    "verify": Verify,
    "bench": Bench,
    "calibrate": Calibrate,
    "doctor": Doctor,
}
Command = Demo | Plan | Replay | Report | Verify | Bench | Calibrate | Doctor | Steps | PlotBench

OUTPUT_CLOSED = 1
USER_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` are its arguments, by default those of the process.

    Returns the exit code: 0 done, 1 a check failed, 2 an error in what was given, 130 interrupted.
    Errors in what was given are one message on stderr; any other is a defect and is raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    write_anything(sys.stdout)
    try:
        if arguments == ["--version"]:
            print(f"forkpoint {__version__}")
            return 0
        command = _parse(arguments)
        code = command if isinstance(command, int) else command.run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (head, a pager) has enough. The code is the one that rich exits
        # with where the pipe breaks below a table.
        return OUTPUT_CLOSED
    except ForkpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        print(f"error: {_of_system(error)}", file=sys.stderr)
        return USER_ERROR


def _parse(arguments: list[str]) -> Command | int:
    """The command, or an exit code where help was asked for or the arguments are wrong."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return _read(arguments)
    except SystemExit as stop:
        if not stop.code:
            return 0
        print(f"error: {_unframed(report.getvalue())}", file=sys.stderr)
        return USER_ERROR


def _read(arguments: list[str]) -> Command:
    config = (FlagCreatePairsOff, OmitArgPrefixes)
    name = arguments[0] if arguments else ""
    if name == "bench" and arguments[1:2] and arguments[1] in BENCHES:
        kind, prog = BENCHES[arguments[1]], f"forkpoint bench {arguments[1]}"
        return tyro.cli(kind, prog=prog, args=arguments[2:], config=config)
    if name in COMMANDS:
        return tyro.cli(COMMANDS[name], prog=f"forkpoint {name}", args=arguments[1:], config=config)
    if name and not name.startswith("-"):
        raise ConfigError(
            f"there is no command {name!r}; there are {', '.join(COMMANDS)}. "
            "forkpoint --help says what each does."
        )
    # No command: tyro shows the list, with the first sentence of each, or says what is wrong.
    listed = [
        Annotated[kind, subcommand(name, description=(kind.__doc__ or "").split("\n\n")[0])]
        for name, kind in COMMANDS.items()
    ]
    every: Any = functools.reduce(operator.or_, listed)
    return tyro.cli(every, prog="forkpoint", description=DESCRIPTION, args=arguments, config=config)


def _of_system(error: OSError) -> str:
    """What the system refused, on which path."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return (
        f"{error.filename} cannot be read or written: {error.strerror}. Look at the path, who may "
        "use it, and the room on its disk."
    )


def _unframed(report: str) -> str:
    """The text of tyro's report of wrong arguments, without its title, its frame and colours."""
    lines = [line.strip("│ ") for line in Text.from_ansi(report).plain.splitlines()[1:]]
    return "\n".join(line for line in lines if line.strip("╰╯─-"))
