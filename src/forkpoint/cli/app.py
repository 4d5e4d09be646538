"""Reading the command line. Imports no torch."""

import contextlib
import functools
import io
import operator
import sys
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
from forkpoint.cli.last_resort import USER_ERROR, say
from forkpoint.cli.losses import explained_options
from forkpoint.cli.output import write_anything
from forkpoint.cli.plan import Plan
from forkpoint.cli.replay import Replay
from forkpoint.cli.report import Report
from forkpoint.cli.verify import Verify
from forkpoint.errors import ConfigError

DESCRIPTION = """Train language models on rollouts that share tokens, computing every shared token \
once.

Rollouts are prompts with sampled responses, as reinforcement learning trains on them; several \
responses to one prompt form a group and share its tokens. Begin with `forkpoint demo`, then \
`forkpoint plan FILE` to see what sharing would save on your own rollouts.

Exit codes: 0 done, 1 a check failed, 2 an error in what was given, 70 a defect of forkpoint, 130 \
interrupted. With --debug, or FORKPOINT_DEBUG=1, an error comes with its traceback."""

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
OF_A_LOSS = ("replay", "verify")
Command = Demo | Plan | Replay | Report | Verify | Bench | Calibrate | Doctor | Steps | PlotBench


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 a check failed, 2 wrong arguments."""
    write_anything(sys.stdout)
    if arguments == ["--version"]:
        print(f"forkpoint {__version__}")
        return 0
    command = _parse(arguments)
    code = command if isinstance(command, int) else command.run()
    sys.stdout.flush()
    return code


def _parse(arguments: list[str]) -> Command | int:
    """The command, or an exit code where help was asked for or the arguments are wrong."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return _read(arguments)
    except SystemExit as stop:
        if not stop.code:
            return 0
        lines = [_unframed(report.getvalue())]
        if arguments[0:1] and arguments[0] in OF_A_LOSS:
            lines += explained_options(arguments)
        say("error: " + "\n".join(lines))
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


def _unframed(report: str) -> str:
    """The text of tyro's report of wrong arguments, without its title, its frame and colours."""
    lines = [line.strip("│ ") for line in Text.from_ansi(report).plain.splitlines()[1:]]
    return "\n".join(line for line in lines if line.strip("╰╯─-"))
