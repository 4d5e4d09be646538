"""The command line as a reader of its help sees it: its commands, its options, wrong arguments."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

import forkpoint
from forkpoint.apps.cli import main
from forkpoint.apps.cli.app import COMMANDS

PLANNING = {
    *("--sharing", "--boundary", "--leaf-layout", "--max-microbatch-tokens", "--memory-budget"),
    *("--activations", "--checkpointing", "--calibration"),
}
READING = {"--format", "--on-error", "--tokenizer", "--memory-limit"}
BATCHING = {"--batch-rollouts", "--batch-tokens"}
DEVICE = ("--device-memory", "--optimizer-bytes", "--trained-share")
MEMORY = {"--dtype", "--gradient-checkpointing"}
RUNTIME = {*MEMORY, "--device", "--seed"}
LOSS = {
    *("--loss", "--clip", "--clip-high", "--kl", "--entropy", "--normalize", "--max-tokens"),
    *("--beta", "--variant", "--gamma"),
}
ROUTERS = {
    *("--router-loss", "--router-aux-loss-coef", "--router-z-loss-coef", "--router-last-token"),
}
TRAINING = {*LOSS, "--optimizer", "--lr", "--steps", "--groups-per-step", "--baseline"}
# An option that is renamed or dropped breaks scripts: change this table knowingly.
OPTIONS = {
    "demo": {
        *("--groups", "--rollouts-per-group", "--prompt-tokens", "--response-tokens"),
        *("--steps", "--lr", "--seed", "--output", "--json"),
    },
    "plan": {
        *("--model", "--loss", "--all-logprobs", "--details", "--batch", "--ranks", "--limit"),
        *("--json", *READING, *BATCHING, *PLANNING, *MEMORY, *DEVICE),
    },
    "replay": {
        *("--model", "--limit", "--json", *READING),
        *("--schedule", "--warmup-steps", "--max-grad-norm", *ROUTERS),
        *("--output", "--checkpoint-every", "--resume"),
        *(*TRAINING, *PLANNING, *RUNTIME),
    },
    "report": {
        *("--output", "--plots", "--model", "--limit", "--json"),
        *(*READING, *PLANNING, *MEMORY),
    },
    "verify": {
        *("--model", "--limit-groups", "--limit", "--json", *ROUTERS),
        *(*LOSS, *READING, *PLANNING, *RUNTIME),
    },
    "calibrate": {
        *("--model", "--output", "--dtype", "--device", "--blocks", "--max-seconds", "--json"),
    },
    "doctor": {"--json"},
}


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_commands_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, *arguments)
    assert set(COMMANDS) == set(OPTIONS)
    assert set(re.findall(r"• (\w+) +\w", text)) == set(COMMANDS)


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, command, "--help")
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
        (["plna"], ("plna", *COMMANDS)),
        (["plan"], ("FILE", "required")),
        (["plan", "x.jsonl", "--sharing", "all"], ("all", "--sharing", "none", "group", "tree")),
        (["plan", "x.jsonl", "--max-microbatch-token", "5"], ("--max-microbatch-tokens",)),
        (["plan", "x.jsonl", "--limit", "many"], ("many", "--limit")),
        (["plan", "x.jsonl", "--batch", "-1"], ("--batch", "at least 0")),
        (["verify", "x.jsonl", "--model", "m", "--limit-groups", "0"], ("at least 1",)),
        (["demo", "--rollouts-per-group", "1"], ("at least 2",)),
        (["replay", "x.jsonl", "--model", "m", "--seed", str(2**63)], ("--seed",)),
        (["replay", "x.jsonl", "--model", "m", "--lr", "fast"], ("--lr", "fast")),
        (["doctor", "x.jsonl"], ("x.jsonl",)),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_wrong_arguments(
    arguments: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in said:
        assert part in captured.err


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["plna"], 2)])
def test_as_a_module(arguments: list[str], code: int) -> None:
    """The code that `main` returns becomes the process's."""
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", *arguments], capture_output=True, check=False
    )
    assert done.returncode == code, done.stderr


def test_the_library_loads_no_app() -> None:
    code = (
        "import sys, forkpoint; "
        "apps = ('forkpoint.apps', 'tyro', 'matplotlib', 'jinja2'); "
        "names = [n for n in sys.modules if n.startswith(apps)]; "
        "assert not names, names"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "report"])
def test_help_needs_no_torch(command: str) -> None:
    code = (
        "import sys; from forkpoint.apps.cli import main; "
        f"assert main([{command!r}, '--help']) == 0; "
        "assert not {'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
