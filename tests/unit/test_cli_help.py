"""The command line as a reader of its help sees it: its commands, its options, their texts."""

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
        *("--groups", "--max-prompt-tokens", "--max-response-tokens"),
        *("--schedule", "--warmup-steps", "--max-grad-norm", "--expert-counts", *ROUTERS),
        *("--output", "--checkpoint-every", "--resume"),
        *(*TRAINING, *PLANNING, *RUNTIME),
    },
    "report": {
        *("--output", "--plots", "--model", "--limit", "--json"),
        *(*READING, *PLANNING, *MEMORY, *DEVICE),
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


SCREEN = (80, 24)
"""Columns and lines, one of which the shell's own prompt takes."""


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str, full: bool = False) -> str:
    assert main([*arguments, "--help-all" if full else "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    assert set(COMMANDS) == set(OPTIONS)
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", text, re.M), f"{name} is not listed with what it does"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = help_of(capsys)
    assert main([]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (wanted, "")


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, command, full=True)
    found = set(re.findall(r"^[│ ] (--[a-z][\w.-]*)", text, re.MULTILINE)) - {"--help"}
    of_every = {"--help-all", "--color", "--debug"}
    assert found - of_every == OPTIONS[command] and found >= of_every - {"--help-all"}
    assert "{None}" not in text and "--no-" not in text


@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, *([command] if command else []))
    lines = text.splitlines()
    assert len(lines) < SCREEN[1] and max(map(len, lines)) < SCREEN[0]
    assert lines[0].startswith(f"usage: forkpoint {command}") and "--help-all" in text
    named = set(re.findall(r"^  (--[a-z][a-z-]*)|, (--[a-z][a-z-]*)", text, re.MULTILINE))
    unknown = {a or b for a, b in named} - {"--help-all", *OPTIONS.get(command, ())}
    assert not unknown or not command, f"the page names {unknown}, which {command} does not have"


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, full=True)
    for name in COMMANDS:
        assert f"usage: forkpoint {name} [-h]" in text
    for option in {option for options in OPTIONS.values() for option in options}:
        assert f"{option} " in text or f"{option}\n" in text


def test_help_all_breaks_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        assert max(map(len, help_of(capsys, name, full=True).splitlines())) <= 80


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
        # An unknown option is named before what is missing besides.
        (["plan", "--modle", "x"], ("no option --modle", "did you mean '--model'?")),
        (["plan", "-modle", "x"], ("no option -modle", "did you mean '--model'?")),
        (["verify", "--limit_grups=2"], ("no option --limit-grups", "'--limit-groups'")),
        (["plan", "--optimizer", "sgd"], ("no option --optimizer; replay has it",)),
        (["replay", "--epsilon", "0.3"], ("no option --epsilon", "give --clip 0.3")),
        (["--modle", "x"], ("--modle stands before a command",)),
        (["plan", "x.jsonl", "--color", "blue"], ("--color is 'blue'", "always", "never")),
        (["plan", "x.jsonl", "--color"], ("--color is ''",)),
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
