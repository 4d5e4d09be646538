"""The quality and time of aligning ranks' programs.

Quality: slots over the microbatches of the rank that has most, the mean over random sets of shapes.
Shapes are those of `random_forests`: similar ones, random ones of 32 microbatches, and planned
ones. Time is that of one core for 64 random programs of 32 microbatches, in milliseconds, by kind:
of their shapes alone, and of whole programs. A fifth of the prefixes are recomputed, and a third of
the programs have scores. The bars hold for similar shapes, and for the times of shapes.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.planning.random_forests import KINDS, WILD, Shape, planned
from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import time_host
from forkpoint.plan.align import align, common_forest
from forkpoint.plan.program import Program, step_program
from forkpoint.tree import Microbatch

NAME = "align"
RANKS = (2, 8, 32)
BARS = {
    "flat": {2: 1.04, 8: 1.06, 32: 1.09},
    "mixed": {2: 1.01, 8: 1.04, 32: 1.05},
    "deep": {2: 1.05, 8: 1.17, 32: 1.22},
    "together": {8: 1.38, 32: 1.61},
}
SETS = {2: 40, 8: 20, 32: 10}
PROGRAMS, MICROBATCHES = 64, 32
MOST_MS = 100.0
REPEATS = 15

Costs = list[list[float]]
Draw = Callable[[int, int], tuple[list[Shape], Costs]]


def drawn(draw: Callable[[random.Random], Shape], name: str) -> Draw:
    """Sets of shapes of a kind, with random costs."""

    def of(count: int, seed: int) -> tuple[list[Shape], Costs]:
        rngs = [random.Random(f"{name} {count} {seed} {rank}") for rank in range(count)]
        shapes = [draw(rng) for rng in rngs]
        return shapes, [[rng.random() for _ in own] for rng, own in zip(rngs, shapes, strict=True)]

    return of


def chosen(kind: str) -> Draw:
    """Sets out of 48 plans, whose costs are their microbatches' tokens."""
    pool = [planned(kind, seed) for seed in range(48)]

    def of(count: int, seed: int) -> tuple[list[Shape], Costs]:
        found = random.Random(seed).sample(pool, count)
        return [shape for shape, _ in found], [costs for _, costs in found]

    return of


def families() -> Iterator[tuple[str, str, Draw]]:
    for kind, draw in KINDS.items():
        yield "alike", kind, drawn(draw, kind)
    for kind in WILD:
        yield "planned", kind, chosen(kind)
    for kind, wild in WILD.items():
        yield "wild", kind, drawn(lambda rng, wild=wild: wild(rng, MICROBATCHES), kind)


def ratios(draw: Draw, count: int) -> dict[str, float]:
    """Mean ratios of slots, and of the cost of all slots to that of the costliest rank."""
    slots, costly = [], []
    for seed in range(SETS[count]):
        shapes, costs = draw(count, seed)
        parents, slots_of = common_forest(shapes, costs)
        slots.append(len(parents) / max(map(len, shapes)))
        highest = np.zeros(len(parents))
        for shape, own in zip(shapes, costs, strict=True):
            np.maximum.at(highest, list(slots_of[shape]), own)
        costly.append(highest.sum() / max(map(sum, costs)))
    return {
        "slots": round(float(np.mean(slots)), 3),
        "costs": round(float(np.mean(costly)), 3),
    }


def programs_of(shapes: list[Shape]) -> list[Program]:
    """Programs of microbatches that are nested like this."""
    found = []
    for rank, parents in enumerate(shapes):
        rng = random.Random(rank)
        microbatches = [
            Microbatch(
                index=index,
                parent=parent,
                segments=(index,),
                segment_begin=(0,),
                cache_begin=(-1,),
                children=tuple(child for child, above in enumerate(parents) if above == index),
                tokens=1,
                activations="recompute" if index in parents and rng.random() < 0.2 else "keep",
                num_loss_entries=int(rng.random() < 0.8),
            )
            for index, parent in enumerate(parents)
        ]
        found.append(step_program(microbatches, scores=rng.random() < 1 / 3))
    return found


@dataclass(frozen=True, kw_only=True)
class Align(Benchmark):
    """Measure slots and times of common schedules for ranks whose programs differ."""

    NAME: ClassVar[str] = NAME

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for family, kind, draw in families():
            bars = BARS[kind] if family == "alike" else {}
            for count in RANKS:
                case = f"{family} {kind}, {count} ranks"
                if deadline.over(case):
                    continue
                for metric, value in ratios(draw, count).items():
                    yield ResultRow(
                        bench=NAME,
                        case=case,
                        metric=f"ratio of {metric}",
                        unit="1",
                        # Bars have two places.
                        value=round(value, 2) if metric == "slots" else value,
                        bar=bars.get(count) if metric == "slots" else None,
                    )
        for kind, wild in WILD.items():
            if deadline.over(f"times of wild {kind}"):
                continue
            draw = drawn(lambda rng, wild=wild: wild(rng, MICROBATCHES), kind)
            shapes, costs = draw(PROGRAMS, 0)
            programs = programs_of(shapes)
            runs: dict[str, Callable[[], object]] = {
                "shapes": partial(common_forest, shapes, costs),
                "programs": partial(align, programs, costs),
            }
            for of, run in runs.items():
                timing = time_host(run, repeats=REPEATS, clock=time.process_time)
                yield timed_row(
                    NAME,
                    f"wild {kind}, {PROGRAMS} {of}",
                    "time",
                    timing,
                    bar=MOST_MS if of == "shapes" else None,
                    note="CPU time",
                )
