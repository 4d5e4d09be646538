"""A report as data, and as one HTML file. Imports no torch.

jinja2 escapes every value of the template, and invisible characters are shown as escapes. Pictures
are SVG images in data addresses, in which browsers run no script and load nothing. The page has no
script, and its content security policy forbids every request.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from forkpoint import __version__
from forkpoint.apps.report.draw import Draw, as_svg
from forkpoint.apps.report.text import abbreviate, visible
from forkpoint.errors import ConfigError

MAX_TABLE_ROWS = 2_000
Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One answer at the top of a chapter."""

    value: str
    label: str
    remark: str = ""
    state: Literal["good", "bad", "plain"] = "plain"
    """Whether it is what a reader hopes for, where that can be told."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A section of a chapter: pictures, a table, or both."""

    name: str
    title: str
    caption: str = ""
    pictures: Sequence[Draw] = ()
    columns: Sequence[str] = ()
    """Names of the table's columns, with units; none without a table."""
    rows: Sequence[Sequence[Cell]] = ()


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """The report on one input."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    figures: Sequence[Figure]


def check_page(path: Path) -> None:
    """Raises ConfigError for a path whose content a page must not replace."""
    if path.is_dir() or (path.exists() and path.suffix != ".html"):
        what = "a folder" if path.is_dir() else "a file and no page"
        raise ConfigError(
            f"{path} is {what}, which the page would replace. Give another name, such as "
            "report.html."
        )


def write_page(path: Path, chapters: Sequence[Chapter]) -> int:
    """Write the page of these chapters, and return its bytes."""
    return path.write_bytes(render_page(chapters).encode("utf-8"))


def render_page(chapters: Sequence[Chapter]) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("forkpoint.apps.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": _cell, "sha256": _sha256, "data_address": _data_address}
    environment.tests["numeric"] = lambda value: type(value) in (int, float)
    template = environment.get_template("page.html.j2")
    title = " · ".join(chapter.title for chapter in chapters)
    return template.render(
        title=title, chapters=chapters, version=__version__, max_rows=MAX_TABLE_ROWS
    )


def _shown(value: object) -> object:
    """A value of the template as it is shown; None is nothing."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else abbreviate(visible(str(value)), 10_000)


def _cell(value: Cell) -> str:
    if type(value) is float:
        return f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else abbreviate(str("" if value is None else value))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_address(picture: Draw) -> Markup:
    return Markup(f"data:image/svg+xml;base64,{base64.b64encode(as_svg(picture)).decode()}")
