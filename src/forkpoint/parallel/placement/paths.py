"""Prices of tokens, and costs of the leading edges of rollouts.

The cost of a set of sorted rollouts follows from the number of leading edges that adjacent rollouts
share: each rollout adds the cost of its path minus that of the shared edges. So no token ids are
needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import PlanError
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape, Work, path_pairs
from forkpoint.plan.runs import run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest

TYPICAL_TOKENS = 8192
"""Number of tokens at which rates are read from a calibration. Rates change little once
microbatches fill a device."""
_UNITS = 1 << 50
"""Units of the largest cost. Sums stay below 2 ** 63 even if every rank runs everything."""


@dataclass(frozen=True)
class Rates:
    """Costs of forward and backward for one token, one visible pair and one labelled token.

    Costs are integers in units of `unit_cost`. So sums are exact, and every process gets the same
    placement, independent of its processor's order of summation.
    """

    token: float
    pair: Mapping[int, float]
    """Cost of a pair for each entry of `ModelShape.windows`, over all layers with it."""
    label: float
    unit_cost: float = 1.0

    @classmethod
    def of(cls, shape: ModelShape | None, calibration: Calibration | None = None) -> "Rates":
        """Rates of a model: counted FLOPs; milliseconds with a calibration; tokens without a shape.

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
            * sum(1 / calibration.causal.rate(abs(window) or size, backward=b) for b in both)
            for window, count in layers.items()
        }
        return cls((shape.layers * block + rest) / size, pair, head / size)

    def cost(self, edges: IntArray, labels: IntArray) -> IntArray:
        """[n] the costs of paths with these numbers of edges and labelled edges."""
        return self.rounded_cost(edges, labels).astype(np.int64)

    def rounded_cost(self, edges: IntArray, labels: IntArray) -> NDArray[np.float64]:
        """The same as whole float64, which may be 2 ** 63 or more before rates are scaled."""
        edges = np.asarray(edges, np.int64)
        total = edges * self.token + labels * self.label
        for window, price in self.pair.items():
            total += path_pairs(edges, window) * price
        return np.rint(total / self.unit_cost)

    def scaled(self, most: float) -> "Rates":
        """The same rates in another unit, in which the cost `most` (in the present unit) is about 2
        ** 50.

        Rounding to units is then far below the precision of costs.
        """
        unit = most / _UNITS if most else 1.0
        return replace(self, unit_cost=self.unit_cost * unit)


@dataclass(frozen=True, eq=False)
class Paths:
    """Rollouts in the order of their tokens, with their groups and trained tokens."""

    order: SortedRollouts
    """Rollouts with equal prefixes share them, across groups too."""
    groups: IntArray
    """[N] a rollout's group, 0 .. G - 1."""
    mask_begin: IntArray
    """[N] begin of each rollout's tokens in `trained_before`."""
    trained_before: IntArray
    """Number of trained tokens before each token, over all loss masks joined, and after the
    last."""

    def __len__(self) -> int:
        """Number of rollouts, including those of one token."""
        return len(self.groups)

    @classmethod
    def of_batch(cls, batch: RolloutBatch, runs: IntArray | None = None) -> "Paths":
        """The paths of a batch.

        runs: int64 [N], number of leading edges of each rollout that run; None: all.
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
        """[n] number of trained labels of the first `edges` edges of each rollout.

        The label of edge i is token i + 1, and token 0 is never trained.
        """
        begin = self.mask_begin[rollouts]
        return self.trained_before[begin + edges + 1] - self.trained_before[begin]
