"""How far a verification is, and how long the rest will take."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyProgress:
    """Where a verification stands.

    Attributes:
        runs: names of the runs, in their order.
        run: the run that is under way.
        done: the part of the whole work that is done, from 0 to 1.
        seconds_left: from the time that the work so far has taken; None before any is done.
    """

    runs: tuple[str, ...]
    run: str
    done: float
    seconds_left: float | None

    def text(self) -> str:
        """Such as "reference (1 of 4), 12% done, about 40 s left"."""
        text = f"{self.run} ({self.runs.index(self.run) + 1} of {len(self.runs)}), "
        text += f"{100 * self.done:.0f}% done"
        if self.seconds_left is None:
            return text
        minutes, seconds = divmod(round(self.seconds_left), 60)
        left = f"{minutes} min {seconds} s" if minutes else f"{max(1, seconds)} s"
        return f"{text}, about {left} left"


class Clock:
    """Reports progress of several runs, weighted by their work."""

    def __init__(
        self, work: Mapping[str, float], report: Callable[[VerifyProgress], None] | None
    ) -> None:
        """`work`: by run, in their order, tokens that pass through the model."""
        self._work = work
        self._report = report
        self._done: dict[str, float] = {}
        self._start = time.monotonic()

    def at(self, name: str, done: float) -> None:
        """Report that a part of a run is done, from 0 to 1."""
        if self._report is None:
            return
        self._done[name] = min(1.0, done)
        spent = sum(part * self._work[run] for run, part in self._done.items())
        part = spent / (sum(self._work.values()) or 1)
        left = (time.monotonic() - self._start) * (1 - part) / part if part else None
        self._report(VerifyProgress(tuple(self._work), name, part, left))
