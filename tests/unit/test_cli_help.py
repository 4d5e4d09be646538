"""The command line as a reader of its help sees it: its commands, its options, their texts."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

import forkpoint
from forkpoint.cli import main
from forkpoint.cli.app import COMMANDS

PLANNING = {
    *("--sharing", "--boundary", "--leaf-layout", "--max-microbatch-tokens", "--memory-budget"),
    *("--activations", "--checkpointing", "--calibration"),
}
READING = {"--format", "--on-error", "--tokenizer", "--memory-limit"}
BATCHING = {"--batch-rollouts", "--batch-tokens"}
MEMORY = {"--dtype", "--gradient-checkpointing"}
RUNTIME = {*MEMORY, "--device", "--seed"}
LOSS = {
    *("--loss", "--clip", "--clip-high", "--kl", "--entropy", "--normalize", "--max-tokens"),
    *("--beta", "--variant", "--gamma"),
}
TRAINING = {*LOSS, "--optimizer", "--lr", "--steps", "--groups-per-step", "--baseline"}
# An option that is renamed or dropped breaks scripts: change this table knowingly.
OPTIONS = {
    "demo": {
        *("--groups", "--rollouts-per-group", "--prompt-tokens", "--response-tokens"),
        *("--steps", "--lr", "--seed", "--output", "--json"),
    },
    "plan": {
        *("--model", "--loss", "--batch", "--limit", "--json"),
        *(*READING, *BATCHING, *PLANNING, *MEMORY),
    },
    "replay": {
        *("--model", "--limit", "--json", *READING),
        *("--groups", "--max-prompt-tokens", "--max-response-tokens"),
        *("--schedule", "--warmup-steps", "--max-grad-norm"),
        *("--output", "--checkpoint-every", "--resume"),
        *(*TRAINING, *PLANNING, *RUNTIME),
    },
    "report": {
        *("--output", "--plots", "--model", "--limit", "--json"),
        *(*READING, *PLANNING, *MEMORY),
    },
    "verify": {
        *("--model", "--limit-groups", "--limit", "--json"),
        *(*LOSS, *READING, *PLANNING, *RUNTIME),
    },
    "calibrate": {
        *("--model", "--output", "--dtype", "--device", "--blocks", "--max-seconds", "--json"),
    },
    "doctor": {"--json"},
}


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    assert set(COMMANDS) == set(OPTIONS)
    for name in COMMANDS:
        assert re.search(rf"• {name} +\w", text), f"{name} is not listed with what it does"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = help_of(capsys)
    assert main([]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (wanted, "")


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, command)
    found = set(re.findall(r"^[│ ] (--[a-z][\w.-]*)", text, re.MULTILINE)) - {"--help"}
    assert found == OPTIONS[command]
    assert "{None}" not in text and "--no-" not in text


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_explained(command: str) -> None:
    todo = [COMMANDS[command]]
    while todo:
        kind = todo.pop()
        text = "".join(base.__doc__ or "" for base in kind.__mro__ if is_dataclass(base))
        for field in fields(kind):
            if isinstance(field.default_factory, type):
                todo.append(field.default_factory)
            else:
                assert re.search(rf"^ +{field.name}: \w", text, re.MULTILINE), field.name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forkpoint {forkpoint.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench"], ("no longer a command", "python -m benchmarks")),
        (["plna"], ("plna", "did you mean 'plan'?")),
        (["Verfy", "x"], ("Verfy", "did you mean 'verify'?")),
        (["train"], ("train", *COMMANDS)),
        (["plan"], ("FILE", "required")),
        (["replay", "x.jsonl"], ("--model", "required")),
        (["plan", "x.jsonl", "--sharing", "all"], ("all", "--sharing", "none", "group", "tree")),
        (
            ["plan", "x.jsonl", "--max-microbatch-token", "5"],
            ("--max-microbatch-token", "--max-microbatch-tokens"),
        ),
        (["plan", "x.jsonl", "--limit", "many"], ("many", "--limit")),
        (["doctor", "x.jsonl"], ("x.jsonl",)),
    ],
)
def test_wrong_arguments(
    arguments: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert not set("╭│─╰\033") & set(captured.err) and "---" not in captured.err
    for part in said:
        assert part in captured.err


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: forkpoint ")


def test_as_a_module_with_wrong_arguments() -> None:
    """The code that `main` returns becomes the process's."""
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", "plna"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")
