"""Common behaviour of commands: help, arguments, the JSON line, files, and how they end."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Done, Shell, changed, made_up_rollouts, write_rollouts

import dumps
import forkpoint
from forkpoint import Config, ConfigError, Policy
from forkpoint.apps.cli.app import reason_in
from forkpoint.apps.cli.output import Output

READING = {"--format", "--on-error", "--tokenizer", "--memory-limit"}
MEMORY = {"--dtype", "--gradient-checkpointing"}
RUNTIME = {*MEMORY, "--device", "--seed"}
CONFIG = {f"--{field.name.replace('_', '-')}" for field in fields(Config)}
CONFIG = {"--no-self-check" if name == "--self-check" else name for name in CONFIG}
# An option that is renamed or dropped breaks scripts: change this table knowingly.
OPTIONS = {
    "plan": {
        *("--model", "--batch-rollouts", "--details", "--ranks", "--limit", "--json", "--loss"),
        *("--device-memory", "--trained-share", "--shard", "--stages", "--lanes"),
        "--frozen-encoder",
        *(*READING, *CONFIG, *MEMORY),
    },
    "replay": {
        *("--model", "--limit", "--json", "--loss", "--router-loss", "--optimizer", "--lr"),
        *("--max-grad-norm", "--steps", "--groups-per-step"),
        *("--baseline", "--output", "--checkpoint-every", "--resume"),
        *(*READING, *CONFIG, *RUNTIME),
    },
    "report": {"--output", "--json"},
    "verify": {
        *("--model", "--limit-groups", "--limit", "--json", "--loss", "--router-loss"),
        *(*READING, *CONFIG, *RUNTIME),
    },
    "calibrate": {
        *("--model", "--output", "--dtype", "--device", "--blocks", "--max-seconds", "--json")
    },
    "doctor": {"--quick", "--json"},
}


def test_commands_and_options_are_listed(shell: Shell) -> None:
    done = shell()
    assert done.code == 0 and set(re.findall(r"^ (\w+) +\w", done.out, re.MULTILINE)) == set(
        OPTIONS
    )
    assert not re.findall(r"^ \w+ +\w.* and +$", done.out, re.MULTILINE), "a sentence is cut"
    assert shell("--version").out == f"forkpoint {forkpoint.__version__}\n"
    for command, options in OPTIONS.items():
        done = shell(command, "--help")
        found = set(re.findall(r"^[│ ] (--[a-z][\w.-]*)", done.out, re.MULTILINE)) - {"--help"}
        assert done.code == 0 and found == options, command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plna"], ("plna", *OPTIONS)),
        (["plan"], ("FILE", "required")),
        (["plan", "x.jsonl", "--sharing", "all"], ("all", "--sharing", "none", "group", "tree")),
        (["plan", "x.jsonl", "--max-microbatch-token", "5"], ("--max-microbatch-tokens",)),
        (["plan", "x.jsonl", "--limit", "many"], ("many", "--limit")),
        (["plan", "x.jsonl", "--batch-rollouts", "0"], ("--batch-rollouts", "at least 1")),
        (["replay", "x.jsonl", "--model", "m", "--seed", str(2**63)], ("--seed",)),
        (["replay", "x.jsonl", "--model", "m", "--lr", "fast"], ("--lr", "fast")),
        (["plan", "x.jsonl", "--max-microbatch-tokens", "few"], ("{None}|INT", "few")),
        (["plan", "x.jsonl", "--split", "9" * 5000], ("exchange", "--split")),
        (["plan", "x.jsonl", "--memory-limit"], ("--memory-limit",)),
        (["plan", "x.jsonl", "--model", ""], ("after --model is empty",)),
        (["verify", "x.jsonl", "--model="], ("argument --model= is empty",)),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_wrong_arguments(arguments: list[str], said: tuple[str, ...], shell: Shell) -> None:
    done = shell(*arguments)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch("error: .{,900}\n", done.err)
    assert arguments == ["plna"] or done.err.endswith(
        f" {arguments[0]} --help lists the options.\n"
    )
    for part in said:
        assert part in done.err


@pytest.mark.parametrize(
    "box",
    [
        "╭─ Wrong ────╮\n│ no --x: 'a │\n│ b'.        │\n│ ────────── │\n│ help │\n╰──────╯\n",
        "  Invalid\n --------\n| no --x: 'a |\n| b'. |\n | ------- |\n| --help |\n --------\n",
        "\x1b[31m╭─\n│\x1b[0m \x1b[1mno\x1b[0m --x: 'a b' \x1b[31m│\n│ ── │\n│ see │\n╰─\x1b[0m\n",
    ],
    ids=["a file", "a terminal without UTF-8", "a terminal with colors"],
)
def test_messages_of_tyro(box: str) -> None:
    assert reason_in(box) == "no --x: 'a b'."
    assert reason_in("") == "the arguments are wrong."


def test_what_is_imported(rollouts: Path) -> None:
    """The library loads no app, and a plan no library of models."""
    code = (
        "import sys, forkpoint; "
        "assert not {'forkpoint.apps', 'tyro', 'matplotlib'} & set(sys.modules); "
        "from forkpoint.apps.cli import main; assert 'numpy' not in sys.modules; "
        f"assert main(['plan', {str(rollouts)!r}]) == 0; "
        "assert not {'transformers', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "verify", "replay"])
def test_json_is_one_line(command: str, shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell(command, rollouts, "--model", config)
    assert done.code == 0 and done.err == ""
    assert done.out and "{" not in done.out and done.result["command"] == command
    done = shell(command, rollouts, "--model", config, "--json")
    assert done.code == 0 and done.err == ""
    assert done.out.count("\n") == 1 and done.out.endswith("}\n")
    assert json.loads(done.out) == done.result


def test_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_only=True).result({"a": math.nan, "b": [1.5, {"c": -math.inf}], "d": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, {"c": None}], "d": "x"}


# What they read -----------------------------------------------------------------------------------


def test_commands_read_what_trainers_write(shell: Shell, tmp_path: Path, config: Path) -> None:
    made = [
        changed(r, reference_logprobs=-np.ones(len(r)), old_logprobs=-np.ones(len(r)))
        for r in made_up_rollouts()
    ]
    file = dumps.write_torch(tmp_path / "batch.pt", dumps.tensors(dumps.trl(made)))
    done = shell("plan", file)
    assert done.code == 0 and "batch.pt: torch, format trl" in done.out
    assert "Note: This format has no sampling temperature" in done.out
    own = shell("plan", write_rollouts(tmp_path / "own.jsonl", made)).result
    for name in ("rollouts", "logical_tokens", "group_tokens", "unique_tokens", "modes"):
        assert done.result[name] == own[name]
    for command in (("verify",), ("replay", "--steps", 1)):
        done = shell(*command, file, "--model", config, "--format", "trl")
        assert done.code == 0 and done.result["format"] == "trl"


def test_commands_skip_and_say_so(shell: Shell, tmp_path: Path) -> None:
    file = write_rollouts(tmp_path / "some.jsonl")
    with file.open("a") as appended:
        appended.write('{"token_ids": [1, -2], "loss_mask": [0, 1], "advantage": 1}\n{\n')
    stopped = shell("plan", file)
    assert stopped.code == 2 and "line 10" in stopped.err and "token_ids[1] is -2" in stopped.err
    done = shell("plan", file, "--on-error", "skip")
    assert done.code == 0 and done.result["rollouts"] == 9
    assert done.result["skipped"] == {"records": 2, "fields": {"token_ids": 1, "JSON": 1}}
    assert "2 skipped (token_ids 1, JSON 1); first: " in done.out


# How they end: errors that no command expects are one line, an exit code, and no traceback ------


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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("model_config"), 70, "internal error: KeyError: 'model_config'"),
        (ValueError("two\n  lines"), 70, "internal error: ValueError: two lines"),
        (Panic("index out of bounds"), 70, "internal error: Panic: index out of bounds"),
        (
            TypeError("x" * 5_000 + "cause"),
            70,
            f"internal error: TypeError: {'x' * 139}…{'x' * 144}cause.",
        ),
        (TypeError("a\x1b[2Jb"), 70, r"internal error: TypeError: a\x1b[2Jb"),
        (PermissionError(13, "no", "r.json"), 2, "error: r.json cannot be read or written: no."),
        (MemoryError("9.00 EiB"), 2, "error: the memory of this machine ran out (MemoryError: 9"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit("text"), 1, ""),
    ],
    ids=["key", "lines", "panic", "long", "escape", "file", "memory", "interrupt", "exit"],
)
def test_errors_are_one_line(
    failing: Callable[..., Done], error: BaseException, code: int, said: str
) -> None:
    done = failing(error, "--json")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(said) and done.err.count("\n") == bool(said)
    assert code != 70 or forkpoint.__version__ in done.err


def test_memory_that_torch_lacks(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "forward_backward", lambda *_, **__: torch.empty(1 << 58))
    done = shell("replay", rollouts, "--model", config)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the memory of this machine ran out (RuntimeError")


@pytest.mark.parametrize("how", ["before", "after", "variable"])
def test_debug_shows_the_traceback(
    how: str, shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConfigError("a wrong value.")

    assert shell("--debug", "plan", rollouts, "--json").code == 0
    monkeypatch.setattr("forkpoint.apps.cli.plan.make_plan", broken)
    arguments: list[object] = ["plan", rollouts]
    if how == "variable":
        monkeypatch.setenv("FORKPOINT_DEBUG", "1")
    else:
        arguments.insert(0 if how == "before" else 2, "--debug")
    done = shell(*arguments)
    first, *_, last = done.err.splitlines()
    assert first == "Traceback (most recent call last):" and "in broken" in done.err
    assert (done.code, done.out, last) == (2, "", "error: a wrong value.")
    monkeypatch.setenv("FORKPOINT_DEBUG", "0")
    assert "Traceback" not in shell("plan", rollouts).err


def test_names_cannot_steer_a_terminal(shell: Shell, tmp_path: Path) -> None:
    """A file's name with escape sequences, in tables and in errors."""
    file = write_rollouts(tmp_path / "a\x1b]0;title\x07\x1b[2J\u202eb.jsonl")
    for content, code in ((None, 0), ("{", 2)):
        if content:
            file.write_text(content)
        done = shell("plan", file, "--details")
        assert done.code == code and not set("\x1b\x07\u202e") & set(done.out + done.err)
        assert r"a\x1b]0;title\x07\x1b[2J\u202eb.jsonl" in done.out + done.err


def started(
    *redirections: str, arguments: str, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """The command line of a new process, with redirections as a shell has them."""
    command = f'exec "$0" -m forkpoint {arguments} {" ".join(redirections)}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable],
        capture_output=True,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "said"),
    [
        (">&-", "plan --help", 0, b""),
        pytest.param("<&- >&- 2>&-", "plan nowhere.jsonl", 2, b"", marks=pytest.mark.slow),
        pytest.param("| true", "plan --help", 0, b"", marks=pytest.mark.slow),
        (">/dev/full", "plan --help", 2, b"No space left on device"),
    ],
)
def test_streams_that_take_nothing(
    redirection: str, arguments: str, code: int, said: bytes
) -> None:
    done = started(redirection, arguments=arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and done.stderr.count(b"\n") == bool(said)


@pytest.mark.slow
def test_output_that_is_no_utf_8(rollouts: Path, tmp_path: Path) -> None:
    """As in a container without a locale: frames are of other lines."""
    path = rollouts.rename(tmp_path / "größe.jsonl")
    done = started(arguments=f"plan '{path}' --details", PYTHONIOENCODING="ascii:surrogateescape")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert r"what sharing saves on gr\xf6\xdfe.jsonl" in text and "| sharing " in text


def test_progress_on_a_terminal(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress goes to stderr, if that is a terminal; stdout has the result alone."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # by this rich takes both for terminals
    monkeypatch.setenv("TERM", "xterm")
    done = shell("replay", rollouts, "--model", config, "--json")
    assert "making the model" in done.err and "100%" in done.err
    assert done.out.count("\n") == 1 and done.result["steps"] == 4
