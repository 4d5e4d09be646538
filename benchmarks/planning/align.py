"""The quality and time of aligning ranks' programs.

Quality: slots over the microbatches of the rank that has most, the mean over random sets of shapes.
Shapes are those of tests/random_forests.py: alike ones, wild ones of 32 microbatches, and planned
ones. Time: 64 wild programs of 32 microbatches, by kind, in milliseconds of one core (CPU time, so
that others on the machine do not count); of their shapes alone, and of whole programs, a fifth of
whose prefixes are recomputed and a third of which have scores; cold, with nothing remembered, and
warm. Bars are those of alike shapes, and of times without costs.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import Timing, time_host
from forkpoint.plan import align, align_programs
from forkpoint.plan.program import Program, step_program
from forkpoint.tree import Microbatch
from tests.random_forests import KINDS, WILD, Shape, planned

NAME = "align"
RANKS = (2, 8, 32)
BARS = {
    "flat": {2: 1.04, 8: 1.06, 32: 1.09},
    "mixed": {2: 1.00, 8: 1.04, 32: 1.05},
    "deep": {2: 1.05, 8: 1.27, 32: 1.36},
    "together": {8: 1.38, 32: 1.61},
}
SETS = {2: 40, 8: 20, 32: 10}
PROGRAMS, MICROBATCHES = 64, 32
COLD_MS, WARM_MS = 50.0, 10.0
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
    """Mean ratios of slots, and of costs where the costs were not given and where they were."""
    slots, unaware, aware = [], [], []
    for seed in range(SETS[count]):
        shapes, costs = draw(count, seed)
        alignment = align.align_shapes(shapes)
        slots.append(alignment.ratio)
        unaware.append(alignment.cost_ratio(costs))
        aware.append(align.align_shapes(shapes, costs).cost_ratio(costs))
    names = ("slots", "costs, not given", "costs")
    return {
        name: round(float(np.mean(found)), 3)
        for name, found in zip(names, (slots, unaware, aware), strict=True)
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
                width=0,
                cache_begin=(-1,),
                children=tuple(child for child, above in enumerate(parents) if above == index),
                run_tokens=1,
                tokens=1,
                activations="recompute" if index in parents and rng.random() < 0.2 else "keep",
                labelled=int(rng.random() < 0.8),
            )
            for index, parent in enumerate(parents)
        ]
        found.append(step_program(microbatches, scores=rng.random() < 1 / 3))
    return found


def times(run: Callable[[], object]) -> dict[str, Timing]:
    """CPU time, cold and warm by turns."""
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(REPEATS):
        align._common.cache_clear()
        for samples in found.values():
            once = time_host(run, repeats=1, warm_up=False, clock=time.process_time)
            samples += once.samples_ms
    return {name: Timing(samples) for name, samples in found.items()}


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
            for given in (None, costs):
                bars = {} if given else {"cold": COLD_MS, "warm": WARM_MS}
                costly = ", costs" if given else ""
                runs: dict[str, Callable[[], object]] = {
                    f"wild {kind}, {PROGRAMS} shapes{costly}": partial(
                        align.align_shapes, shapes, given
                    ),
                    f"wild {kind}, {PROGRAMS} programs{costly}": partial(
                        align_programs.align, programs, given
                    ),
                }
                for case, run in runs.items():
                    for name, timing in times(run).items():
                        note = "CPU time"
                        yield timed_row(NAME, case, name, timing, bar=bars.get(name), note=note)
