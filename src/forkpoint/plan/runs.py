"""Tokens of each rollout that a step runs, and tokens that it leaves out.

A step runs a rollout up to the last edge whose label has a gradient, a requested log-prob, or a
router statistic. Usually this label is the last trained token. Rollouts without trained tokens, and
rollouts whose terms the loss declares to be 0, do not run.
"""

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, SortedRollouts, sort_rollouts


@dataclass(frozen=True)
class LeftOut:
    """Parts of a batch that a plan does not run.

    A plan without sharing runs all other tokens, except one of each rollout: its last label.
    """

    rollouts: int = 0
    """Rollouts of two or more tokens that do not run: they give no gradient."""
    groups: int = 0
    """Groups that do not run at all, although a rollout has two or more tokens."""
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
        """Count the parts of a batch that a plan leaves out.

        runs: int64 [N], number of edges of each rollout that it runs.
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
            # If last tokens run, there are edges without labels.
            tail_tokens=int(np.maximum(edges - runs, 0)[~still].sum()),
        )


def run_lengths(
    batch: RolloutBatch,
    zero: NDArray[np.bool_] | None = None,
    *,
    whole: bool = False,
    last_tokens: bool = False,
) -> IntArray:
    """Number of edges of each rollout that run, from its first: int64 [N].

    Args:
        zero: bool [N], rollouts whose terms are 0; None means that there are none.
        whole: whether rollouts run to their ends, as router statistics need. Rollouts with
            `routed_experts` always do.
        last_tokens: whether last tokens of rollouts run too, which have no label.
    """
    if whole or batch.routed_experts is not None:
        return np.maximum(batch.lengths - (0 if last_tokens else 1), 0)
    trained = np.flatnonzero(batch.loss_mask)
    # The last trained token before the end of each rollout, which may belong to an earlier rollout.
    at = np.searchsorted(trained, batch.offsets[1:]) - 1
    last = np.append(trained, -1)[at]
    found = np.maximum(last - batch.offsets[:-1], 0)
    return found if zero is None else np.where(zero, 0, found)


def labels_run(offsets: IntArray, runs: IntArray) -> NDArray[np.bool_]:
    """Whether the edge runs whose label is this token, for each token of a batch: bool [T].

    Args:
        offsets: [N + 1] where each rollout starts; the last entry is T.
        runs: [N] number of edges of each rollout that run.
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
    """Sort the parts of rollouts that run: see `sort_rollouts`.

    runs: the result of `run_lengths`.
    """
    ids, offsets, routes = batch.token_ids, batch.offsets, batch.share_index
    if not last_tokens and (runs < batch.lengths - 1).any():
        here = labels_run(offsets, runs)
        here[offsets[:-1]] = True  # first tokens, which are not labels
        ids, routes = ids[here], None if routes is None else routes[here]
        offsets = np.concatenate([[0], np.cumsum(runs + 1)])
    return sort_rollouts(ids, offsets, last_tokens=last_tokens, routes=routes)
