"""A report as data: chapters of answers, pictures and tables. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forkpoint.tree.forest import IntArray

Cell = str | int | float | None
Color = Literal["shared", "dense", "bound", "accent"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers with their unit in the column's name."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve; None in `values` is a gap."""

    name: str
    values: Sequence[float | None]
    color: Color
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ForestPicture:
    """Segments of a batch: as long as their tokens, as wide as the rollouts through them."""

    label: str
    start: IntArray
    """First position of each segment, in tokens; int64 [S]."""
    length: IntArray
    """Tokens of each segment; int64 [S]."""
    begin: IntArray
    """First lane of each segment, of one lane a rollout; int64 [S]."""
    end: IntArray
    """One past its last lane; int64 [S]."""
    groups: tuple[tuple[str, float], ...]
    """Names of groups, and the lane in the middle of each; none if there are too many."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An instruction of a plan's program."""

    name: str
    phase: str
    """A key of `draw.PHASES`."""
    tokens: int
    """Of its microbatch."""
    size: float
    """Time or work, in the picture's `unit`."""
    held: float
    """Memory held meanwhile, in the picture's `held_unit`."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The events of one step, in order."""

    name: str
    events: tuple[Event, ...]
    rest: float = 0.0
    """Time besides the events: planning and optimizer."""


@dataclass(frozen=True, kw_only=True)
class SchedulePicture:
    """Lanes of one batch on one scale."""

    label: str
    lanes: tuple[Lane, ...]
    unit: str
    """Of sizes: ms, or a unit of FLOPs, or tokens."""
    held_unit: str
    """Of memory: a unit of bytes, or tokens."""
    held_source: Literal["measured", "counted"]


Picture = Chart | ForestPicture | SchedulePicture


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Pictures, what they say, and their numbers."""

    name: str
    """For file names."""
    title: str
    caption: str
    table: Table
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
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
