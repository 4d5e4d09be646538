"""Figures of a report with their numbers. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers as they are copied: raw values, with the unit in the column's name."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `color` is a name of the page's palette; None in `values` is a gap."""

    name: str
    values: Sequence[float | None]
    color: Literal["shared", "dense", "bound", "accent"]
    style: Literal["line", "dashed", "points", "under"] = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over optimizer steps, or over layers."""

    x: Sequence[int]
    y_label: str
    series: tuple[Series, ...]
    x_label: Literal["step", "layer"] = "step"
    log: bool = False
    zero: bool = False
    """Whether 0 belongs in the picture."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Low and high of a shaded range."""
    band_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of the pictures of a figure that shows several, one at a time."""

    label: str
    data: Any
    """A forest or a timeline, ready for JSON."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture, what it says, and its numbers."""

    name: str
    """For anchors and file names."""
    title: str
    caption: str
    kind: Literal["chart", "forest", "timeline", "table"]
    table: Table
    charts: tuple[Chart, ...] = ()
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Notes on what is left out, and on how unmeasured numbers were counted."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One answer at the top of a chapter."""

    value: str
    label: str
    remark: str = ""
    state: Literal["good", "bad", "plain"] = "plain"
    """Whether it is what a reader hopes for, where that can be told."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """All there is to say about one input."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...] = ()
    """Sentences that stand above everything else."""
