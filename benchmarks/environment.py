"""Device, versions, commit and command of this process, as rows of measurements have them."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from forkpoint.device import measured_versions

BENCHMARKS = "benchmarks"
"""The package of benchmarks in a checkout."""


@cache
def environment() -> dict[str, Any]:
    """Device, versions, commit and command of this process, as rows of measurements have them."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": device,
        "versions": measured_versions(),
        "commit": _commit(),
        # Absolute paths say where files lie on a machine, so only names of files are recorded.
        "command": " ".join([*_program(), *(_named(word) for word in sys.argv[1:])]),
    }


def _program() -> list[str]:
    script = Path(sys.argv[0])
    if script.name == "__main__.py" and script.parent.name == BENCHMARKS:
        return ["python", "-m", BENCHMARKS]
    if script.suffix == ".py" and script.name != "__main__.py":
        return ["python", f"{script.parent.name}/{script.name}"]
    return ["forkpoint"]


def _named(word: str) -> str:
    path = Path(word)
    return path.name if path.is_absolute() else word


def _commit() -> str:
    """The value of FORKPOINT_COMMIT, for copies of a checkout; else the checkout's commit.

    "-dirty" is added where sources differ from the commit. The commit is "unknown" where this file
    is not tracked: forkpoint may be installed in a folder of another repository.
    """
    if said := os.environ.get("FORKPOINT_COMMIT"):
        return said
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not git("ls-files", "--", here.name):
        return "unknown"
    top = git("rev-parse", "--show-toplevel")
    changed = git(
        "-C", top, "status", "--porcelain", "--", "src", BENCHMARKS, f":!{BENCHMARKS}/results"
    )
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
