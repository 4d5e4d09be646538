"""Times a forward and a backward on one device, by its own events where it has them."""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

REPEATS = {"cuda": 5, "cpu": 7}

Result = TypeVar("Result")


class Clock:
    """The clock of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.kind: str = device.type
        self.repeats: int = REPEATS[device.type]

    def times(
        self, forward: Callable[[], Result], backward: Callable[[Result], None]
    ) -> tuple[float, float]:
        """Typical milliseconds of both, after one round to warm up."""
        forwards, backwards = [], []
        for repeat in range(1 + self.repeats):
            marks = [self._mark()]
            result = forward()
            marks.append(self._mark())
            backward(result)
            marks.append(self._mark())
            if repeat:
                forwards.append(self._between(marks[0], marks[1]))
                backwards.append(self._between(marks[1], marks[2]))
        return self.typical(forwards), self.typical(backwards)

    def typical(self, samples_ms: list[float]) -> float:
        """The median; on a CPU the least, since what else the machine does can only add to it."""
        return median(samples_ms) if self.kind == "cuda" else min(samples_ms)

    def _mark(self) -> float | torch.cuda.Event:
        if self.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return (end - begin) * 1e3
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end)
