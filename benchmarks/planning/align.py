"""Quality and time of aligning ranks' programs: `python benchmarks/align.py`.

Quality: slots over the microbatches of the rank that has most, the mean over random sets of shapes.
Shapes are those of tests/random_forests.py: alike ones, wild ones of 32 microbatches, and planned
ones. Time: 64 wild programs of 32 microbatches, by kind, in milliseconds of one core (CPU time, so
that others on the machine do not count); cold, with nothing remembered, and warm.

Prints tables, appends a JSON row per figure to benchmarks/results/align.jsonl, and ends with 1 if
alike shapes or times without costs miss their bars.
"""

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forkpoint.plan import align

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "align.jsonl"
sys.path.insert(0, str(ROOT / "tests"))

from random_forests import KINDS, WILD, Shape, planned  # noqa: E402

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


def times_ms(shapes: list[Shape], costs: Costs | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(REPEATS):
        align._common.cache_clear()
        for times in found.values():
            began = time.process_time()
            align.align_shapes(shapes, costs)
            times.append(1e3 * (time.process_time() - began))
    return found


def environment() -> dict[str, Any]:
    """Device, versions, commit and command: the same for every row of this run."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--", "src", "benchmarks/align.py", "tests")
    names = ("forkpoint", "numpy")
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    """Measure everything; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="the rows are appended here")
    output: Path = parser.parse_args().output
    rows: list[dict[str, Any]] = []
    missed = False

    quality = Table(
        title="slots over the longest rank's microbatches (costs alike, if given / not)"
    )
    for name in ("shapes", "kind", *(f"{count} ranks" for count in RANKS), "bars"):
        quality.add_column(name)
    for family, kind, draw in families():
        bars = BARS[kind] if family == "alike" else {}
        cells = []
        for count in RANKS:
            found = ratios(draw, count)
            cells.append("{slots:.2f} ({costs:.2f} / {costs, not given:.2f})".format(**found))
            missed |= count in bars and round(found["slots"], 2) > bars[count]
            case = f"{family} {kind}, {count} ranks"
            for metric, value in found.items():
                rows.append(
                    {"case": case, "metric": f"ratio of {metric}", "unit": "1", "value": value}
                )
        listed = " / ".join(f"{bars[count]:.2f}" if count in bars else "-" for count in RANKS)
        quality.add_row(family, kind, *cells, listed if bars else "")
    Console(width=120).print(quality)

    bars = f"bars {COLD_MS:.0f}, {WARM_MS:.0f}"
    speed = Table(title=f"ms of CPU for {PROGRAMS} programs of {MICROBATCHES}; {bars}")
    for name in ("shapes", "costs", "slots", "cold", "p20 to p80", "warm"):
        speed.add_column(name, justify="left" if name == "shapes" else "right")
    for kind, wild in WILD.items():
        draw = drawn(lambda rng, wild=wild: wild(rng, MICROBATCHES), kind)
        shapes, costs = draw(PROGRAMS, 0)
        for given in (None, costs):
            ratio = align.align_shapes(shapes, given).ratio
            quantiles = {}
            for name, times in times_ms(shapes, given).items():
                p20, p50, p80 = (round(float(np.quantile(times, q)), 2) for q in (0.2, 0.5, 0.8))
                quantiles[name] = p20, p50, p80
                case = f"wild {kind}, {PROGRAMS} programs{', costs' if given else ''}"
                figure = {"unit": "ms of CPU", "value": p50, "p20": p20, "p50": p50, "p80": p80}
                rows.append({"case": case, "metric": name, **figure})
            (low, cold, high), (_, warm, _) = quantiles["cold"], quantiles["warm"]
            missed |= given is None and (cold > COLD_MS or warm > WARM_MS)
            speed.add_row(
                f"wild {kind}",
                "given" if given else "",
                f"{ratio:.2f}",
                f"{cold:.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{warm:.2f}",
            )
    Console(width=120).print(speed)

    output.parent.mkdir(parents=True, exist_ok=True)
    every = environment()
    with output.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(
                json.dumps({"bench": "align", "p20": None, "p50": None, "p80": None} | row | every)
                + "\n"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
