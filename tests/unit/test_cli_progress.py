"""Progress where there is no terminal: few, whole lines on stderr without control characters."""

import math
import re
import sys
import time

import pytest

from forkpoint.apps.cli import progress
from forkpoint.apps.cli.output import Output
from forkpoint.apps.cli.progress import duration, steps_line


def test_nothing_is_written_of_what_is_soon_done(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(json_only=False)
    with out.waiting("planning"), out.progress("training", 4) as advance:
        advance(4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("json_only", [False, True])
def test_waiting_writes_lines(
    json_only: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.02)
    with Output(json_only=json_only).waiting("comparing\x1b gradients"):
        time.sleep(0.15)
    time.sleep(0.05)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and captured.err.endswith("\n")
    assert 2 <= len(lines) <= 8, "one line each 0.02 seconds, and none once it is done"
    assert set(lines) == {r"comparing\x1b gradients: 0 s"}


def test_steps_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.03)
    with Output(json_only=True).progress("training", 4) as advance:
        advance(1)
        advance(2)
        time.sleep(0.1)
    first = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch("training: 3 of 4 steps, 0 s, about 0 s left", first)


def test_lines_are_further_apart_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LATER", 0.0)
    monkeypatch.setattr(progress, "LATER_FACTOR", 10**6)
    written: list[float] = []
    with progress.lines(lambda seconds: written.append(seconds) or ""):
        time.sleep(0.1)
    assert len(written) == 1


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        encoding = "utf-8"

        def write(self, _: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", Gone())
    with progress.lines(lambda _: "x"):
        time.sleep(0.05)


def test_texts() -> None:
    assert steps_line("training", 0, 1200, 3) == "training: 0 of 1,200 steps, 3 s"
    assert steps_line("training", 10, 40, 30) == (
        "training: 10 of 40 steps, 30 s, about 1 min 30 s left"
    )
    assert steps_line("training", 40, 40, 61) == "training: 40 of 40 steps, 1 min 1 s"
    texts = {0.4: "0 s", 59.4: "59 s", 59.6: "1 min 0 s", 3599: "59 min 59 s", 7260: "2 h 1 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    assert math.isfinite(progress.EVERY_SECONDS) and progress.EVERY_SECONDS >= 3
