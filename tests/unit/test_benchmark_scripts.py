"""Scripts that documents name run as they are named; asked for help they do nothing else."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_measures_nothing(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))  # as python does, and run_path does not
    results = {p: p.stat().st_mtime_ns for p in (script.parent / "results").iterdir()}
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and "usage:" in capsys.readouterr().out
    assert results == {p: p.stat().st_mtime_ns for p in (script.parent / "results").iterdir()}


def test_the_picture_of_the_readme_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "scripts" / "plot_schedule.py"
    output = tmp_path / "schedule.svg"
    monkeypatch.setattr("sys.argv", [str(script), "--output", str(output)])
    runpy.run_path(str(script), run_name="__main__")
    kept = (ROOT / "docs" / "figures" / "schedule.svg").read_text(encoding="utf-8")
    drawn = output.read_text(encoding="utf-8")
    assert drawn.count("<path") == kept.count("<path") and drawn.count("<text") == kept.count(
        "<text"
    )
