"""Learning-rate schedules. Imports no torch.

A schedule is a function of the step alone, so a replay that resumes has nothing to restore of it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from forkpoint.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Factor of the optimizer's learning rate at each step.

    Raises ConfigError where the steps do not leave room for the schedule.
    """

    schedule: Schedule = "constant"
    """After the warm-up: constant, or down to 0 after the last step, linearly or as a cosine."""
    warmup_steps: int = 0
    """Steps over which the factor rises to 1 in equal parts; the first is above 0."""
    steps: int | None = None
    """All steps of the run, the warm-up included; linear and cosine need it."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps}; it takes a whole number of at least 0."
            )
        if self.schedule == "constant":
            return
        if self.steps is None or self.steps <= self.warmup_steps:
            raise ConfigError(
                f"steps is {self.steps} and warmup_steps {self.warmup_steps}; the schedule "
                f"{self.schedule!r} needs more steps than the warm-up takes."
            )

    def factor(self, index: int) -> float:
        """The factor at a step, counted from 0."""
        if index < self.warmup_steps:
            return (index + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        assert self.steps is not None
        done = (index - self.warmup_steps) / (self.steps - self.warmup_steps)
        return 1.0 - done if self.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
