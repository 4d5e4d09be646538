"""Whether a series drifts. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAG_SHARE = 1 / 3
"""Gains this share of the series apart still count as related."""
LIMIT = 6.4
"""Up to so many standard errors a slope is noise. By chance it is more in one of 1,000 series with
independent gains, and in one of 70 where each gain keeps 0.9 of the one before (simulated; normal
quantiles do not hold with so long a lag)."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The mean change of a series per step, and how well it is known."""

    slope: float
    standard_error: float
    steps: int

    @property
    def errors(self) -> float:
        """The slope in standard errors, with its sign; 0 for a series that never changes."""
        if self.slope == 0:
            return 0.0
        return self.slope / self.standard_error if self.standard_error else math.inf

    @property
    def is_noise(self) -> bool:
        return abs(self.errors) <= LIMIT


def trend(values: Sequence[float]) -> Trend:
    """The trend of a series that began at 0, one value a step.

    A difference that comes of rounding alone is a random walk: its gains have mean 0, however far
    the walk is from 0, so the slope is the mean gain. Gains resemble those before them for long,
    because training carries on with the parameters that an early rounding has moved; so the
    standard error is that of Kiefer and Vogelsang (2005), with Bartlett weights up to a fixed share
    of the series.

    Raises ValueError for fewer than 8 values, or for one that is not finite.
    """
    series = np.asarray(values, np.float64)
    if len(series) < 8 or not np.isfinite(series).all():
        raise ValueError(f"a trend needs at least 8 finite values, and there are {len(series)}.")
    gains = np.diff(series, prepend=0.0)
    count = len(gains)
    around = gains - gains.mean()
    lag = max(1, int(count * LAG_SHARE))
    variance = float(around @ around) / count
    for distance in range(1, lag):
        related = float(around[distance:] @ around[:-distance]) / count
        variance += 2 * (1 - distance / lag) * related
    error = math.sqrt(max(variance, 0.0) / count)
    return Trend(slope=float(gains.mean()), standard_error=error, steps=count)
