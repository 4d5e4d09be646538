"""The example of TRL, which trains the same model by TRL's trainer and by forkpoint's."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl" / "grpo.py"


@pytest.mark.filterwarnings("ignore")
def test_both_trainers_begin_with_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--steps", "2", "--groups", "2", "--completions", "4", "--prompt-tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *sizes])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    norms = re.search(r"gradient norms: (\S+) and (\S+)", shown)
    tokens = re.search(r"tokens run: (\S+) of (\S+) given", shown)
    assert norms and tokens, shown
    stock, ours = map(float, norms.groups())
    assert ours == pytest.approx(stock, rel=1e-4) and stock > 0
    computed, given = (int(number.replace(",", "")) for number in tokens.groups())
    assert computed < given / 2
