"""The commands, and their arguments as tyro reads them. Imports no torch."""

from typing import Any

from tyro.extras import SubcommandApp

from forkpoint import __version__
from forkpoint.apps.cli.calibrate import Calibrate
from forkpoint.apps.cli.demo import Demo
from forkpoint.apps.cli.doctor import Doctor
from forkpoint.apps.cli.options import TYRO_CONFIG
from forkpoint.apps.cli.plan import Plan
from forkpoint.apps.cli.replay import Replay
from forkpoint.apps.cli.report import Report
from forkpoint.apps.cli.verify import Verify

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "plan": Plan,
    "replay": Replay,
    "report": Report,
    "verify": Verify,
    "calibrate": Calibrate,
    "doctor": Doctor,
}
ABOUT = """Train language models on rollouts that share tokens, computing every shared token once.

Begin with forkpoint demo, then forkpoint plan FILE on your rollouts. forkpoint --version prints the
version. Every command takes --debug, which shows the traceback of an error. Exit codes: 0 done, 1 a
check failed, 2 an error in what was given, 3 nothing to verify, 70 a defect of forkpoint, 130
interrupted."""


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    Raises SystemExit after help (0) and for wrong arguments (2), which tyro has explained.
    """
    if arguments == ["--version"]:
        print(f"forkpoint {__version__}")
        return 0
    app = SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(command, name=name)
    command = app.cli(
        prog="forkpoint", description=ABOUT, args=arguments or ["--help"], config=TYRO_CONFIG
    )
    return command.run()
