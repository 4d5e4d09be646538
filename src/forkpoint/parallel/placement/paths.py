"""Prices of tokens, and paths of rollouts as what their leading tokens cost.

The cost of a set of rollouts follows from how many leading edges neighbours share: each rollout
adds its whole path less what the one before it has already paid for. So nothing here needs token
ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape, Work
from forkpoint.plan.runs import run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest

TYPICAL_TOKENS = 8192
"""Length of the microbatches, paths and heads that milliseconds are read at: rates change little
where microbatches fill a device."""
_UNITS = 1 << 50
"""Sums stay below 2 ** 63 also where every rank runs everything."""


@dataclass(frozen=True)
class Rates:
    """Forward and backward of one token, one visible pair and one labelled token.

    Costs are whole numbers of `unit_cost`: their sums are exact, so that every process that places
    the same rollouts gets the same ranks, whatever its processor adds up in which order.
    """

    token: float
    pair: Mapping[int, float]
    """For each window in use (0 is none): all layers of that window together."""
    label: float
    unit_cost: float = 1.0

    @classmethod
    def of(cls, shape: ModelShape | None, calibration: Calibration | None = None) -> "Rates":
        """Counted FLOPs; milliseconds with a calibration; tokens without a shape.

        Raises:
            PlanError: there is a calibration and no shape.
            ConfigError: the calibration is of another model shape.
        """
        if shape is None:
            if calibration is not None:
                raise PlanError(
                    f"a calibration is given ({calibration.describe()}), but without a model shape "
                    "rollouts are placed by tokens; name the model, or give no calibration."
                )
            return cls(1.0, {}, 0.0)
        layers = {window: shape.windows.count(window) for window in sorted(set(shape.windows))}
        if calibration is None:
            none = Work(pairs=dict.fromkeys(layers, 0))
            pair = {
                window: replace(none, pairs={**none.pairs, window: 1}).step_flops(shape)
                for window in layers
            }
            token, label = replace(none, tokens=1), replace(none, num_loss_entries=1)
            return cls(token.step_flops(shape), pair, label.step_flops(shape))
        calibration.check_shape(shape)
        size = TYPICAL_TOKENS
        both = (False, True)
        block, rest, head = (
            sum(curve.time(size, backward=backward) for backward in both)
            for curve in (calibration.block, calibration.rest, calibration.head)
        )
        pair = {
            window: count
            * sum(1 / calibration.causal.rate(window or size, backward=b) for b in both)
            for window, count in layers.items()
        }
        return cls((shape.layers * block + rest) / size, pair, head / size)

    def cost(self, edges: IntArray, labels: IntArray) -> IntArray:
        """[n] the cost of the first so many edges of paths, of which so many are labelled."""
        edges = np.asarray(edges, np.int64)
        total = edges * self.token + labels * self.label
        for window, price in self.pair.items():
            seen = np.minimum(edges, window) if window else edges
            total += (seen * (seen + 1) // 2 + (edges - seen) * window) * price
        return np.rint(total / self.unit_cost).astype(np.int64)

    def scaled(self, most: float) -> "Rates":
        """The same rates in units of which `most`, a cost in the present ones, has about 2 ** 50.

        Rounding to units is then far below what any cost is known to.
        """
        unit = most / _UNITS if most else 1.0
        return replace(self, unit_cost=self.unit_cost * unit)


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
            sort_running(batch, runs),
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
