"""Reading the command line. Imports no torch."""

import difflib
import functools
import operator
import sys
from collections.abc import Iterable
from typing import Annotated, Any

from tyro.conf import subcommand

from forkpoint import __version__
from forkpoint.cli.calibrate import Calibrate
from forkpoint.cli.demo import Demo
from forkpoint.cli.doctor import Doctor
from forkpoint.cli.losses import explained_options
from forkpoint.cli.output import write_anything
from forkpoint.cli.parsing import read_arguments, run_command
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
    "calibrate": Calibrate,
    "doctor": Doctor,
}
MOVED = {"bench": "python -m benchmarks, in a checkout of the repository"}
"""Commands that there were, and how what they did is run now."""
OF_A_LOSS = ("replay", "verify")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 a check failed, 2 wrong arguments."""
    write_anything(sys.stdout)
    if arguments == ["--version"]:
        print(f"forkpoint {__version__}")
        return 0
    code = run_command(_read, arguments or ["--help"], _remarks)
    sys.stdout.flush()
    return code


def _read(arguments: list[str]) -> Any:
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        return read_arguments(COMMANDS[name], arguments[1:], prog=f"forkpoint {name}")
    if name in MOVED:
        raise ConfigError(f"forkpoint {name} is no longer a command; run {MOVED[name]}.")
    if name and not name.startswith("-"):
        raise ConfigError(
            f"there is no command {name!r}{_suggested(name, COMMANDS)}; there are "
            f"{', '.join(COMMANDS)}. "
            "forkpoint --help says what each does."
        )
    # No command: tyro shows the list, with the first sentence of each, or says what is wrong.
    listed = [
        Annotated[kind, subcommand(name, description=(kind.__doc__ or "").split("\n\n")[0])]
        for name, kind in COMMANDS.items()
    ]
    every: Any = functools.reduce(operator.or_, listed)
    return read_arguments(every, arguments, prog="forkpoint", description=DESCRIPTION)


def _remarks(arguments: list[str]) -> list[str]:
    """Lines on options of other libraries' losses, which of ours they mean."""
    return explained_options(arguments) if arguments[0:1] and arguments[0] in OF_A_LOSS else []


def _suggested(word: str, known: Iterable[str]) -> str:
    """The known word that a mistyped one is most like, as part of a message; nothing if none is."""
    lower = {name.lower(): name for name in known}
    # Half of the letters in order: "repaly", "veryfy", "pln".
    found = difflib.get_close_matches(word.lower().lstrip("_-"), lower, n=1, cutoff=0.5)
    if not found:
        found = [name for name in lower if len(word) > 2 and name.startswith(word.lower())][:1]
    return f" (did you mean {lower[found[0]]!r}?)" if found else ""
