"""Scripts in benchmarks/ say what they do without doing it."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_measures_nothing(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    results = {p: p.stat().st_mtime_ns for p in (script.parent / "results").iterdir()}
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and "usage:" in capsys.readouterr().out
    assert results == {p: p.stat().st_mtime_ns for p in (script.parent / "results").iterdir()}
