"""Tokens that a step runs of each rollout, and those that it leaves out because nothing needs them.

A step needs a rollout's edges up to the last one whose label gives a gradient, a log-prob that was
asked for, or a statistic of routers. Of most rollouts that is the last trained token. A rollout
without trained tokens is not run, nor is one whose terms a loss declares to be 0.
"""

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, SortedRollouts, sort_rollouts


@dataclass(frozen=True)
class LeftOut:
    """Parts of a batch that a plan does not run.

    A plan without sharing runs the other tokens, except one of each rollout: its last label.
    """

    rollouts: int = 0
    """Rollouts of two or more tokens that do not run: they give no gradient."""
    groups: int = 0
    """Groups all of whose rollouts of two or more tokens do not run, and that have one."""
    rollout_tokens: int = 0
    """Tokens of these rollouts, the last ones included."""
    tail_tokens: int = 0
    """Tokens of other rollouts after their last trained token."""

    @property
    def tokens(self) -> int:
        return self.rollout_tokens + self.tail_tokens

    def __add__(self, other: "LeftOut") -> "LeftOut":
        """Both, of different batches."""
        return LeftOut(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(cls, batch: RolloutBatch, runs: IntArray) -> "LeftOut":
        """Parts that a plan leaves out.

        runs: int64 [N], how many edges of each rollout it runs.
        """
        edges = np.maximum(batch.lengths - 1, 0)
        still = (runs == 0) & (edges > 0)
        groups = int(batch.group_index.max(initial=-1)) + 1
        running, able = (
            np.bincount(batch.group_index[which], minlength=groups)
            for which in (runs > 0, edges > 0)
        )
        return cls(
            rollouts=int(still.sum()),
            groups=int(((running == 0) & (able > 0)).sum()),
            rollout_tokens=int(batch.lengths[still].sum()),
            # Where last tokens run, more edges do than have labels.
            tail_tokens=int(np.maximum(edges - runs, 0)[~still].sum()),
        )


def run_lengths(
    batch: RolloutBatch,
    zero: NDArray[np.bool_] | None = None,
    *,
    whole: bool = False,
    last_tokens: bool = False,
) -> IntArray:
    """How many edges of each rollout run, from its first: int64 [N].

    Args:
        zero: bool [N], rollouts whose terms are 0; None: there are none.
        whole: whether something needs all of each rollout, as statistics of routers do. Experts
            that the batch has for its tokens (`routed_experts`) are such statistics, too.
        last_tokens: whether rollouts' last tokens run besides, which have no label.
    """
    if whole or batch.routed_experts is not None:
        return np.maximum(batch.lengths - (0 if last_tokens else 1), 0)
    trained = np.flatnonzero(batch.loss_mask)
    # The last trained token before the end of each rollout, if it is one of the rollout's own.
    at = np.searchsorted(trained, batch.offsets[1:]) - 1
    last = np.append(trained, -1)[at]
    found = np.maximum(last - batch.offsets[:-1], 0)
    return found if zero is None else np.where(zero, 0, found)


def labels_run(offsets: IntArray, runs: IntArray) -> NDArray[np.bool_]:
    """For each token of a batch, whether the edge that has it for its label runs: bool [T].

    Args:
        offsets: [N + 1] where each rollout starts; the last entry is T.
        runs: [N] how many edges of each run.
    """
    # Numbers of one byte: batches have many more tokens than rollouts.
    change = np.zeros(int(offsets[-1]) + 1, np.int8)
    first = offsets[:-1] + 1
    change[first] += 1
    change[first + np.minimum(runs, np.diff(offsets) - 1)] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).astype(bool)


def sort_running(
    batch: RolloutBatch, runs: IntArray, *, last_tokens: bool = False
) -> SortedRollouts:
    """The rollouts sorted, and what neighbours share of what runs of them: see `sort_rollouts`.

    runs: what `run_lengths` gave.
    """
    ids, offsets, routes = batch.token_ids, batch.offsets, batch.share_index
    if not last_tokens and (runs < batch.lengths - 1).any():
        here = labels_run(offsets, runs)
        here[offsets[:-1]] = True  # first tokens, which are no labels
        ids, routes = ids[here], None if routes is None else routes[here]
        offsets = np.concatenate([[0], np.cumsum(runs + 1)])
    return sort_rollouts(
        ids, offsets, np.zeros(len(batch), np.int64), last_tokens=last_tokens, routes=routes
    )
