"""Colours of verdicts: on terminals alone, unless something else is asked for."""

import io
import re
import sys

import pytest
from rich.table import Table

from forkpoint.apps.cli import colours
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError

GREEN, RED, CYAN = "\033[1;32m", "\033[1;31m", "\033[1;36m"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, or that it is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    colours.take_off([])


def written(monkeypatch: pytest.MonkeyPatch, *options: str, terminal: bool) -> str:
    stream = Terminal(terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    colours.take_off(list(options))
    table = Table()
    table.add_column("group")
    table.add_row("chosen")
    Output(json_only=False).show("passed: a", "self-test: FAILED; b", table, "see passed.jsonl")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("options", "environment", "terminal", "coloured"),
    [
        ((), {}, True, True),
        ((), {}, False, False),
        ((), {"FORCE_COLOR": "1"}, False, False),
        ((), {"NO_COLOR": "1"}, True, False),
        ((), {"NO_COLOR": ""}, True, True),
        ((), {"TERM": "dumb"}, True, False),
        (("--color", "always"), {}, False, True),
        (("--color=always",), {"NO_COLOR": "1"}, False, True),
        (("--color", "never"), {}, True, False),
        (("--color", "auto"), {}, True, True),
        (("--color", "auto"), {}, False, False),
    ],
)
def test_when(
    options: tuple[str, ...],
    environment: dict[str, str],
    terminal: bool,
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = written(monkeypatch, *options, terminal=terminal)
    if not coloured:
        assert "\033" not in text
        return
    for colour, word in ((GREEN, "passed"), (RED, "FAILED"), (CYAN, "chosen")):
        assert f"{colour}{word}\033[0m" in text
    assert "see passed.jsonl" in text, "a file's name is no verdict"


def test_colours_are_all_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    with_them = written(monkeypatch, "--color", "always", terminal=False)
    assert re.sub(r"\033\[[\d;]*m", "", with_them) == written(monkeypatch, terminal=False)


def test_the_option_is_taken_off() -> None:
    assert colours.take_off(["--color", "never", "plan", "x"]) == ["plan", "x"]
    assert colours.take_off(["plan", "--color=never", "x"]) == ["plan", "x"]
    assert colours.take_off(["plan", "--", "--color", "x"]) == ["plan", "--", "--color", "x"]
    for wrong in (["--color"], ["--color", "plan"], ["plan", "--color="]):
        with pytest.raises(ConfigError, match="allowed are auto, always, never"):
            colours.take_off(wrong)
