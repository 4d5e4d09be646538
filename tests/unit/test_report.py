"""The page of a report, its plots and the command that makes them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import CONFIGS, SHAPE, made_up, steps

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.apps.report.chapters import rollouts_chapter
from forkpoint.apps.report.curves import drift_figure
from forkpoint.apps.report.figure import Chapter, Figure, Table, Tile
from forkpoint.apps.report.page import MOST_TABLE_ROWS, embedded, render_page
from forkpoint.apps.report.plots import write_plots
from forkpoint.plan import make_plan
from forkpoint.rollouts.files import save_rollouts

# The page -----------------------------------------------------------------------------------------


def page_of(rows: Sequence[Sequence[Any]], text: str = "plain") -> str:
    table = Table(columns=("what", text), rows=rows)
    figure = Figure(name="t", title=text, caption=text, kind="table", table=table, notes=(text,))
    tile = Tile(value=text, label=text, remark=text)
    chapter = Chapter(title=text, subtitle=text, tiles=(tile,), figures=(figure,))
    return render_page(text, [chapter])


@pytest.mark.parametrize(
    "hostile",
    ["</script><script>alert(1)</script>", '"><img src=x onerror=y>', "@@data@@ @@body@@ \u2028"],
)
def test_text_from_outside_is_escaped_everywhere(hostile: str) -> None:
    page, plain = page_of([(hostile, hostile)], hostile), page_of([("plain", "plain")])
    for tag in ("<script", "</script", "<img", "onerror=y>", "<style"):
        assert page.count(tag) == plain.count(tag), tag
    assert page.count("<section") == 1, "a marker in a text is not filled in"


def test_embedded_json_cannot_end_its_element() -> None:
    value = {"<b>&</script>\u2028": ["<!--", math.nan, math.inf, "\u202e\x1b\ud800"]}
    text = embedded(value)
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {"<b>&</script>\\u2028": ["<!--", None, None, "\\u202e\\x1b\\ud800"]}


def test_nothing_is_asked_for() -> None:
    page = page_of([("a", 1)])
    assert "default-src &#x27;none&#x27;" in page and "unsafe" not in page
    for tag in ("<link", "src=", "@import", "url("):
        for found in range(page.count(tag)):
            at = [n for n in range(len(page)) if page.startswith(tag, n)][found]
            assert page[at : at + 40].startswith(('<link rel="icon" href="data:,"', "url(#")), page[
                at : at + 60
            ]


def test_long_tables_say_what_they_leave_out() -> None:
    page = page_of([(n, n / 3) for n in range(MOST_TABLE_ROWS + 5)])
    assert f"The first {MOST_TABLE_ROWS:,} rows; 5 more are left out." in page
    assert page.count("<tr>") == MOST_TABLE_ROWS + 1
    assert f'data-value="{1 / 3!r}"' in page, "numbers are copied whole"
    large = page_of([(1234567, 1234.5)])
    assert '<td class="number" data-value="1234567">1,234,567</td>' in large
    assert '<td class="number" data-value="1234.5">1,234.5</td>' in large
    assert '<th scope="col" class="number">what</th>' in large, "aligned as what is below it"


def test_warnings_stand_above_the_answers() -> None:
    chapter = Chapter(
        title="t",
        subtitle="s",
        tiles=(Tile(value="v", label="l", state="bad"),),
        figures=(),
        warnings=("This plan does not fit <b>.",),
    )
    page = render_page("t", [chapter])
    warning, tile = page.index("This plan does not fit &lt;b&gt;."), page.index("tile bad")
    assert 0 < warning < tile


# Plots and the command ----------------------------------------------------------------------------


def test_plots(tmp_path: Path) -> None:
    batch = made_up()
    plan, dense = (make_plan(batch, SHAPE, CONFIGS[n]) for n in ("tree-across", "dense"))
    chapter = rollouts_chapter("a $x_ b.jsonl", [(batch, plan, dense)])
    drift = drift_figure(steps(np.linspace(0, 1e-9, 30).tolist()))
    assert drift is not None
    both = [chapter, Chapter(title="b", subtitle="", tiles=(), figures=(drift,))]
    written = write_plots(both, tmp_path / "plots")
    names = {path.name for path in written}
    assert {"0-a-x-b-forest.png", "0-a-x-b-schedule.svg", "1-b-drift-0.png"} <= names
    for path in written:
        begin = path.read_bytes()[:200]
        assert begin.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in begin
    before = {path: path.read_bytes() for path in written if path.suffix == ".svg"}
    assert not any(b"mathdefault" in content for content in before.values())
    write_plots(both, tmp_path / "plots")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_command_without_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    page = tmp_path / "page.html"
    given = ["report", str(tmp_path / "rollouts.jsonl"), "--output", str(page)]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"] == [["forest", "groups", "schedule", "counts"]]
    assert result["bytes"] == len(page.read_bytes())
    assert "faster than dense, of at most" in out and "of the tokens computed" in out


def test_the_command_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of a trace share nothing with each other; the first of many are drawn."""
    made, trace, page = list(made_up()), str(tmp_path / "trace"), tmp_path / "page.html"
    given = ["report", trace, "--output", str(page), "--sharing", "tree"]
    with forkpoint.record(trace) as recorder:
        assert main(given) == 2
        assert "has no whole batch yet" in capsys.readouterr().err
        assert main(["plan", trace]) == 2
        assert "has no whole batch yet" in capsys.readouterr().err
        for _ in range(14):
            recorder.add(made)
    assert main(given) == 0
    out = capsys.readouterr().out
    plan = make_plan(RolloutBatch(made), None, Config(sharing="tree"))
    assert "on these 14 recorded batches, each on its own. Nothing was run." in out
    run, logical = 14 * plan.computed_tokens, 14 * plan.logical_tokens
    assert f"({run:,} of {logical:,} given)" in out
    text = page.read_text()
    assert (
        "batch 11: " in text
        and "batch 12: " not in text
        and "Not drawn: 2 more of the batches." in text
    )
    assert main([*given, "--limit", "1"]) == 0, "a part of a trace is one batch"
    assert "taken as one batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "does not exist"),
        ((".",), "holds no replay"),
        (("rollouts.jsonl", "--output", "no/page.html"), "does not exist"),
        (("rollouts.jsonl", "--output", "./rollouts.jsonl"), "would be replaced"),
        (("trace", "--output", "trace/manifest.jsonl"), "would be replaced"),
    ],
    ids=["file", "folder", "output", "the input", "a file of the input"],
)
def test_what_cannot_be_reported(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    with forkpoint.record("trace") as trace:
        trace.add(made_up())
    assert main(["report", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
    assert len(forkpoint.load_rollouts("rollouts.jsonl")) == 12 == len(made_up())
    assert main(["report", "trace", "--output", "trace/page.html"]) == 0
    assert main(["report", "trace", "--output", "trace/page.html"]) == 0, "it is made again"
    assert len(forkpoint.load_rollouts("trace")) == 12


def test_ids_that_utf_8_cannot_write(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON can hold."""
    made = [replace(rollout, group_id="a\ud800b", rollout_id=None) for rollout in made_up()]
    with forkpoint.record(tmp_path / "trace") as trace:
        trace.add(made)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "trace"), "--output", str(page)]) == 0
    assert r"a\ud800b" in page.read_text(encoding="utf-8")
