"""Reports: figures and answers say what plans and rows say; text from files stays text."""

import base64
import hashlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from reports import CONFIGS, FIXED, SHAPE, filled, made_up, record, renamed, steps, write_run

import forkpoint
import json_mutations
from forkpoint import Config, ConfigError, Rollout, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.apps.replay.folder import MANIFEST, ROWS
from forkpoint.apps.replay.records import read_step
from forkpoint.apps.report import rollouts
from forkpoint.apps.report.draw import write_plots
from forkpoint.apps.report.page import MAX_TABLE_ROWS, Chapter, Figure, render_page
from forkpoint.apps.report.replay import (
    drift_figures,
    read_run,
    replay_chapter,
    schedule_figure,
    speed_figure,
    steps_figure,
    typical_step,
)
from forkpoint.apps.report.rollouts import drawn_segments, group_rows, rollouts_chapter
from forkpoint.apps.report.text import abbreviate, json_text, visible
from forkpoint.apps.report.verdict import (
    Tile,
    drift_trend,
    gradients_tile,
    measured_speed_tile,
    memory_tiles,
    norm_bar,
    predicted_speed_tile,
)
from forkpoint.plan import Totals, make_plan
from forkpoint.rollouts.files import save_rollouts
from forkpoint.units import GIB
from json_mutations import HOSTILE, Raw

PICTURE = "data:image/svg+xml;base64,"


# Files of rollouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rollout_is_a_path(name: str) -> None:
    """Bands over a rollout's lane, one after another, are all of its edges."""
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS[name])
    start, length, lanes = drawn_segments(plan)
    begin, end = lanes.T
    for lane, rollout in enumerate(plan.forest.order):
        path = (begin <= lane) & (lane < end)
        order = np.argsort(start[path])
        ends = start[path][order] + length[path][order]
        assert [0, *ends[:-1]] == start[path][order].tolist()
        assert ends[-1] == batch.lengths[rollout] - 1
    area = length * (end - begin)
    assert area.sum() == batch.logical_tokens - len(batch), "what dense would compute"
    assert length.sum() == plan.computed_tokens


def test_groups_are_named_with_sizes_and_prompts() -> None:
    batch = made_up(groups=3, rollouts_per_group=4)
    rows = group_rows("x", batch, make_plan(batch, SHAPE, CONFIGS["tree-mixed"]))
    assert [row[1] for row in rows] == list(dict.fromkeys(batch.group_ids))
    for _, name, size, prompt, shared in rows:
        of = [n for n, group in enumerate(batch.group_ids) if group == name]
        assert size == 4 and str(prompt).startswith(
            str(min(int(batch[n].loss_mask.argmax()) for n in of))
        )
        columns = enumerate(zip(*(batch[n].token_ids.tolist() for n in of), strict=False))
        common = next(k for k, column in columns if len(set(column)) > 1)
        assert shared == common - 1, "the edge to where they part is each one's own"
    dense = group_rows("x", batch, make_plan(batch, SHAPE, CONFIGS["dense"]))
    assert {row[4] for row in dense} == {0}
    unnamed = RolloutBatch([replace(rollout, group_id=None) for rollout in batch])
    rows = group_rows("x", unnamed, make_plan(unnamed))
    assert [row[1] for row in rows] == ["prompt 0", "prompt 1", "prompt 2"]
    one = RolloutBatch([Rollout([5], [0], 1.0), Rollout([5, 6], [0, 1], 1.0, group_id="g")])
    assert [row[1] for row in group_rows("x", one, make_plan(one))] == ["g"], "one token: no edge"


def test_parts_that_are_not_drawn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-across"])
    monkeypatch.setattr(rollouts, "MAX_SEGMENTS", 5)
    _, length, lanes = drawn_segments(plan)
    area = plan.forest.length * (plan.forest.owner_end - plan.forest.owner_begin)
    assert (length * np.diff(lanes)[:, 0]).sum() == np.sort(area)[-5:].sum()
    chapter = rollouts_chapter("x", [(batch, plan)] * 6, recorded=True)
    assert "Of batch 3 the 5 largest segments are drawn." in chapter.figures[0].notes
    for figure in chapter.figures[:2]:
        assert figure.notes[-1] == "Not drawn: 2 more of the batches."


# Replays ------------------------------------------------------------------------------------------


def test_rows_come_back_from_json() -> None:
    for step in steps([1e-9, 2e-9], event_memory_bytes=(4, 5)):
        assert read_step(json.loads(json.dumps(asdict(step))), "") == step


def test_a_replay_that_still_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4)
    with (folder / ROWS).open("ab") as file:
        file.write(b'{"step": 5, "half": ')
    chapter = replay_chapter(read_run(folder))
    assert chapter.title == "some.jsonl" and "4 of 30 steps so far" in chapter.subtitle
    assert "a llama (2 layers)" in chapter.subtitle and "dense beside" in chapter.subtitle


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"step": 1}\n', "rows.jsonl, line 1"),
        (b"", "has no step yet"),
        (None, "rows.jsonl is missing"),
    ],
)
def test_damaged_folders(content: bytes | None, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2)
    (folder / ROWS).unlink()
    if content is not None:
        (folder / ROWS).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_run(folder)


def test_the_table_of_steps() -> None:
    figure = steps_figure(steps([1e-9, 2e-9]))
    row = dict(zip(figure.columns, figure.rows[1], strict=True))
    assert (row["step"], row["tokens given"], row["tokens run"], row["bound"]) == (2, 90, 40, 2.5)
    assert (row["shared (ms)"], row["dense (ms)"], row["speed-up"]) == (12.0, 30.0, 2.5)
    assert row["mean difference"] == 2e-9


def test_drift_says_whether_there_is_a_trend() -> None:
    random = np.random.default_rng(0)
    noise = np.cumsum(random.normal(size=60)) * 1e-9
    for means, said in ((noise, "no trend"), (noise + 5e-9 * np.arange(1, 61), "a trend")):
        (figure,) = drift_figures(steps(means.tolist()))
        assert f": {said} (" in figure.caption
    assert drift_trend(steps([math.nan] * 30)) is None and drift_trend(steps([0.0])) is None
    assert not drift_figures([replace(step, dense=None, difference=None) for step in steps([0.0])])


def test_a_step_with_compilation_does_not_hide_the_others() -> None:
    made = steps([0.0] * 5)
    assert not speed_figure(made).notes
    made[0] = replace(made[0], shared=replace(made[0].shared, ms=9_000.0))
    assert speed_figure(made).notes and typical_step(made).step == 3
    assert typical_step(made[:1]).step == 1


def test_replays_without_a_baseline_and_with_numbers_that_are_none_are_drawn() -> None:
    alone = [replace(step, dense=None, difference=None) for step in steps([0.0] * 2)]
    odd = steps([math.nan, 1e300], loss=math.nan, router_loss=0.5, events=("x y z", "share") * 300,
                event_ms=(1.0,) * 600)  # fmt: skip
    assert schedule_figure(odd).notes and not schedule_figure(alone).notes
    for made in (alone, odd):
        run = forkpoint_run(made)
        assert "<svg" in pictures(render_page("x", [replay_chapter(run)]))


def forkpoint_run(made: list[Any]) -> Any:
    from forkpoint.apps.report.replay import Run

    return Run(path=Path("x"), manifest={"fixed": FIXED, "about": {}}, steps=tuple(made))


def pictures(page: str) -> str:
    return "".join(picture.decode() for picture in Reader(page).pictures)


# Answers ------------------------------------------------------------------------------------------


def manifest(dtype: str | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    model = {**FIXED["model"], "config": {"dtype": dtype}}
    return {"fixed": {**FIXED, "model": model}, "about": {"options": options or {}}}


def answer(norm: float, dtype: str = "float32", means: list[float] | None = None) -> Tile:
    """Of a replay whose dense gradients have the norm 2 in its first step."""
    return gradients_tile(steps(means or [0.0, 0.0], gradient_norm=norm), manifest(dtype))


@pytest.mark.parametrize(
    ("dtype", "difference", "said", "state"),
    [
        ("float64", 1e-8, "yes", "good"),
        ("float64", 1e-5, "no", "bad"),
        ("float32", 1e-3, "no", "bad"),
        ("bfloat16", 1e-3, "yes", "good"),
        ("bfloat16", 5e-2, "no", "bad"),
        ("int7", 1e-3, "yes", "good"),
        ("float64", math.nan, "no", "bad"),
    ],
)
def test_gradients_match_within_a_bar(dtype: str, difference: float, said: str, state: str) -> None:
    tile = answer(2.0 * (1 + difference), dtype)
    assert (tile.value, tile.state) == (f"gradients match: {said}", state)


def test_answers_on_gradients() -> None:
    made = steps([0.0] * 3)
    later = [made[0], *(replace(s, shared=record(gradient_norm=9.0)) for s in made[1:])]
    assert gradients_tile(later, manifest("float64")).state == "good", "other weights after step 1"
    alone = [replace(step, dense=None, difference=None) for step in made]
    assert gradients_tile(alone, manifest("float32")).value == "gradients not compared"
    zero = [replace(made[0], shared=record(gradient_norm=0.0), dense=record(gradient_norm=0.0))]
    assert gradients_tile(zero, manifest("float32")).value == "gradients match: not shown"
    one = [replace(made[0], dense=record(gradient_norm=0.0))]
    assert gradients_tile(one, manifest("float32")).value == "gradients match: no"
    drifting = answer(2.0, means=[1e-6 * n for n in range(1, 31)])
    assert (drifting.value, drifting.state) == ("gradients match: in doubt", "bad")
    assert answer(2.0, means=[1e-6 * (-1) ** n for n in range(30)]).state == "good"


def test_the_dtype_is_that_of_the_command() -> None:
    assert norm_bar(manifest("float32", {"dtype": "bfloat16"})) == ("bfloat16", 2e-2)
    assert norm_bar(manifest("float32", {})) == ("float32", 1e-4)
    assert norm_bar(manifest(None, {"dtype": ["x"]}))[1] == 2e-2


def test_speeds_in_words() -> None:
    for speedup, bound, value, label, state in (
        (1.43, 1.5, "1.43x faster", "than dense, of at most 1.50x", "good"),
        (1.6, 1.5, "1.60x faster", "than dense; counted bound 1.50x", "good"),
        (0.5, 1.5, "2.00x slower", "than dense, of at most 1.50x", "bad"),
        (1.0, 1.0, "as fast", "as dense, of at most 1.00x", "plain"),
        (None, 1.5, "at most 1.50x", "faster than dense", "plain"),
    ):
        tile = measured_speed_tile(speedup, bound)
        assert (tile.value, tile.label, tile.state) == (value, label, state)
    totals = Totals()
    totals.add(make_plan(made_up(), SHAPE))
    tile = predicted_speed_tile(totals)
    assert tile.value == f"predicted {totals.predicted_speedup:.2f}x faster"


def test_memory_beside_its_limit() -> None:
    (tile,) = memory_tiles(30 * GIB)
    assert (tile.value, tile.label) == ("30.0 GiB", "of memory at the peak")
    assert tile.state == "plain" and memory_tiles(None) == []
    (tile,) = memory_tiles(30 * GIB, budget=20 * GIB)
    assert tile.state == "bad" and tile.label.endswith("of a budget of 20.0 GiB")
    assert memory_tiles(9 * GIB, budget=20 * GIB)[0].state == "plain"


def test_the_answers_of_a_replay(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 3))
    gradients, speed, tokens, memory = replay_chapter(run).tiles
    assert gradients.value == "gradients match: yes"
    assert speed.value == f"{90 / 36:.2f}x faster", "30 ms thrice over 11, 12 and 13"
    assert tokens.value == f"{40 / 90:.1%}" and memory.remark.startswith("Predicted")
    measured = [
        replace(step, shared=replace(step.shared, peak_memory_bytes=3 * GIB)) for step in run.steps
    ]
    tile = replay_chapter(replace(run, steps=tuple(measured))).tiles[3]
    assert tile.value == "3.0 GiB" and tile.remark.startswith("Measured")


# The page, and hostile text -----------------------------------------------------------------------


class Reader(HTMLParser):
    """Every element of a page with its attributes, the style, and the pictures."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.style = ""
        self.pictures: list[bytes] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            address = given.pop("src") or ""
            assert address.startswith(PICTURE)
            self.pictures.append(base64.b64decode(address.removeprefix(PICTURE)))
        self.elements.append((tag, tuple(given.items())))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.style += data
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"there is a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        assert decl == "doctype html"

    unknown_decl = handle_pi = handle_comment


def page_of(text: Any, rows: Any = None) -> str:
    """A page with the text wherever one may stand."""
    rows = [(text, text), ("x", 1.5)] if rows is None else rows
    columns = ("name", text)
    figure = Figure(name="t", title=text, caption=text, columns=columns, rows=rows, notes=(text,))
    tile = Tile(value=text, label=text, remark=text)
    chapter = Chapter(title=text, subtitle=text, tiles=(tile,), figures=(figure,))
    return render_page(text, [chapter])


def page_of_folder(folder: Path) -> str:
    chapter = replay_chapter(read_run(folder))
    page = render_page(chapter.title, [chapter])
    page.encode("utf-8")
    return page


def test_the_policy_allows_the_style_and_pictures_alone() -> None:
    reader = Reader(page_of("plain"))
    directives = {dict(given).get("http-equiv"): dict(given) for _, given in reader.elements}
    digest = base64.b64encode(hashlib.sha256(reader.style.encode()).digest()).decode()
    assert directives["Content-Security-Policy"]["content"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    names = [name for name, _ in reader.elements]
    assert names.index("meta") < names.index("style")
    assert not {"a", "form", "base", "iframe", "object", "embed", "script"} & set(names)
    assert "url(" not in reader.style and "@import" not in reader.style


def test_long_tables_say_what_they_leave_out() -> None:
    page = page_of("plain", [(n, n / 3) for n in range(MAX_TABLE_ROWS + 5)])
    assert f"The first {MAX_TABLE_ROWS} of {MAX_TABLE_ROWS + 5} rows" in page
    assert page.count('<td class="number">') == 2 * MAX_TABLE_ROWS
    assert '<td class="number">1,234,567</td><td class="number">0.333333</td>' in page_of(
        "plain", [(1234567, 1 / 3)]
    )


def test_text_is_shown_as_it_is_but_for_invisible_characters() -> None:
    plain = "größe 组 \U0001f468\u200d\U0001f469 עברית a\tb\nc $x^2$ \\"
    assert visible(plain) == plain
    assert visible("a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff") == (
        r"a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff"
    )
    assert abbreviate("x" * 10, 4) == "xxx…" and abbreviate("xxxx", 4) == "xxxx"
    assert json_text({"a": [1, None, "ü"]}) == '{"a": [1, null, "ü"]}'


@pytest.mark.parametrize("value", [*HOSTILE, "{{ 7 * 7 }}{% set x = 1 %}", {"<b>": ["<i>"]}])
def test_values_are_text_wherever_they_stand(value: Any) -> None:
    found = Reader(page_of(value))
    names = [name for name, _ in found.elements]
    assert names == [name for name, _ in Reader(page_of("plain")).elements]
    assert "49" not in found.text or "{{" not in str(value)


@pytest.mark.parametrize("text", HOSTILE[::2])
def test_files_full_of_hostile_text(text: str, tmp_path: Path) -> None:
    """The page has the elements of one full of plain text, and pictures are well-formed."""
    found = []
    for number, name in enumerate(("plain", text)):
        folder, batch = write_run(tmp_path / str(number), 3, **filled(name)), made_up()
        batch = renamed(batch, name)
        chapter = rollouts_chapter(name, [(batch, make_plan(batch))])
        found.append(Reader(render_page(name, [replay_chapter(read_run(folder)), chapter])))
    assert found[0].elements == found[1].elements
    for picture in found[1].pictures:
        names = {
            element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()
        }
        assert not {"script", "foreignObject", "image", "a", "b", "i"} & names


def changed_folders(folder: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """The folder with a hostile value at every place of every file that a report reads."""
    rng = random.Random(0)
    for name in (MANIFEST, ROWS):
        lines = [(folder / name).read_text()]
        if name != MANIFEST:
            lines = lines[0].splitlines()
        value = json.loads(lines[0])
        for kind, paths in json_mutations.kinds_of_nodes(value).items():
            path = rng.choice(paths)
            for new in (rng.choice(HOSTILE[:7]), Raw('{"<b>":["<i>",{"<u>":1}]}')):
                text = json_mutations.dumps(json_mutations.replaced(value, path, new))
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(folder, place)
                (place / name).write_text("\n".join([text, *lines[1:], ""]))
                yield f"{name} {kind}", place


def test_hostile_values_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by file and field, or is text in the page."""
    monkeypatch.setattr("forkpoint.apps.report.page.rendered", lambda *_: b"")
    folder = write_run(tmp_path / "run", 2, **filled("plain"))
    wanted = set(Reader(page_of_folder(folder)).elements)
    refused = shown = 0
    for what, changed in changed_folders(folder, tmp_path / "changed"):
        try:
            page = page_of_folder(changed)
        except ConfigError as error:
            refused += 1
            assert str(error).startswith(str(changed)), what
            continue
        shown += 1
        assert set(Reader(page).elements) <= wanted, what
    assert refused > 60 and shown > 30


# The command --------------------------------------------------------------------------------------


def test_plots(tmp_path: Path) -> None:
    figures = drift_figures(steps(np.linspace(0, 1e-9, 30).tolist()))
    named = {f"1-a $x_ b-{figure.name}": figure.pictures for figure in figures}
    written = write_plots(named, tmp_path / "plots")
    assert {"1-a-x-b-drift-0.png", "1-a-x-b-drift-1.svg"} <= {path.name for path in written}
    for path in written:
        begin = path.read_bytes()[:200]
        assert begin.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in begin
    before = {path: path.read_bytes() for path in written if path.suffix == ".svg"}
    write_plots(named, tmp_path / "plots")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_command_without_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    page = tmp_path / "page.html"
    given = ["report", str(tmp_path / "rollouts.jsonl"), "--output", str(page)]
    assert main(given) == 0
    assert "of the tokens computed" in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"] == [["forest", "groups", "counts"]]
    assert result["bytes"] == len(page.read_bytes())


def test_the_command_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of a trace share nothing with each other; the first of many are drawn."""
    made, trace, page = list(made_up()), str(tmp_path / "trace"), tmp_path / "page.html"
    given = ["report", trace, "--output", str(page), "--sharing", "tree"]
    with forkpoint.record(trace) as recorder:
        assert main(given) == 2
        for _ in range(6):
            recorder.add(made)
    assert main(given) == 0
    out = capsys.readouterr().out
    plan = make_plan(RolloutBatch(made), None, Config(sharing="tree"))
    assert f"({6 * plan.computed_tokens:,} of {6 * plan.logical_tokens:,} given)" in out
    assert "Not drawn: 2 more of the batches." in page.read_text()
    assert main([*given, "--limit", "1"]) == 0, "a part of a trace is one batch"
    assert "taken as one batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere.jsonl",),
        (".",),
        ("rollouts.jsonl", "--output", "no/page.html"),
        ("rollouts.jsonl", "--output", "./rollouts.jsonl"),
        ("trace", "--output", "trace/manifest.jsonl"),
        ("rollouts.jsonl", "--plots", "rollouts.jsonl"),
    ],
    ids=["file", "folder", "output", "the input", "a file of the input", "plots"],
)
def test_reports_that_cannot_be_made(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    with forkpoint.record("trace") as trace:
        trace.add(made_up())
    assert main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.glob("*.html"))
    assert len(forkpoint.load_rollouts("rollouts.jsonl")) == 12
    for _ in range(2):
        assert main(["report", "trace", "--output", "trace/page.html"]) == 0, "it is made again"
    assert len(forkpoint.load_rollouts("trace")) == 12


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    monkeypatch.setattr("forkpoint.apps.cli.options.find_spec", lambda name: None)
    for command, extra in (("report", "report"), ("demo", "demo")):
        file = [str(tmp_path / "rollouts.jsonl")] if command == "report" else []
        assert main([command, *file]) == 2
        assert f"pip install 'forkpoint[{extra}]'" in capsys.readouterr().err


def test_ids_that_utf_8_cannot_write(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON can hold."""
    made = [replace(rollout, group_id="a\ud800b", rollout_id=None) for rollout in made_up()]
    with forkpoint.record(tmp_path / "trace") as trace:
        trace.add(made)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "trace"), "--output", str(page)]) == 0
    assert r"a\ud800b" in page.read_text(encoding="utf-8")
