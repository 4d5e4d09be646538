"""Savings of sharing on many batches, added up batch by batch. Imports no torch."""

import numpy as np

from forkpoint.plan.entries import entries_of
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of, dense_work, forest_work
from forkpoint.plan.runs import labels_run, run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, build_forest

MODES = ("none", "group", "tree")


class Estimate:
    """Counts over batches, for nobody sharing (dense), groups sharing, and the whole batch.

    work: for each of MODES, tokens run, visible pairs and labelled tokens.
    logical_tokens, unique_tokens, group_tokens: as given; distinct (path, token) pairs of each
        whole batch, and of each group, summed.
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

    def add(self, batch: RolloutBatch, runs: IntArray | None = None) -> None:
        """Count one batch: what one optimizer step trains on.

        runs: int64 [N], how many edges of each rollout run, from its first; None: all. `work` is of
            these alone.
        """
        whole = run_lengths(batch, whole=True)
        runs = whole if runs is None else runs
        given = sort_running(batch, whole)
        running = sort_running(batch, runs) if (runs < whole).any() else given
        windows = self.shape.windows if self.shape else ()
        trained = int((batch.loss_mask & labels_run(batch.offsets, runs)).sum())
        self.work["none"] += dense_work(runs, trained, windows)
        for mode, order in (("group", running.grouped(batch.group_index)), ("tree", running)):
            forest = build_forest(order, len(batch))
            entries = entries_of(forest.edges, forest.token_edges(batch.offsets), batch)
            self.work[mode] += forest_work(forest, int(entries.count.sum()), windows)
        firsts = np.stack([batch.group_index, batch.token_ids[batch.offsets[:-1]]])
        self.group_tokens += int(given.grouped(batch.group_index).new_edges.sum())
        self.group_tokens += np.unique(firsts, axis=1).shape[1]
        self.unique_tokens += int(given.new_edges.sum()) + len(np.unique(firsts[1]))
        self.logical_tokens += batch.logical_tokens
        self.trained_tokens += batch.trained_tokens
        self.rollouts += len(batch)
        self.batches += 1
        self.groups += int(batch.group_index.max(initial=-1)) + 1

    def bound(self, mode: str = "tree") -> float:
        """Dense over `mode`, in FLOPs where there is a shape, else in tokens.

        That of "tree" is the bound of the rollouts: the most that sharing can speed up what a model
        computes, whatever limits a plan keeps to.
        """
        return bound_of(self.work["none"], self.work[mode], self.shape)
