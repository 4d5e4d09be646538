"""Chapters as one HTML file that asks for nothing else. Imports no torch.

All markup is made by `forkpoint.apps.report.markup.tag`, which escapes whatever is not markup. What
scripts draw is embedded as JSON without angle brackets or ampersands, and they only ever put it
into text nodes and numbers. A content security policy allows the page's own script and style sheet,
by their hashes, and forbids every request.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from forkpoint import __version__
from forkpoint.apps.report.figure import Cell, Chapter, Figure, Table
from forkpoint.apps.report.markup import NOTHING, Markup, document, policy, tag
from forkpoint.apps.report.text import cut, visible
from forkpoint.rollouts.schema import finite

MOST_TABLE_ROWS = 2_000
MOST_TITLE_CHARACTERS = 200
SCRIPTS = ("draw.js", "charts.js", "forest.js", "timeline.js", "page.js")


def render_page(title: str, chapters: Sequence[Chapter]) -> str:
    """The whole page."""
    figures: dict[str, Any] = {}
    for number, chapter in enumerate(chapters):
        for figure in chapter.figures:
            if figure.kind != "table":
                figures[_anchor(figure, number)] = {
                    "kind": figure.kind,
                    "charts": [asdict(chart) for chart in figure.charts],
                    "choices": [asdict(choice) for choice in figure.choices],
                }
    style, script = _file("style.css"), "\n".join(map(_file, SCRIPTS))
    title = cut(title, MOST_TITLE_CHARACTERS)
    return document(
        tag(
            "head",
            tag("meta", charset="utf-8"),
            policy(script, style),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="generator", content=f"forkpoint {__version__}"),
            tag("link", rel="icon", href=NOTHING),
            tag("title", title),
            tag("style", style),
        ),
        tag(
            "body",
            tag(
                "header",
                tag("h1", title),
                tag(
                    "button",
                    "Theme",
                    type="button",
                    id="theme",
                    aria_label="Switch between light and dark",
                ),
            ),
            tag("main", *(_chapter(chapter, number) for number, chapter in enumerate(chapters))),
            tag(
                "footer",
                f"Made by forkpoint {__version__}. This file is complete: it asks for nothing from "
                "elsewhere.",
            ),
            tag("div", id="tip", role="status", hidden=True),
            tag("script", embedded(figures), type="application/json", id="data"),
            tag("script", script),
        ),
        lang="en",
    )


def embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in, with nothing invisible in its text."""
    text = json.dumps(_visible(finite(value)), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _visible(value: Any) -> Any:
    """The same tree with texts as they are shown."""
    if isinstance(value, dict):
        return {visible(str(key)): _visible(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_visible(entry) for entry in value]
    return visible(value) if isinstance(value, str) else value


def _chapter(chapter: Chapter, number: int) -> Markup:
    tiles = (
        tag(
            "div",
            tag("div", tile.value, class_="value"),
            tag("div", tile.label, class_="label"),
            tag("div", tile.remark, class_="remark"),
            class_=f"tile {tile.state}",
        )
        for tile in chapter.tiles
    )
    warnings = (tag("p", warning, class_="warning", role="note") for warning in chapter.warnings)
    return tag(
        "article",
        tag("h2", cut(chapter.title, MOST_TITLE_CHARACTERS), class_="input"),
        tag("p", chapter.subtitle, class_="subtitle"),
        *warnings,
        tag("div", *tiles, class_="tiles"),
        *(_figure(figure, number) for figure in chapter.figures),
        id=f"chapter-{number}",
    )


def _figure(figure: Figure, number: int) -> Markup:
    is_table = figure.kind == "table"
    notes = [tag("li", note) for note in figure.notes]
    return tag(
        "section",
        tag("h3", figure.title),
        tag("p", figure.caption, class_="caption"),
        None if is_table else tag("div", class_="plot", id=_anchor(figure, number)),
        tag("ul", *notes, class_="notes") if notes else None,
        tag(
            "details",
            tag("summary", "Numbers"),
            *_table(figure.table, figure.title),
            class_="numbers",
            open=is_table,
        ),
        class_=f"figure {figure.kind}",
    )


def _table(table: Table, caption: str) -> list[Markup]:
    rows = (tag("tr", *map(_cell, row)) for row in table.rows[:MOST_TABLE_ROWS])
    # Above numbers, as they are aligned.
    first = table.rows[0] if table.rows else ()
    kinds = ["number" if type(cell) in (int, float) else None for cell in first]
    kinds += [None] * (len(table.columns) - len(kinds))
    heads = (
        tag("th", name, scope="col", class_=kind)
        for name, kind in zip(table.columns, kinds, strict=False)
    )
    parts = [
        tag("button", "Copy as table", type="button", class_="copy"),
        tag(
            "div",
            tag(
                "table",
                tag("caption", caption),
                tag("thead", tag("tr", *heads)),
                tag("tbody", *rows),
                class_="pairs" if table.columns == ("what", "value") else None,
            ),
            class_="scroll",
            tabindex="0",
        ),
    ]
    beyond = len(table.rows) - MOST_TABLE_ROWS
    if beyond > 0:
        parts.append(tag("p", f"The first {MOST_TABLE_ROWS:,} rows; {beyond:,} more are left out."))
    return parts


def _cell(value: Cell) -> Markup:
    if value is None or isinstance(value, str):
        return tag("td", None if value is None else cut(value))
    # Numbers are shown as people read them, and copied whole.
    text = str(value)
    if isinstance(value, float | int):
        text = f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"
    return tag("td", text, class_="number", data_value=repr(value))


def _anchor(figure: Figure, number: int) -> str:
    return f"{figure.name}-{number}"


def _file(name: str) -> str:
    return (files("forkpoint.apps.report") / "page" / name).read_text(encoding="utf-8")
