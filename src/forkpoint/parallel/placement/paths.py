"""Paths of rollouts and what their leading tokens cost, without the tokens themselves.

The cost of a set of rollouts follows from how many leading edges neighbours share: each rollout
adds its whole path less what the one before it has already paid for. So nothing here needs token
ids.
"""

from dataclasses import dataclass

import numpy as np

from forkpoint.parallel.placement.rates import Rates
from forkpoint.plan.runs import run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest


@dataclass(frozen=True, eq=False)
class Paths:
    """Rollouts in the order of their tokens, their groups, and where they are trained."""

    order: SortedRollouts
    """Any rollouts share that begin alike."""
    groups: IntArray
    """[N] a rollout's group, 0 .. G - 1."""
    mask_begin: IntArray
    """[N] where a rollout's tokens begin in `trained_before`."""
    trained_before: IntArray
    """Trained tokens before each token, all loss masks back to back, and after the last."""

    def __len__(self) -> int:
        """How many rollouts there are, those of one token included."""
        return len(self.groups)

    @classmethod
    def of_batch(cls, batch: RolloutBatch, runs: IntArray | None = None) -> "Paths":
        """The paths of a batch.

        runs: int64 [N], how many edges of each rollout run, from its first; None: all.
        """
        runs = run_lengths(batch, whole=True) if runs is None else runs
        return cls(
            sort_running(batch, np.zeros(len(batch), np.int64), runs),
            batch.group_index,
            batch.offsets[:-1],
            np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)]),
        )

    def forest(self) -> Forest:
        """The segments that the rollouts share."""
        return build_forest(self.order, len(self))

    def labels(self, rollouts: IntArray, edges: IntArray) -> IntArray:
        """[n] trained tokens among the labels of the first so many edges of each rollout.

        Edge i has token i + 1 for its label, and token 0 is never trained.
        """
        begin = self.mask_begin[rollouts]
        return self.trained_before[begin + edges + 1] - self.trained_before[begin]

    def labels_of(self, forest: Forest) -> IntArray:
        """[S] trained tokens among each segment's labels, by the loss mask of its first owner.

        Rollouts that share a token mostly agree on whether it is trained, and on the temperature.
        Where they do not, the head computes more entries than are counted here.
        """
        owner = forest.order[forest.owner_begin]
        end = forest.start + forest.length
        return self.labels(owner, end) - self.labels(owner, forest.start)

    def cost(self, rates: Rates, rollouts: IntArray, edges: IntArray) -> IntArray:
        """[n] the cost of the first so many edges of each rollout, in the units of `Rates`."""
        return rates.cost(edges, self.labels(rollouts, edges))

    def take(self, rollouts: IntArray) -> SortedRollouts:
        """These rollouts alone, in the order of their tokens."""
        wanted = np.zeros(len(self), bool)
        wanted[rollouts] = True
        return self.order.take(np.flatnonzero(wanted[self.order.rollouts]))
