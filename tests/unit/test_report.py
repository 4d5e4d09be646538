"""The page of a report, its plots and its command; text from files stays text."""

import base64
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from reports import CONFIGS, SHAPE, filled, made_up, renamed, steps, write_run

import forkpoint
import json_mutations
from forkpoint import Config, ConfigError, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.apps.replay.schema import MANIFEST, PLANS, ROWS
from forkpoint.apps.report.chapters import read_run, replay_chapter, rollouts_chapter
from forkpoint.apps.report.draw import write_plots
from forkpoint.apps.report.figure import Chapter, Figure, Table, Tile
from forkpoint.apps.report.page import MAX_TABLE_ROWS, render_page
from forkpoint.apps.report.steps import drift_figure
from forkpoint.apps.report.text import abbreviate, json_text, visible
from forkpoint.plan import make_plan
from forkpoint.rollouts.files import save_rollouts
from json_mutations import HOSTILE, Raw

PICTURE = "data:image/svg+xml;base64,"


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
    table = Table(columns=("what", text), rows=[(text, text), ("x", 1.5)] if rows is None else rows)
    figure = Figure(name="t", title=text, caption=text, table=table, notes=(text,))
    tile = Tile(value=text, label=text, remark=text)
    chapter = Chapter(title=text, subtitle=text, tiles=(tile,), figures=(figure,), warnings=(text,))
    return render_page(text, [chapter])


def page_of_folder(folder: Path) -> str:
    chapter = replay_chapter(read_run(folder))
    page = render_page(chapter.title, [chapter])
    page.encode("utf-8")
    return page


def replayed(tmp_path: Path, text: str) -> str:
    batch = renamed(made_up(), text)
    return page_of_folder(write_run(tmp_path, batch, 3, baseline=True, **filled(text)))


# The page -----------------------------------------------------------------------------------------


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


# Hostile text -------------------------------------------------------------------------------------


def test_text_is_shown_as_it_is_but_for_what_nobody_sees() -> None:
    plain = "größe 组 \U0001f468\u200d\U0001f469 עברית a\tb\nc $x^2$ \\"
    assert visible(plain) == plain
    assert visible("a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff") == (
        r"a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff"
    )
    assert abbreviate("x" * 10, 4) == "xxx…" and abbreviate("xxxx", 4) == "xxxx"
    assert json_text({"a": [1, None, "ü"]}) == '{"a": [1, null, "ü"]}'


@pytest.mark.parametrize("value", [*HOSTILE, "{{ 7 * 7 }}{% set x = 1 %}", {"<b>": ["<i>"]}, 1e308])
def test_values_are_text_wherever_they_stand(value: Any) -> None:
    """Also those of types that no figure has by its schema."""
    found = Reader(page_of(value))
    names = [name for name, _ in found.elements]
    assert names == [name for name, _ in Reader(page_of("plain")).elements]
    assert "49" not in found.text or "{{" not in str(value)


@pytest.fixture(scope="module")
def plain_elements(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Reader(replayed(tmp_path_factory.mktemp("plain") / "run", "plain")).elements


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_folder_full_of_hostile_text(
    text: str, plain_elements: list[Any], tmp_path: Path
) -> None:
    """The page has the elements of one full of plain text, and pictures are well-formed."""
    found = Reader(replayed(tmp_path / "hostile", text))
    assert found.elements == plain_elements
    for picture in found.pictures:
        names = {
            element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()
        }
        assert not {"script", "foreignObject", "image", "a", "b", "i"} & names


def changed_folders(folder: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """The folder with a hostile value at every place of every file that a report reads."""
    rng = random.Random(0)
    for name in (MANIFEST, ROWS, PLANS):
        lines = [(folder / name).read_text()]
        if name != MANIFEST:
            lines = lines[0].splitlines()
        for number, line in enumerate(lines[:2]):
            value = json.loads(line)
            for kind, paths in json_mutations.kinds_of_nodes(value).items():
                path = rng.choice(paths)
                for new in (rng.choice(HOSTILE[:7]), Raw(f'{{"<b>":["<i>",{{"<u>":{number}}}]}}')):
                    text = json_mutations.dumps(json_mutations.replaced(value, path, new))
                    shutil.rmtree(place, ignore_errors=True)
                    shutil.copytree(folder, place)
                    (place / name).write_text(
                        "\n".join([*lines[:number], text, *lines[number + 1 :], ""])
                    )
                    yield f"{name} {number} {kind}", place


def test_hostile_values_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by file and field, or is text in the page."""
    monkeypatch.setattr("forkpoint.apps.report.page.svg", lambda _: b"")
    folder = write_run(tmp_path / "run", made_up(), 2, baseline=True, **filled("plain"))
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
    assert refused > 200 and shown > 40


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
    assert {"0-a-x-b-forest-0.png", "0-a-x-b-schedule-0.svg", "1-b-drift-0.png"} <= names
    for path in written:
        begin = path.read_bytes()[:200]
        assert begin.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in begin
    before = {path: path.read_bytes() for path in written if path.suffix == ".svg"}
    write_plots(both, tmp_path / "plots")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_command_without_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    page = tmp_path / "page.html"
    given = ["report", str(tmp_path / "rollouts.jsonl"), "--output", str(page)]
    assert main(given) == 0
    assert "of the tokens computed" in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"] == [["forest", "groups", "schedule", "counts"]]
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
    text = page.read_text()
    assert "batch 3: " in text and "batch 4: " not in text
    assert "Not drawn: 2 more of the batches." in text
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
def test_what_cannot_be_reported(
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
    assert main(["report", str(tmp_path / "rollouts.jsonl")]) == 2
    assert "pip install 'forkpoint[report]'" in capsys.readouterr().err
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "pip install 'forkpoint[demo]'" in capsys.readouterr().err


def test_ids_that_utf_8_cannot_write(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON can hold."""
    made = [replace(rollout, group_id="a\ud800b", rollout_id=None) for rollout in made_up()]
    with forkpoint.record(tmp_path / "trace") as trace:
        trace.add(made)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "trace"), "--output", str(page)]) == 0
    assert r"a\ud800b" in page.read_text(encoding="utf-8")
