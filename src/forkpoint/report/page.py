"""Chapters as one HTML file that asks for nothing else. Imports no torch.

Text from outside (file names, ids, commands) enters in two ways: escaped by `html.escape` in the
body, and as JSON without angle brackets or ampersands, which the page's scripts only ever put into
text nodes. A content security policy forbids the page every request.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from forkpoint import __version__
from forkpoint.replay.folder import finite
from forkpoint.report.figure import Cell, Chapter, Figure, Table

MOST_TABLE_ROWS = 2_000
MARKER = re.compile("@@([a-z]+)@@")
SCRIPTS = ("draw.js", "charts.js", "forest.js", "timeline.js", "page.js")


def render_page(title: str, chapters: Sequence[Chapter]) -> str:
    """The whole page."""
    figures: dict[str, Any] = {}
    parts = []
    for number, chapter in enumerate(chapters):
        parts.append(_chapter(chapter, number))
        for figure in chapter.figures:
            if figure.kind != "table":
                figures[_anchor(figure, number)] = {
                    "kind": figure.kind,
                    "charts": [asdict(chart) for chart in figure.charts],
                    "choices": [asdict(choice) for choice in figure.choices],
                }
    contents = {
        "style": _file("style.css"),
        "scripts": "\n".join(_file(name) for name in SCRIPTS),
        "title": html.escape(title),
        "version": html.escape(__version__),
        "body": "\n".join(parts),
        "data": embedded(figures),
    }
    # In one pass, so that nothing that came in is taken for a marker.
    return MARKER.sub(lambda found: contents[found[1]], _file("page.html"))


def embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _chapter(chapter: Chapter, number: int) -> str:
    tiles = "".join(
        f'<div class="tile"><div class="value">{html.escape(tile.value)}</div>'
        f'<div class="label">{html.escape(tile.label)}</div>'
        f'<div class="remark">{html.escape(tile.remark)}</div></div>'
        for tile in chapter.tiles
    )
    figures = "\n".join(_figure(figure, number) for figure in chapter.figures)
    return (
        f'<article id="chapter-{number}"><h2 class="input">{html.escape(chapter.title)}</h2>'
        f'<p class="subtitle">{html.escape(chapter.subtitle)}</p>'
        f'<div class="tiles">{tiles}</div>\n{figures}</article>'
    )


def _figure(figure: Figure, number: int) -> str:
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in figure.notes)
    picture = f'<div class="plot" id="{_anchor(figure, number)}"></div>'
    opened = ' class="numbers"'
    if figure.kind == "table":
        picture, opened = "", ' class="numbers" open'
    return (
        f'<section class="figure {figure.kind}"><h3>{html.escape(figure.title)}</h3>'
        f'<p class="caption">{html.escape(figure.caption)}</p>{picture}'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + f"<details{opened}><summary>Numbers</summary>{_table(figure.table, figure.title)}"
        "</details></section>"
    )


def _table(table: Table, caption: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.columns)
    body = "".join(
        "<tr>" + "".join(_cell(value) for value in row) + "</tr>"
        for row in table.rows[:MOST_TABLE_ROWS]
    )
    beyond = len(table.rows) - MOST_TABLE_ROWS
    note = f"<p>The first {MOST_TABLE_ROWS:,} rows; {beyond:,} more are left out.</p>"
    return (
        '<button type="button" class="copy">Copy as table</button>'
        f'<div class="scroll" tabindex="0"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + (note if beyond > 0 else "")
    )


def _cell(value: Cell) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f'<td class="number" data-value="{value!r}">{shown}</td>'


def _anchor(figure: Figure, number: int) -> str:
    return f"{figure.name}-{number}"


def _file(name: str) -> str:
    return (files("forkpoint.report") / "page" / name).read_text(encoding="utf-8")
