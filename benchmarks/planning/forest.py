"""The time and memory of building the forest of one million tokens, and of the whole plan.

The bar is 0.5 s on two cores to sort the rollouts and build the forest, in memory linear in tokens.
"""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import time_host
from forkpoint import Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.tree.forest import Forest, build_forest, sort_rollouts

NAME = "forest"
TOKENS = 1_000_000
VOCAB = 150_000
REPEATS = 15
BAR_MS = 500.0

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


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that is allocated at once besides what was there before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


def measure(case: str) -> Iterator[ResultRow]:
    """The figures of one case; memory at half the tokens too, to show that it is linear."""
    batch, half = (
        batch_of(CASES[case](np.random.default_rng(0), tokens)) for tokens in (TOKENS, TOKENS // 2)
    )
    forest = forest_of(batch)
    row = partial(ResultRow, bench=NAME, case=case)
    for metric, value in (
        ("tokens", batch.logical_tokens),
        ("rollouts", len(batch)),
        ("edges", forest.edges),
        ("segments", len(forest)),
    ):
        yield row(metric=metric, unit="1", value=value)
    timing = time_host(lambda: forest_of(batch), repeats=REPEATS)
    yield timed_row(NAME, case, "sort_and_build", timing, bar=BAR_MS)
    timing = time_host(lambda: make_plan(batch), repeats=REPEATS // 3)
    yield timed_row(NAME, case, "make_plan", timing)
    for metric, of in (("peak_memory", batch), ("peak_memory_half_the_tokens", half)):
        used = peak_bytes(lambda of=of: forest_of(of)) / of.logical_tokens
        yield row(metric=metric, unit="byte/token", value=round(used, 1))


@dataclass(frozen=True, kw_only=True)
class ForestOfAMillion(Benchmark):
    """Time building the forest of a million tokens, and the whole plan."""

    NAME: ClassVar[str] = NAME

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for case in CASES:
            if not deadline.over(case):
                yield from measure(case)
