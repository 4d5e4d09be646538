"""Errors of a command as one message on stderr and an exit code. Imports no torch.

Errors of `forkpoint.errors`, of the operating system and of memory exit with 2. Any other error is
a defect of forkpoint and exits with 70. `--debug`, or FORKPOINT_DEBUG=1, shows the traceback.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from forkpoint import __version__
from forkpoint.apps.cli.text import visible
from forkpoint.errors import ForkpointError

OUTPUT_CLOSED, USER_ERROR, INTERRUPTED = 1, 2, 130
INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""
DEBUG = "--debug"
MAX_REASON_CHARACTERS = 300


def guarded(run: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, also if the command raises.

    Args:
        run: a command line; it gets the arguments without `--debug`.
        argv: the arguments, by default those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG in given or os.environ.get("FORKPOINT_DEBUG", "0") not in ("", "0")
    # Streams are None if the process was started without them.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A locale without UTF-8 cannot encode some characters of tables and file names.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run([word for word in given if word != DEBUG])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return OUTPUT_CLOSED  # the reader of the output (head, a pager) has closed it
    except SystemExit as stop:  # raised by tyro, and by rich for a broken pipe
        return stop.code if isinstance(stop.code, int) else OUTPUT_CLOSED
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if debug:
            print_error("".join(traceback.format_exception(error)).rstrip("\n"))
        code, message = _explained(error)
        print_error(message)
        return code


def print_error(message: str) -> None:
    """Write a message to stderr, with control characters as escapes."""
    with suppress(OSError, ValueError):  # stderr is a broken pipe, or closed
        print(visible(message), file=sys.stderr, flush=True)


def _explained(error: BaseException) -> tuple[int, str]:
    if isinstance(error, ForkpointError):
        return USER_ERROR, f"error: {error}"
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text}".rstrip(": .")
    if len(reason) > MAX_REASON_CHARACTERS:
        # The message of another process ends with its cause.
        half = MAX_REASON_CHARACTERS // 2
        reason = f"{reason[:half]}…{reason[1 - half :]}"
    # torch raises a RuntimeError if the host has no memory left.
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return USER_ERROR, (
            f"error: the memory of this machine ran out ({reason}). Take fewer rollouts (--limit), "
            "shorter microbatches (--max-microbatch-tokens) or a smaller model."
        )
    if isinstance(error, OSError):
        if error.filename is not None:
            reason = f"{error.filename} cannot be read or written: {error.strerror}"
        return USER_ERROR, f"error: {reason}. Check the path, its permissions and the free space."
    return INTERNAL_ERROR, (
        f"internal error: {reason}. This is a defect of forkpoint {__version__}: report it with "
        f"the command and its output with {DEBUG}."
    )
