"""The end of every command: each error becomes one message and an exit code. Imports no torch.

Errors of `forkpoint.errors`, what the system refuses and memory that runs out are the user's to
mend and exit with 2. Whatever else is raised is a defect of forkpoint: one line that begins with
`internal error` and says what to report, and exit code 70. `--debug`, or FORKPOINT_DEBUG=1, shows
the traceback of either.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from forkpoint import __version__
from forkpoint.apps.report.text import cut, visible
from forkpoint.errors import ForkpointError

OUTPUT_CLOSED = 1
USER_ERROR = 2
INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130

DEBUG = "--debug"
DEBUG_VARIABLE = "FORKPOINT_DEBUG"
TRACKERS = ("issues", "issue tracker", "bug tracker", "tracker")
"""Labels under which a package's metadata names the address for reports."""
MOST_REASON_CHARACTERS = 300
_WORKING_ON = "working on "
# torch raises plain RuntimeErrors for memory of the host that it cannot get.
_TORCH_MEMORY = "DefaultCPUAllocator"


def guarded(run: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """The exit code of `run`, called with the arguments, whatever it raises.

    Args:
        run: a command; given the arguments without `--debug`.
        argv: the arguments, by default those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if DEBUG in arguments[:end]:
        debug = True
        arguments = [a for a in arguments[:end] if a != DEBUG] + arguments[end:]
    _open_streams()
    try:
        return run(arguments)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return OUTPUT_CLOSED  # whoever read our output (head, a pager) has enough
    except SystemExit as stop:  # rich exits so where the pipe breaks below a table
        return stop.code if isinstance(stop.code, int) else OUTPUT_CLOSED
    except BaseException as error:  # panics of libraries in Rust are no Exceptions
        if debug:
            say("".join(traceback.format_exception(error)).rstrip("\n"))
        code, message = explained(error)
        say(message)
        return code


@contextmanager
def working_on(path: Path | None) -> Iterator[None]:
    """Name a file in the message of a defect, or of memory that runs out, within the block."""
    try:
        yield
    except BaseException as error:
        if path is not None and not isinstance(error, ForkpointError):
            error.add_note(f"{_WORKING_ON}{path}")
        raise


def explained(error: BaseException) -> tuple[int, str]:
    """The exit code for an error, and what is said of it."""
    if isinstance(error, ForkpointError):
        return USER_ERROR, f"error: {error}"
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_WORKING_ON))
    files = ", ".join(dict.fromkeys(note.removeprefix(_WORKING_ON) for note in notes))
    while_at = f" while working on {files}" if files else ""
    if isinstance(error, MemoryError) or _TORCH_MEMORY in str(error):
        return USER_ERROR, (
            f"error: the memory of this machine ran out{while_at} ({_reason(error)}). Take a part "
            "of the rollouts (--limit), shorter microbatches (--max-microbatch-tokens) or "
            "a smaller model, or run it on a machine with more memory."
        )
    if isinstance(error, OSError):
        return USER_ERROR, f"error: {_of_system(error)}"
    return INTERNAL_ERROR, (
        f"internal error: {_reason(error)}{while_at}. This is a defect of forkpoint {__version__}: "
        f"report it to {_tracker()}, with the command and what it shows with {DEBUG}."
    )


def _tracker() -> str:
    """Where defects are reported: an address of the package's metadata, where it has one."""
    try:
        urls = metadata.metadata("forkpoint").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        urls = []
    for label, _, url in (entry.partition(", ") for entry in urls):
        if label.lower() in TRACKERS:
            return url
    return "the forkpoint developers"


def say(message: str) -> None:
    """Write a message to stderr, if anybody can read it, without steering their terminal."""
    with suppress(OSError, ValueError):  # stderr is a broken pipe, or closed
        print(visible(message), file=sys.stderr, flush=True)


def _reason(error: BaseException) -> str:
    """The type and the message of an error, on one line."""
    message = " ".join(str(error).split())
    return cut(f"{type(error).__name__}: {message}".rstrip(": ."), MOST_REASON_CHARACTERS)


def _of_system(error: OSError) -> str:
    """The error of the system, with its path."""
    if error.strerror is None:
        return str(error)
    if error.filename is None:
        return (
            f"the system refuses to read or write ({error.strerror}). Look at where the output "
            "goes, and at the room on that disk."
        )
    return (
        f"{error.filename} cannot be read or written: {error.strerror}. Look at the path, who may "
        "use it, and the room on its disk."
    )


def _open_streams() -> None:
    """Give the process streams that it was started without; Python has None for them.

    In the order of their numbers, since a file that is opened takes the lowest that is free.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
