"""Runs commands each in a process of its own, in limited memory, and measures what they took.

One interpreter imports forkpoint, and forks for every command, which then takes milliseconds.

As a script it reads commands from its input, one JSON object a line, and writes an outcome for
each.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
DEFECT = 70
PRELOADED = "forkpoint.cli.app,docstring_parser,rich.console,rich.table,asyncio,unittest.mock"
"""Modules that every command imports: once, in place of a quarter of a second a command."""
MOST_WALL_SECONDS = 300.0
"""After which a command is killed; the bar is on the processor's time, whatever runs besides."""


@dataclass(frozen=True)
class Outcome:
    """Result of a command.

    code: its exit code; minus the signal that ended it; DEFECT for an exception of another kind
        than the command line answers, whose traceback is at the end of `err`.
    cpu_seconds, peak_bytes: processor time, and memory at most, of which `base_bytes` had been
        taken before it began.
    """

    code: int
    out: str
    err: str
    cpu_seconds: float
    peak_bytes: int
    base_bytes: int


def run(
    commands: Iterable[list[str]], *, address_bytes: int, imports: str = PRELOADED
) -> list[Outcome]:
    """The outcomes of commands of forkpoint, each with at most `address_bytes` of address space
    besides what an interpreter has that has imported `imports`."""
    jobs = "".join(
        json.dumps({"argv": [*map(str, argv)], "address_bytes": address_bytes}) + "\n"
        for argv in commands
    )
    done = subprocess.run(
        [sys.executable, __file__, imports],
        input=jobs,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


def contained(call: Any, address_bytes: int) -> Outcome:
    """Outcome of a call of no arguments, whose result is its exit code, in a process of its own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _child(call, address_bytes, out.fileno(), err.fileno())
        deadline = time.monotonic() + MOST_WALL_SECONDS
        while True:
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        out=texts[0],
        err=texts[1],
        cpu_seconds=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,
        base_bytes=_memory(1),
    )


def _child(call: Any, address_bytes: int, out: int, err: int) -> None:
    code = DEFECT
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        most = _memory(0) + address_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            code = call()
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def _memory(column: int) -> int:
    """Bytes of address space (0), or in memory (1), of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[column])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _serve(imports: str) -> None:
    for name in imports.split(","):
        __import__(name)
    from forkpoint.cli import main

    for line in sys.stdin:
        job = json.loads(line)
        outcome = contained(lambda argv=job["argv"]: main(argv), job["address_bytes"])
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
