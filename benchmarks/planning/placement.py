"""Predicted steps of many ranks, by how their rollouts are placed.

Each file is repeated to 4,096 groups. Its copies are different groups: the token after what all of
its rollouts share is another one in each copy. So groups of different copies share what any two
groups of the file share at least (the 1,291 tokens of the airline's policy), and groups of one copy
what they share in the file. Copies lie one after the other.

Steps are those of Qwen3-8B, or another `--model`, in counted FLOPs: each rank plans its own
rollouts, programs are aligned, and every instruction waits for the slowest rank. The mean is that
of the ranks' own work; a share is what one rank would take for all of it, over the number of ranks.

`verl` is verl's published rule for groups that share a prompt (its trainer's balancing with
use_prefix_grouper): the workload of a rollout of n tokens is 24576 n + n^2, that of a group the
sum of its rollouts', and Karmarkar and Karp's method of largest differences places groups whole, as
many on each rank. `token counts` places groups whole, the most tokens first, each on the emptiest
rank.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.planning.rank_plans import plan_of_rank
from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import time_host
from forkpoint import RolloutBatch, load_rollouts
from forkpoint.errors import ConfigError
from forkpoint.parallel.placement.items import by_tokens
from forkpoint.parallel.placement.lockstep import predict_step
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.place import place_paths
from forkpoint.plan import MODELS, ModelShape, Plan
from forkpoint.plan.align import align
from forkpoint.plan.gathering import RankCosts, costs_of_rank, predicted
from forkpoint.plan.program import Program
from forkpoint.tree.forest import IntArray, SortedRollouts

NAME = "placement"
MODEL = "qwen3-8b"
FILES = ("airline.jsonl", "rag.jsonl")
BAR = 1.10
TIMED = (10_000, 512)
"""Rollouts and ranks of the step whose placing has a bar."""
MOST_MS = 1_000.0


def repeated(paths: Paths, groups: int) -> Paths:
    """Copies of all rollouts until there are so many groups; the last copy may lack some."""
    order, count = paths.order, len(paths)
    each = int(paths.groups.max()) + 1
    copies = -(-groups // each)
    trunk = int(order.shared_edges[1:].min())
    of_copy = np.arange(copies)[:, None]
    group = (paths.groups + of_copy * each).ravel()
    kept = group < groups
    shared = np.tile(order.shared_edges, copies)
    shared[:: len(order.rollouts)] = trunk
    shared[0] = 0
    rollouts = (order.rollouts + of_copy * count).ravel()
    every = SortedRollouts(rollouts, np.tile(order.edges, copies), shared)
    some = every.take(np.flatnonzero(kept[rollouts]))
    number = np.cumsum(kept) - 1
    return Paths(
        SortedRollouts(number[some.rollouts], some.edges, some.shared_edges),
        group[kept],
        np.tile(paths.mask_begin, copies)[kept],
        paths.trained_before,
    )


def largest_differences(sizes: IntArray, ranks: int) -> IntArray:
    """[n] ranks by Karmarkar and Karp's method, with as many numbers on each.

    Each run of `ranks` sorted numbers is a partial solution of one number a rank. The two solutions
    whose sums differ most become one, the fullest part of one with the emptiest of the other.
    """
    order = np.argsort(sizes, kind="stable").reshape(-1, ranks)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []

    def push(at: int, parts: list[tuple[int, list[int]]]) -> None:
        parts.sort(key=lambda part: (-part[0], part[1][0]))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], at, parts))

    for at, run in enumerate(order.tolist()):
        push(at, [(int(sizes[number]), [number]) for number in run])
    while len(heap) > 1:
        (_, at, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        both = zip(first, reversed(second), strict=True)
        push(at, [(a + b, [*left, *right]) for (a, left), (b, right) in both])
    found = np.zeros(len(sizes), np.int64)
    for rank, (_, numbers) in enumerate(heap[0][2]):
        found[numbers] = rank
    return found


def verl(groups: IntArray, lengths: IntArray, ranks: int) -> IntArray:
    """[N] the rank of each rollout by verl's rule; the number of groups is a multiple of ranks."""
    workload = np.zeros(int(groups.max()) + 1, np.int64)
    np.add.at(workload, groups, 24576 * lengths + lengths**2)
    return largest_differences(workload, ranks)[groups]


def gathered_step(plans: Sequence[Plan | None]) -> float:
    """FLOPs of a step in lockstep whose weights are gathered for each microbatch."""
    costs = [costs_of_rank(plan, plan) if plan else RankCosts() for plan in plans]
    both = [[f + b for f, b in zip(c.forward, c.backward, strict=True)] for c in costs]
    aligned = align([plan.program if plan else Program() for plan in plans], both)
    return predicted(aligned, costs)[0]


@dataclass(frozen=True, kw_only=True)
class Placement(Benchmark):
    """Predict steps of many ranks whose rollouts are placed by forkpoint, by tokens, and as verl.

    Attributes:
        data: The folder of airline.jsonl and rag.jsonl.
        groups: Each file is repeated to so many groups.
        ranks: Numbers of ranks; each divides the number of groups.
        model: Its name in forkpoint's list.
    """

    NAME: ClassVar[str] = NAME

    data: Path = Path("../shared/data")
    groups: int = 4096
    ranks: tuple[int, ...] = (8, 64, 512)
    model: str = MODEL

    def check(self) -> None:
        for ranks in self.ranks:
            if ranks < 1 or self.groups < 1 or self.groups % ranks:
                raise ConfigError(
                    f"groups is {self.groups} and ranks {ranks}; verl's rule places as many groups "
                    "on each rank. Take a number of groups that all numbers of ranks divide."
                )

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        shape = ModelShape.from_config(MODELS[self.model], dtype_bytes=2)
        rates = Rates.of(shape)
        for name in FILES:
            batch = RolloutBatch(load_rollouts(self.data / name))
            paths = repeated(Paths.of_batch(batch), self.groups)
            forest = paths.forest()
            lengths = np.ones(len(paths), np.int64)
            lengths[paths.order.rollouts] += paths.order.edges
            alone = predict_step([plan_of_rank(paths, np.arange(len(paths)), shape)]).lockstep
            for ranks in self.ranks:
                case = f"{name}, {self.groups} groups, {ranks} ranks"
                if deadline.over(case):
                    continue
                of = partial(place_paths, paths, forest, rates, ranks)
                yield self._timed(case, of, None)
                placed = {
                    "forkpoint": of(),
                    "token counts": by_tokens(paths.groups, lengths, ranks),
                    "verl": verl(paths.groups, lengths, ranks),
                }
                for way, rank in placed.items():
                    yield from self._rows(case, way, rank, (paths, shape, ranks, alone))

            rollouts, ranks = TIMED
            case = f"{name}, {rollouts} rollouts, {ranks} ranks"
            if deadline.over(case):
                continue
            groups = rollouts * (int(batch.group_index.max()) + 1) // len(batch)
            some = repeated(Paths.of_batch(batch), groups)
            of = partial(place_paths, some, some.forest(), rates, ranks)
            yield self._timed(case, of, MOST_MS)

    def _timed(self, case: str, of: Callable[[], object], bar: float | None) -> ResultRow:
        timing = time_host(of, repeats=5, clock=time.process_time)
        note = "of the processor, once its forest is built"
        return timed_row(NAME, case, "time of placing", timing, bar=bar, note=note)

    def _rows(
        self, case: str, way: str, rank: IntArray, of: tuple[Paths, ModelShape, int, float]
    ) -> Iterator[ResultRow]:
        paths, shape, ranks, alone = of
        plans = [plan_of_rank(paths, np.flatnonzero(rank == r), shape) for r in range(ranks)]
        step = predict_step(plans)
        row = partial(ResultRow, bench=NAME, case=f"{case}, placed by {way}")
        bar = BAR if way == "forkpoint" else None
        figures = {
            "step in lockstep": (step.lockstep / step.mean, "mean of the ranks' own work", bar),
            "step in lockstep, over a share": (
                step.lockstep * ranks / alone,
                "a share of the step on one rank",
                bar,
            ),
            "step, weights gathered once": (
                step.once / step.mean,
                "mean of the ranks' own work",
                bar,
            ),
        }
        for metric, (value, baseline, most) in figures.items():
            yield row(metric=metric, unit="1", value=round(value, 4), baseline=baseline, bar=most)
        # To compare commits by.
        whole = gathered_step(plans) / 1e15
        yield row(metric="step, weights gathered a microbatch", unit="PFLOP", value=round(whole, 4))
        tokens = sum(plan.computed_tokens for plan in plans if plan)
        yield row(metric="computed tokens", unit="1", value=tokens)
        counts = np.unique(np.stack([paths.groups, rank]), axis=1)[0]
        yield row(metric="groups split", unit="1", value=int((np.bincount(counts) > 1).sum()))
