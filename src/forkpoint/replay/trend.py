"""Whether a series drifts. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LIMIT = 3.0
"""Up to so many standard errors a slope is noise: by chance it is more once in 370 series."""


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

    A difference that comes of rounding alone is a random walk: what it gains in a step has mean 0,
    however far the walk is from 0. A line fitted through the values would take its wandering for a
    slope, so the slope is the mean gain, and its standard error allows for gains that resemble
    their neighbours, as momentum makes them (Newey and West 1987, with Bartlett weights and the
    square root of the number of steps as the lag).

    Raises ValueError for fewer than 8 values, or for one that is not finite.
    """
    series = np.asarray(values, np.float64)
    if len(series) < 8 or not np.isfinite(series).all():
        raise ValueError(f"a trend needs at least 8 finite values, and there are {len(series)}.")
    gains = np.diff(series, prepend=0.0)
    count = len(gains)
    around = gains - gains.mean()
    lag = math.isqrt(count)
    variance = float(around @ around) / count
    for distance in range(1, lag + 1):
        weight = 1 - distance / (lag + 1)
        variance += 2 * weight * float(around[distance:] @ around[:-distance]) / count
    return Trend(
        slope=float(gains.mean()),
        standard_error=math.sqrt(max(variance, 0.0) / count),
        steps=count,
    )
