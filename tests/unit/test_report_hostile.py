"""Reports of folders that somebody has changed: the page has the elements of any other report."""

import json
import random
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from reports import filled, made_up, renamed, write_run

import json_mutations
from forkpoint import ConfigError
from forkpoint.apps.replay.schema import MANIFEST, PLANS, ROWS
from forkpoint.apps.report.chapters import replay_chapter
from forkpoint.apps.report.figure import Chapter, Figure, Table, Tile
from forkpoint.apps.report.markup import Markup, policy, tag
from forkpoint.apps.report.page import render_page
from forkpoint.apps.report.plots import write_plots
from forkpoint.apps.report.runs import read_run
from forkpoint.apps.report.text import cut, shown, visible
from json_mutations import HOSTILE, Raw

Element = tuple[str, tuple[tuple[str, str | None], ...]]


class Reader(HTMLParser):
    """Every element of a page with its attributes, and the texts of those that run or style."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.raw: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # What is copied with a table is the one attribute that comes from a file.
        self.elements.append((tag, tuple((k, "" if k == "data-value" else v) for k, v in attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.raw.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"there is a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        assert decl == "doctype html"

    unknown_decl = handle_pi = handle_comment


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def kinds(page: str) -> set[Element]:
    return set(read(page).elements)


def page_of(folder: Path) -> str:
    chapter = replay_chapter(read_run(folder))
    page = render_page(chapter.title, [chapter])
    page.encode("utf-8")
    return page


# The element builder ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*HOSTILE, ["<b>"], {"<b>": "<i>"}, 1.5, True, object()])
def test_whatever_is_not_markup_is_text(value: Any) -> None:
    text = str(tag("p", value, id="x", data_value=str(value)))
    assert kinds(text) == {("p", (("id", "x"), ("data-value", "")))}
    inside = text.partition(">")[2].removesuffix("</p>")
    assert not set("<>\"'") & set(inside) and text.encode("utf-8")


class Disguised(str):
    """Text that says it is markup."""

    __class__ = Markup  # type: ignore[assignment]

    def __str__(self) -> str:
        return "<script>pwned</script>"


def test_markup_cannot_be_made_elsewhere() -> None:
    with pytest.raises(TypeError, match="only tag makes markup"):
        Markup("<b>", object())
    assert "<script" not in str(tag("p", Disguised("x")))
    for wrong in (
        lambda: tag("iframe"),
        lambda: tag("p", onclick="x"),
        lambda: tag("p", style="x"),
        lambda: tag("link", rel="icon", href="https://example.org"),
        lambda: tag("meta", http_equiv="refresh", content="0"),
        lambda: tag("script", "a</script>"),
        lambda: tag("script", "a<!--"),
        lambda: tag("script", Disguised("x")),
        lambda: tag("script", tag("p")),
        lambda: tag("style", "</style"),
        lambda: tag("meta", "x"),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_the_policy_allows_the_one_script_and_nothing_else() -> None:
    page = render_page("t", [])
    reader = read(page)
    style, data, script = reader.raw
    wanted = read(str(policy(script, style))).elements[0]
    assert wanted in reader.elements and json.loads(data) == {}
    directives = dict(wanted[1])["content"]
    assert directives is not None and "unsafe" not in directives
    assert directives.startswith("default-src 'none'; script-src 'sha256-")
    assert "base-uri 'none'; form-action 'none'" in directives
    names = [name for name, _ in reader.elements]
    assert names.index("meta") < names.index("style") < names.index("script")
    assert not {"a", "form", "base", "iframe", "object", "embed", "img"} & set(names)


# Text ---------------------------------------------------------------------------------------------


def test_text_is_shown_as_it_is_but_for_what_nobody_sees() -> None:
    plain = "größe 组 \U0001f468\u200d\U0001f469 עברית a\tb\nc $x^2$ \\"
    assert visible(plain) == plain
    assert visible("a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff") == (
        r"a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff"
    )
    assert visible("\U000e0041\uffff") == r"\U000e0041\uffff"
    assert cut("x" * 10, 4) == "xxx…" and cut("xxxx", 4) == "xxxx"
    assert shown({"a": [1, None, "ü"]}) == '{"a": [1, null, "ü"]}' and shown("<b>") == "<b>"


# Figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*HOSTILE, ["<b>x", "<i>"], {"<b>": ["<i>"]}, None, 7, 1e308])
def test_figures_of_any_values(value: Any) -> None:
    """Also of types that no figure has by its schema."""

    def page(text: Any) -> str:
        table = Table(columns=("what", text), rows=[(text, text), ("x", 1.5)])
        figure = Figure(
            name="t", title=text, caption=text, kind="table", table=table, notes=(text,)
        )
        tile = Tile(value=text, label=text, remark=text)
        chapter = Chapter(title="t", subtitle=text, tiles=(tile,), figures=(figure,))
        return render_page("t", [chapter])

    number = [
        ("td", (("class", "number"), ("data-value", ""))),
        ("th", (("scope", "col"), ("class", "number"))),
    ]
    assert kinds(page(value)) <= {*kinds(page("plain")), *number}
    assert [name for name, _ in read(page(value)).elements] == [
        name for name, _ in read(page("plain")).elements
    ]


# Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_folder_full_of_hostile_text(text: str, tmp_path: Path) -> None:
    """The page has the elements of one full of plain text, in the same order."""
    pages = {}
    for name, given in (("plain", "plain"), ("hostile", text)):
        folder = write_run(
            tmp_path / name, renamed(made_up(), given), 3, baseline=True, **filled(given)
        )
        pages[name] = page_of(folder)
    found, wanted = read(pages["hostile"]), read(pages["plain"])
    assert found.elements == wanted.elements
    assert [*found.raw[:1], *found.raw[2:]] == [*wanted.raw[:1], *wanted.raw[2:]]
    assert not set("<>&") & set(found.raw[1])
    assert len(pages["hostile"]) < 3 * len(pages["plain"]) + 100_000


@pytest.mark.parametrize("text", HOSTILE[4:7], ids=["controls", "surrogates", "formulas"])
def test_plots_of_hostile_text(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", renamed(made_up(), text), 3, **filled(text * 100))
    for path in write_plots([replay_chapter(read_run(folder))], tmp_path / "plots"):
        if path.suffix == ".svg":
            ElementTree.parse(path)  # it is well-formed


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


def test_hostile_values_one_at_a_time(tmp_path: Path) -> None:
    """Each is refused by file and field, or is text in the page."""
    folder = write_run(tmp_path / "run", made_up(), 2, baseline=True, **filled("plain"))
    wanted = kinds(page_of(folder))
    refused = shown_as_text = 0
    for what, changed in changed_folders(folder, tmp_path / "changed"):
        try:
            page = page_of(changed)
        except ConfigError as error:
            refused += 1
            assert str(error).startswith(str(changed)), what
            continue
        shown_as_text += 1
        assert kinds(page) <= wanted, what
    assert refused > 200 and shown_as_text > 40
