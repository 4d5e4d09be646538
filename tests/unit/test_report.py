"""Reports: figures and answers say what rows say; text from files stays text."""

import base64
import hashlib
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import FIXED, filled, record, steps, write_run

from forkpoint import ConfigError
from forkpoint.apps.cli import main
from forkpoint.apps.replay.folder import ROWS
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report.page import MAX_TABLE_ROWS, Chapter, Figure, render_page
from forkpoint.apps.report.replay import (
    Run,
    Tile,
    drift_figures,
    drift_trend,
    gradients_tile,
    memory_tiles,
    norm_bar,
    read_run,
    replay_chapter,
    speed_tile,
    steps_figure,
)
from forkpoint.apps.report.text import abbreviate, json_text, visible
from forkpoint.units import GIB
from json_mutations import HOSTILE

PICTURE = "data:image/svg+xml;base64,"


def without_dense(made: list[ReplayStep]) -> list[ReplayStep]:
    return [replace(step, dense=None, difference=None) for step in made]


# Replays ------------------------------------------------------------------------------------------


def test_a_replay_that_still_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4)
    with (folder / ROWS).open("ab") as file:
        file.write(b'{"step": 5, "half": ')
    chapter = replay_chapter(read_run(folder))
    assert chapter.title == "some.jsonl"
    assert chapter.subtitle == (
        "A replay of 4 of 30 steps so far on a llama (2 layers), dense beside shared."
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"step": 1}\n', "rows.jsonl, line 1"), (b"", "has no step yet"), (None, "rows.jsonl is")],
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
    noise = np.cumsum(np.random.default_rng(0).normal(size=60)) * 1e-9
    for means, said in ((noise, "no trend"), (noise + 5e-9 * np.arange(1, 61), "a trend")):
        (figure,) = drift_figures(steps(means.tolist()))
        assert f": {said} (" in figure.caption
    assert drift_trend(steps([math.nan] * 30)) is None and drift_trend(steps([0.0])) is None
    assert not drift_figures(without_dense(steps([0.0])))


def test_replays_without_a_baseline_and_with_numbers_that_are_none_are_drawn() -> None:
    odd = steps([math.nan, 1e300], loss=math.nan, router_loss=0.5)
    for made in (without_dense(steps([0.0] * 2)), odd):
        run = Run(path=Path("x"), manifest={"fixed": FIXED, "about": {}}, steps=tuple(made))
        found = Reader(render_page([replay_chapter(run)])).pictures
        assert found and all(b"<svg" in picture for picture in found)


# Answers ------------------------------------------------------------------------------------------


def manifest(dtype: str | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    model = {**FIXED["model"], "config": {"dtype": dtype}}
    return {"fixed": {**FIXED, "model": model}, "about": {"options": options or {}}}


def answer(norm: float, dtype: str = "float32", means: list[float] | None = None) -> Tile:
    """Of a replay whose dense gradients have the norm 2 in its first step."""
    return gradients_tile(steps(means or [0.0, 0.0], gradient_norm=norm), manifest(dtype))


@pytest.mark.parametrize(
    ("dtype", "difference", "said"),
    [
        ("float64", 1e-8, "yes"),
        ("float64", 1e-5, "no"),
        ("float32", 1e-3, "no"),
        ("bfloat16", 1e-3, "yes"),
        ("int7", 5e-2, "no"),
        ("float64", math.nan, "no"),
    ],
)
def test_gradients_match_within_a_bar(dtype: str, difference: float, said: str) -> None:
    tile = answer(2.0 * (1 + difference), dtype)
    state = "good" if said == "yes" else "bad"
    assert (tile.value, tile.state) == (f"gradients match: {said}", state)


def test_answers_on_gradients() -> None:
    made = steps([0.0] * 3)
    later = [made[0], *(replace(s, shared=record(gradient_norm=9.0)) for s in made[1:])]
    assert gradients_tile(later, manifest("float64")).state == "good", "other weights after step 1"
    dense = manifest("float32")
    assert gradients_tile(without_dense(made), dense).value == "gradients not compared"
    zero = [replace(made[0], shared=record(gradient_norm=0.0), dense=record(gradient_norm=0.0))]
    assert gradients_tile(zero, dense).value == "gradients match: not shown"
    one = [replace(made[0], dense=record(gradient_norm=0.0))]
    assert gradients_tile(one, dense).value == "gradients match: no"
    drifting = answer(2.0, means=[1e-6 * n for n in range(1, 31)])
    assert (drifting.value, drifting.state) == ("gradients match: in doubt", "bad")
    assert answer(2.0, means=[1e-6 * (-1) ** n for n in range(30)]).state == "good"
    assert norm_bar(manifest("float32", {"dtype": "bfloat16"})) == ("bfloat16", 2e-2)
    assert norm_bar(manifest(None, {"dtype": ["x"]}))[1] == 2e-2


def test_speed_beside_its_bound() -> None:
    states = [speed_tile(speedup, 1.5).state for speedup in (1.43, 1.6, 0.5, None)]
    assert states == ["good", "good", "bad", "plain"]
    assert speed_tile(0.5, 1.5).value.startswith("2.00x")


def test_memory_beside_its_limit() -> None:
    def peak(budget: int | None, **peaks: int | None) -> list[Tile]:
        return memory_tiles(steps([0.0], **peaks), budget)

    (tile,) = peak(None, peak_memory_bytes=30 * GIB)
    assert (tile.value, tile.label) == ("30.0 GiB", "of memory at the peak")
    assert tile.state == "plain" and tile.remark.startswith("Measured")
    (tile,) = peak(20 * GIB, predicted_peak_bytes=30 * GIB)
    assert tile.state == "bad" and tile.label.endswith("of a budget of 20.0 GiB")
    assert tile.remark.startswith("Predicted")
    assert peak(None, predicted_peak_bytes=None) == []


def test_the_answers_of_a_replay(tmp_path: Path) -> None:
    gradients, speed, tokens, _ = replay_chapter(read_run(write_run(tmp_path / "run", 3))).tiles
    assert gradients.value == "gradients match: yes"
    assert speed.value == f"{90 / 36:.2f}x faster", "30 ms thrice over 11, 12 and 13"
    assert tokens.value == f"{40 / 90:.1%}"


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
    figure = Figure(name="t", title=text, caption=text, columns=("name", text), rows=rows)
    tile = Tile(value=text, label=text, remark=text)
    return render_page([Chapter(title=str(text), subtitle=text, tiles=(tile,), figures=(figure,))])


def page_of_folder(folder: Path) -> str:
    page = render_page([replay_chapter(read_run(folder))])
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
    assert '<td class="number">0.333333</td>' in page


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
    assert [name for name, _ in found.elements] == [
        name for name, _ in Reader(page_of("plain")).elements
    ]
    assert "49" not in found.text or "{{" not in str(value)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty: no text of a file is in them, and they take long."""
    monkeypatch.setattr("forkpoint.apps.report.page.as_svg", lambda _: b"")


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_full_of_hostile_text(tmp_path: Path) -> None:
    """The page has the elements of one full of plain text."""
    plain, *pages = (
        Reader(page_of_folder(write_run(tmp_path / str(n), 3, **filled(text))))
        for n, text in enumerate(("plain", *HOSTILE))
    )
    for found in pages:
        assert found.elements == plain.elements


# The command --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    folders = [str(write_run(tmp_path / name, 2)) for name in ("one", "two")]
    for more in ((), ("--json",)):
        assert main(["report", *folders, "--output", str(page), *more]) == 0
    out, _, line = capsys.readouterr().out.strip().rpartition("\n")
    assert "gradients match: yes" in out and f"written: {page}" in out
    result = json.loads(line)
    assert result["figures"] == [["speed", "drift", "losses", "steps", "environment"]] * 2
    assert result["bytes"] == len(page.read_bytes())


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nowhere",),
        ("run", "--output", "no/page.html"),
        ("run", "--output", "run/rows.jsonl"),
        ("run", "--output", "run"),
    ],
)
def test_reports_that_cannot_be_made(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    before = (tmp_path / "run" / ROWS).read_bytes()
    assert main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.glob("*.html")) and (tmp_path / "run" / ROWS).read_bytes() == before


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forkpoint.apps.cli.options.find_spec", lambda name: None)
    for extra in ("report", "demo"):
        assert main([extra]) == 2
        assert f"pip install 'forkpoint[{extra}]'" in capsys.readouterr().err
