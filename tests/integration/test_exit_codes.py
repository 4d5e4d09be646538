"""Errors that no command expects: one line, an exit code, and no traceback."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Done, Shell, write_rollouts

import forkpoint
from forkpoint import ConfigError, Policy

FORMS = pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])


@pytest.fixture
def failing(shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs `plan` with a planner that raises an error."""

    def run(error: BaseException, *arguments: str) -> Done:
        def broken(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("forkpoint.apps.cli.plan.make_plan", broken)
        return shell("plan", rollouts, *arguments)

    return run


class Panic(BaseException):
    """As pyo3 raises for a panic of a library in Rust."""


@FORMS
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("model_config"), "KeyError: 'model_config'"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (RuntimeError(), "RuntimeError"),
        (Panic("index out of bounds"), "Panic: index out of bounds"),
        (TypeError("x" * 5_000), f"TypeError: {'x' * 288}…"),
        (TypeError("a\x1b[2Jb"), r"TypeError: a\x1b[2Jb"),
    ],
    ids=["key", "lines", "nothing", "panic", "long", "escape"],
)
def test_a_defect_is_one_line(
    failing: Callable[..., Done], form: tuple[str, ...], error: BaseException, said: str
) -> None:
    done = failing(error, *form)
    assert (done.code, done.out) == (70, "")
    assert done.err.startswith(f"internal error: {said}") and forkpoint.__version__ in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("how", ["before", "after", "variable"])
@pytest.mark.parametrize("error", [AssertionError("an invariant"), ConfigError("a wrong value.")])
def test_debug_shows_the_traceback(
    shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch, how: str, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("forkpoint.apps.cli.plan.make_plan", broken)
    arguments: list[object] = ["plan", rollouts]
    if how == "variable":
        monkeypatch.setenv("FORKPOINT_DEBUG", "1")
    else:
        arguments.insert(0 if how == "before" else 2, "--debug")
    done = shell(*arguments)
    user = isinstance(error, ConfigError)
    assert (done.code, done.out) == (2 if user else 70, "")
    first, *_, last = done.err.splitlines()
    assert first == "Traceback (most recent call last):" and "in broken" in done.err
    assert last.startswith("error: a wrong value." if user else "internal error: AssertionError")
    monkeypatch.setenv("FORKPOINT_DEBUG", "0")
    assert "Traceback" not in shell("plan", rollouts).err


def test_debug_changes_nothing_else(shell: Shell, rollouts: Path) -> None:
    done = shell("--debug", "plan", rollouts, "--json")
    assert (done.code, done.err) == (0, "") and done.result["command"] == "plan"


@FORMS
def test_memory_that_runs_out(
    failing: Callable[..., Done],
    shell: Shell,
    rollouts: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[str, ...],
) -> None:
    done = failing(MemoryError("Unable to allocate 9.00 EiB"), *form)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the memory of this machine ran out (MemoryError: Unable")
    monkeypatch.undo()
    monkeypatch.setattr(Policy, "forward_backward", lambda *_, **__: torch.empty(1 << 58))
    done = shell("replay", rollouts, "--model", config, *form)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the memory of this machine ran out (RuntimeError")


@FORMS
def test_an_interrupt_is_one_line(
    shell: Shell,
    rollouts: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[str, ...],
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Policy, "forward_backward", interrupted)
    done = shell("replay", rollouts, "--model", config, *form)
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (0, 0), ("text", 1)])
def test_a_library_that_exits(failing: Callable[..., Done], code: int | str, expected: int) -> None:
    done = failing(SystemExit(code))
    assert (done.code, done.out, done.err) == (expected, "", "")


# Streams ------------------------------------------------------------------------------------------


def started(*redirections: str, arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command line of a new process, with redirections as a shell has them."""
    command = f'exec "$0" -m forkpoint {arguments} {" ".join(redirections)}'
    return subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, check=False)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("redirection", "arguments", "code"),
    [
        (">&-", "plan {file}", 0),
        ("2>&-", "plan {file} --json", 0),
        ("2>&-", "plan nowhere.jsonl", 2),
        ("<&- >&- 2>&-", "plan nowhere.jsonl", 2),
    ],
)
def test_streams_that_are_closed(
    rollouts: Path, redirection: str, arguments: str, code: int
) -> None:
    before = rollouts.read_bytes()
    done = started(redirection, arguments=arguments.format(file=rollouts))
    assert done.returncode == code, done.stderr
    assert done.stderr == b"" and rollouts.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_is_full(rollouts: Path) -> None:
    done = started(">/dev/full", arguments=f"plan {rollouts}")
    assert done.returncode == 2 and b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_names_cannot_steer_a_terminal(shell: Shell, tmp_path: Path) -> None:
    """A file's name with escape sequences, in tables and in errors."""
    file = write_rollouts(tmp_path / "a\x1b]0;title\x07\x1b[2J\u202eb.jsonl")
    done = shell("plan", file, "--details")
    assert done.code == 0 and not set("\x1b\x07\u202e") & set(done.out + done.err)
    assert r"a\x1b]0;title\x07\x1b[2J\u202eb.jsonl" in done.out
    file.write_text("{")
    done = shell("plan", file)
    assert done.code == 2 and not set("\x1b\x07\u202e") & set(done.out + done.err)
    assert r"\x1b]0;title" in done.err
