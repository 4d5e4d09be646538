"""Savings of sharing on many batches: counts and distributions, added up batch by batch.

Memory is that of one batch and of a few histograms, however many batches there are. Runs and plans
nothing. Imports no torch.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from forkpoint.plan.entries import entries_of
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of, dense_work, forest_work
from forkpoint.plan.runs import labels_run, run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest

MODES = ("none", "group", "tree")
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (2, 4, 8, 16)
_RATIO_STEPS = 1000


@dataclass
class Distribution:
    """Whole numbers and how often each was met; `scale` of them make 1."""

    scale: int = 1
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, values: IntArray) -> None:
        found, counts = np.unique(values, return_counts=True)
        self.counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def summary(self) -> dict[str, float]:
        """mean, p10, p50, p90, max; of nothing, zeros."""
        values = np.array(sorted(self.counts), np.float64) / self.scale
        counts = np.array([self.counts[value] for value in sorted(self.counts)])
        if not len(values):
            return dict.fromkeys(("mean", "p10", "p50", "p90", "max"), 0.0)
        below = np.cumsum(counts)
        at = {q: np.searchsorted(below, q / 100 * below[-1]) for q in (10, 50, 90)}
        quantiles = {f"p{q}": float(values[position]) for q, position in at.items()}
        mean = float((values * counts).sum() / below[-1])
        return {"mean": mean, **quantiles, "max": float(values[-1])}


@dataclass(frozen=True)
class Split:
    """A way to cut a batch into parts that share nothing with each other.

    kind: "microbatch": `count` rollouts each, in the order of the file; "ranks": that many parts of
        consecutive rollouts; "ranks, dealt in turn": rollout i goes to part i modulo `count`.
    """

    kind: str
    count: int

    def parts(self, rollouts: int) -> IntArray:
        """[N] the part of each rollout of a batch of N."""
        position = np.arange(rollouts)
        if self.kind == "microbatch":
            return position // self.count
        if self.kind == "ranks":
            return position * self.count // rollouts
        return position % self.count


SPLITS = (
    *(Split("microbatch", count) for count in MICROBATCHES),
    *(Split("ranks", count) for count in RANKS),
    *(Split("ranks, dealt in turn", count) for count in RANKS),
)


class Estimate:
    """Counts over batches, for nobody sharing (dense), groups sharing, and the whole batch.

    work: for each of MODES, tokens run, visible pairs and labelled tokens.
    logical_tokens, unique_tokens, group_tokens: as given; distinct (path, token) pairs of each
        whole batch, and of each group, summed.
    prefix_ratio: for each rollout, the share of its edges that another of its group has too.
    group_depth, tree_depth: for each rollout, the segments on its path.
    group_size: rollouts of each group.
    split_tokens: for each split, the tokens run where groups share, and where batches do.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        self.shape = shape
        self.batches: int = 0
        self.rollouts: int = 0
        self.groups: int = 0
        self.logical_tokens: int = 0
        self.unique_tokens: int = 0
        self.group_tokens: int = 0
        self.trained_tokens: int = 0
        windows = {0, *(shape.windows if shape else ())}
        nothing = Work(tokens=0, pairs=dict.fromkeys(windows, 0), num_loss_entries=0)
        self.work: dict[str, Work] = dict.fromkeys(MODES, nothing)
        self.prefix_ratio: Distribution = Distribution(scale=_RATIO_STEPS)
        self.group_depth: Distribution = Distribution()
        self.tree_depth: Distribution = Distribution()
        self.group_size: Distribution = Distribution()
        self.split_tokens: dict[Split, dict[str, int]] = {
            split: {"group": 0, "tree": 0} for split in SPLITS
        }

    def add(self, batch: RolloutBatch, runs: IntArray | None = None) -> None:
        """Count one batch: what one optimizer step trains on.

        runs: int64 [N], how many edges of each rollout run, from its first; None: all. `work` and
            `split_tokens` are of these alone.
        """
        whole = run_lengths(batch, whole=True)
        runs = whole if runs is None else runs
        given = _orders(batch, whole)
        orders = _orders(batch, runs) if (runs < whole).any() else given
        forests = {mode: build_forest(order, len(batch)) for mode, order in orders.items()}
        windows = self.shape.windows if self.shape else ()
        trained = int((batch.loss_mask & labels_run(batch.offsets, runs)).sum())
        self.work["none"] += dense_work(runs, trained, windows)
        for mode, forest in forests.items():
            self.work[mode] += forest_work(forest, _labelled(forest, batch), windows)
        firsts = batch.token_ids[batch.offsets[:-1]]
        pairs = np.stack([batch.group_index, firsts])
        group_firsts = np.unique(pairs, axis=1).shape[1]
        self.group_tokens += int(given["group"].new_edges.sum()) + group_firsts
        self.unique_tokens += int(given["tree"].new_edges.sum()) + len(np.unique(firsts))
        self.logical_tokens += batch.logical_tokens
        self.trained_tokens += batch.trained_tokens
        self.rollouts += len(batch)
        self.batches += 1
        sizes = np.bincount(batch.group_index)
        self.groups += len(sizes)
        self.group_size.add(sizes)
        self.prefix_ratio.add(_shared_steps(given["group"]))
        for mode, depths in (("group", self.group_depth), ("tree", self.tree_depth)):
            forest = forests[mode]
            depths.add(
                _depths(forest if orders is given else build_forest(given[mode], len(batch)))
            )
        for split, tokens in self.split_tokens.items():
            parts = split.parts(len(batch))
            for mode, order in orders.items():
                tokens[mode] += int(order.grouped(parts).new_edges.sum())

    def bound(self, mode: str) -> float:
        """Dense over `mode`, in FLOPs where there is a shape, else in tokens: the most that sharing
        can speed up what a model computes."""
        return bound_of(self.work["none"], self.work[mode], self.shape)


def _labelled(forest: Forest, batch: RolloutBatch) -> int:
    entries = entries_of(forest.edges, forest.token_edges(batch.offsets), batch)
    return int(entries.count.sum())


def _shared_steps(order: SortedRollouts) -> IntArray:
    """[M] of each rollout's edges, how many per thousand a neighbour has: in sorted order nobody
    shares more with it than the one before or the one after."""
    after = np.append(order.shared_edges[1:], 0)
    shared = np.maximum(order.shared_edges, after)
    return np.rint(shared * _RATIO_STEPS / np.maximum(order.edges, 1)).astype(np.int64)


def _depths(forest: Forest) -> IntArray:
    """[N] segments on each rollout's path."""
    depth = np.append(forest.depth + 1, 0)  # leaf -1, of a rollout of one token, has none
    return depth[forest.leaf]


def _orders(batch: RolloutBatch, runs: IntArray) -> dict[str, SortedRollouts]:
    order = sort_running(batch, runs)
    return {"group": order.grouped(batch.group_index), "tree": order}
