"""Common behaviour of commands: the JSON line, the files that they read, and how they end."""

import json
import math
import multiprocessing
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import VOCABULARY, Shell, changed, made_up_rollouts, write_rollouts

import dumps
from forkpoint import RolloutBatch, load_rollouts
from forkpoint.apps.cli import main
from forkpoint.apps.cli.models import load_model
from forkpoint.apps.cli.options import Runtime
from forkpoint.apps.cli.output import Output

SHORT_DEMO = ("--groups", 1, "--prompt-tokens", 64, "--response-tokens", 8, "--steps", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("verify", "--model"),
        pytest.param(("doctor",), marks=pytest.mark.slow),
        ("demo", *SHORT_DEMO),
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_one_line(
    arguments: tuple[object, ...],
    shell: Shell,
    rollouts: Path,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = [rollouts] if arguments[0] in ("plan", "verify") else []
    model = [config] if arguments[-1] == "--model" else []
    done = shell(*arguments, *model, *file, "--json")
    # torch's compiler says so, for a build for CUDA on a machine without.
    said = [line for line in done.err.splitlines() if "No CUDA runtime is found" not in line]
    assert done.code == 0 and not said
    assert done.out.count("\n") == 1 and done.out.endswith("}\n")
    assert json.loads(done.out) == done.result and done.result["command"] == arguments[0]


@pytest.mark.parametrize("command", ["plan", "verify", "replay", "report"])
def test_no_json_unless_it_is_asked_for(
    command: str, shell: Shell, rollouts: Path, config: Path, tmp_path: Path
) -> None:
    options = ("--output", tmp_path / "page.html") if command == "report" else ()
    done = shell(command, rollouts, "--model", config, *options)
    assert done.code == 0 and done.err == ""
    assert done.out and "{" not in done.out and done.result["command"] == command


# What they read ----------------------------------------------------------------------------------


def test_commands_read_what_trainers_write(shell: Shell, tmp_path: Path, config: Path) -> None:
    made = made_up_rollouts()
    file = dumps.write_torch(tmp_path / "batch.pt", dumps.tensors(dumps.trl(_with_logprobs(made))))
    done = shell("plan", file)
    assert done.code == 0 and "batch.pt: torch, format trl" in done.out
    assert "Note: This format does not say the sampling temperature" in done.out
    assert done.result["format"] == "trl" and done.result["rollouts"] == 9
    own = shell("plan", write_rollouts(tmp_path / "own.jsonl", made)).result
    for name in ("logical_tokens", "group_tokens", "unique_tokens", "modes"):
        assert done.result[name] == own[name]
    verified = shell("verify", file, "--model", config, "--format", "trl")
    assert verified.code == 0 and verified.result["format"] == "trl"
    replayed = shell("replay", file, "--model", config, "--steps", 1, "--format", "trl")
    assert replayed.code == 0 and replayed.result["format"] == "trl"
    wrong = shell("plan", file, "--format", "verl")
    assert wrong.code == 2 and "batch.pt: there is no prompts" in wrong.err


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


def _with_logprobs(rollouts: list) -> list:
    return [
        changed(r, reference_logprobs=-np.ones(len(r)), old_logprobs=-np.ones(len(r)))
        for r in rollouts
    ]


# What goes wrong ----------------------------------------------------------------------------------


def test_what_the_system_refuses_names_the_path(shell: Shell, rollouts: Path) -> None:
    too_long = rollouts.parent / ("a" * 300)
    done = shell("report", rollouts, "--output", too_long)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {too_long} cannot be read or written: File name too long")


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_a_reader_that_has_enough(form: tuple[str, ...], rollouts: Path) -> None:
    """As `forkpoint plan FILE | true`: no traceback about the broken pipe, then or at exit."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", "plan", str(rollouts), *form],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == "" and done.returncode == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "ascii:surrogateescape"])
def test_output_that_is_no_utf_8(encoding: str, rollouts: Path, tmp_path: Path) -> None:
    """As a pipe is on Windows, or in a container without a locale: frames are of other lines."""
    path = rollouts.rename(tmp_path / "größe.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", "plan", str(path), "--details"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding.partition(":")[0])
    shown = "größe.jsonl" if encoding == "cp1252" else r"gr\xf6\xdfe.jsonl"
    assert f"what sharing saves on {shown}" in text
    assert "+---" in text and "| who shares " in text


def test_progress_on_a_terminal(rollouts: Path, config: Path) -> None:
    """Progress goes to stderr, if that is a terminal; stdout has the result alone."""
    terminal, stderr = pty.openpty()
    reading, stdout = os.pipe()
    arguments = ["replay", str(rollouts), "--model", str(config), "--json"]
    # Forked off this process, which has imported torch.
    process = multiprocessing.get_context("fork").Process(
        target=run_into, args=(stdout, stderr, arguments)
    )
    process.start()
    os.close(stderr)
    os.close(stdout)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
    with os.fdopen(reading, "rb") as pipe:
        out = pipe.read()
    process.join()
    os.close(terminal)
    assert process.exitcode == 0
    assert b"training" in shown and b"100%" in shown
    assert out.count(b"\n") == 1 and json.loads(out)["steps"] == 4


def run_into(stdout: int, stderr: int, arguments: list[str]) -> None:
    """The command line, in a process whose output goes to these files."""
    for number, given in enumerate((stdout, stderr), start=1):
        os.dup2(given, number)
        os.close(given)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


def test_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_only=False).result({"a": 1})
    assert capsys.readouterr().out == ""
    Output(json_only=True).result({"a": math.nan, "b": [1.5, {"c": -math.inf}], "d": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, {"c": None}], "d": "x"}


def test_the_made_up_vocabulary_is_covered(config: Path, rollouts: Path) -> None:
    """The tiny model of these tests has exactly the vocabulary of their rollouts."""
    model = load_model(config, Runtime(dtype="float64", seed=3))
    assert model.config.vocab_size == VOCABULARY and model.training
    assert next(model.parameters()).dtype == torch.float64
    RolloutBatch(load_rollouts(rollouts)).check_vocabulary(VOCABULARY)
