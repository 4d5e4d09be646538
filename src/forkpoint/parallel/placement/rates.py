"""Prices of a token, of a visible pair and of a labelled token, as whole numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    ModelShape,
)
from forkpoint.tree.forest import IntArray

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
    unit: str
    """FLOPs, ms or tokens."""
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
            return cls(1.0, {}, 0.0, "tokens")
        layers = {window: shape.windows.count(window) for window in sorted(set(shape.windows))}
        if calibration is None:
            key = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
            pair = (1 + ATTENTION_BACKWARD) * key
            linear = (1 + LINEAR_BACKWARD) * 2.0
            return cls(
                linear * shape.linear_parameters,
                {window: pair * count for window, count in layers.items()},
                linear * shape.hidden * shape.vocab,
                "FLOPs",
            )
        calibration.check_shape(shape)
        size = TYPICAL_TOKENS
        ways = (False, True)
        block = sum(calibration.block.time(size, backward=way) for way in ways)
        rest = sum(calibration.rest.time(size, backward=way) for way in ways)
        head = sum(calibration.head.time(size, backward=way) for way in ways)
        return cls(
            (shape.layers * block + rest) / size,
            {
                window: count
                * sum(1 / calibration.causal.rate(window or size, backward=way) for way in ways)
                for window, count in layers.items()
            },
            head / size,
            "ms",
        )

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
        return Rates(self.token, self.pair, self.label, self.unit, self.unit_cost * unit)
