"""Time the forest of one million tokens, and the whole plan: `python benchmarks/forest.py`.

Bar: sorting and building the forest takes under 0.5 s on two cores, in memory linear in tokens.
Prints a table and appends a JSON row per figure to benchmarks/results/forest.jsonl.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forkpoint import Rollout, RolloutBatch
from forkpoint.forest import Forest, build_forest, sort_rollouts
from forkpoint.plan import make_plan

TOKENS = 1_000_000
VOCAB = 150_000
REPEATS = 15
BAR_MS = 500.0
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "forest.jsonl"

Tokens = list[np.ndarray]


def flat_groups(random: np.random.Generator, tokens: int) -> Tokens:
    """Groups of 8 rollouts: a prompt of 7,000 tokens and responses of 1,000."""
    rollouts = []
    for _ in range(tokens // 64_000 + 1):
        prompt = random.integers(VOCAB, size=7_000)
        rollouts += [np.append(prompt, random.integers(VOCAB, size=1_000)) for _ in range(8)]
    return rollouts


def short_rollouts(random: np.random.Generator, tokens: int) -> Tokens:
    """Rollouts of 100 tokens in groups of 8 that share 60."""
    rollouts = []
    for _ in range(tokens // 800):
        prompt = random.integers(VOCAB, size=60)
        rollouts += [np.append(prompt, random.integers(VOCAB, size=40)) for _ in range(8)]
    return rollouts


def deep_tree(random: np.random.Generator, tokens: int) -> Tokens:
    """64 rollouts in one tree: each leaves an earlier one at a random token."""
    length = tokens // 64
    rollouts = [random.integers(VOCAB, size=length)]
    for _ in range(63):
        ids = rollouts[random.integers(len(rollouts))].copy()
        fork = int(random.integers(length // 2, length))
        ids[fork:] = random.integers(VOCAB, size=length - fork)
        rollouts.append(ids)
    return rollouts


def random_rollouts(random: np.random.Generator, tokens: int) -> Tokens:
    """Rollouts of 100 to 4,000 tokens that share nothing but by chance."""
    rollouts = []
    while tokens > 0:
        rollouts.append(random.integers(VOCAB, size=int(random.integers(100, 4_000))))
        tokens -= len(rollouts[-1])
    return rollouts


def bushy_tree(random: np.random.Generator, tokens: int) -> Tokens:
    """Rollouts of 100 tokens over 2 ids: forks everywhere, one tree a first token."""
    return list(random.integers(2, size=(tokens // 100, 100)))


CASES: dict[str, Callable[[np.random.Generator, int], Tokens]] = {
    "8 rollouts a group, prompt 7k": flat_groups,
    "10k rollouts of 100 tokens": short_rollouts,
    "64 rollouts of 15.6k in a deep tree": deep_tree,
    "random, nothing shared": random_rollouts,
    "10k rollouts over 2 ids, forks everywhere": bushy_tree,
}


def batch_of(rollouts: Tokens) -> RolloutBatch:
    """A batch that trains on the second half of every rollout."""
    return RolloutBatch(
        Rollout(ids, np.arange(len(ids)) >= (len(ids) + 1) // 2, 1.0) for ids in rollouts
    )


def forest_of(batch: RolloutBatch) -> Forest:
    classes = np.zeros(len(batch), np.int64)
    return build_forest(sort_rollouts(batch.token_ids, batch.offsets, classes), len(batch))


def times_ms(function: Callable[[], object], repeats: int) -> list[float]:
    function()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that is allocated at once besides what was there before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


def measure(case: str) -> Iterator[dict[str, Any]]:
    """The figures of one case; memory at half the tokens too, to show that it is linear."""
    batch, half = (
        batch_of(CASES[case](np.random.default_rng(0), tokens)) for tokens in (TOKENS, TOKENS // 2)
    )
    forest = forest_of(batch)
    for metric, value in (
        ("tokens", batch.logical_tokens),
        ("rollouts", len(batch)),
        ("edges", forest.edges),
        ("segments", len(forest)),
    ):
        yield {"metric": metric, "unit": "1", "value": value}
    for metric, function, repeats in (
        ("sort_and_build", forest_of, REPEATS),
        ("make_plan", make_plan, REPEATS // 3),
    ):
        samples = times_ms(lambda function=function: function(batch), repeats)
        p20, p50, p80 = (round(float(np.quantile(samples, q)), 2) for q in (0.2, 0.5, 0.8))
        yield {"metric": metric, "unit": "ms", "value": p50, "p20": p20, "p50": p50, "p80": p80}
    for metric, of in (("peak_memory", batch), ("peak_memory_half_the_tokens", half)):
        used = peak_bytes(lambda of=of: forest_of(of)) / of.logical_tokens
        yield {"metric": metric, "unit": "byte/token", "value": round(used, 1)}


def environment() -> dict[str, Any]:
    """Device, versions, commit and command: the same for every row of this run."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--", "src", "benchmarks/forest.py")
    names = ("forkpoint", "numpy")
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    """Measure every case; 1 if one misses the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="the rows are appended here")
    output: Path = parser.parse_args().output
    columns = ("tokens", "rollouts", "edges", "segments", "sort_and_build", "make_plan")
    memory = ("peak_memory", "peak_memory_half_the_tokens")
    table = Table(title=f"The forest of a million tokens; bar: sort_and_build < {BAR_MS:.0f} ms")
    for name in ("case", *columns, *memory):
        table.add_column(name.replace("_", " "), justify="left" if name == "case" else "right")
    rows, slow = [], False
    for case in CASES:
        figures = {figure["metric"]: figure for figure in measure(case)}
        rows += [
            {"bench": "forest", "case": case, "p20": None, "p50": None, "p80": None, **figure}
            for figure in figures.values()
        ]
        slow |= figures["sort_and_build"]["value"] >= BAR_MS
        cells = (f"{figures[name]['value']:,}" for name in (*columns, *memory))
        table.add_row(case, *cells)
    Console().print(table)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **environment()}) + "\n")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
