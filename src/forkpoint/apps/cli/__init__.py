"""The command line: `forkpoint`, or `python -m forkpoint`."""

from collections.abc import Sequence

from forkpoint.apps.cli.exit_codes import guarded

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` are its arguments, by default those of the process.

    Returns the exit code: 0 done, 1 a check failed, 2 invalid arguments or files, 3 nothing to
    verify, 70 a defect of forkpoint, 130 interrupted. Each error is a message on stderr. Nothing is
    raised.
    """
    return guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    # The imports take half a second, in which the user may interrupt.
    from forkpoint.apps.cli.app import FORKPOINT

    return FORKPOINT.run(arguments)
