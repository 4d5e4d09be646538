"""Times a forward and a backward on one device, by its own events where it has them.

A GPU at its power limit runs at a lower clock than one that has just been idle: what takes a few
milliseconds between pauses would seem faster than it is within a step, and small rows more so than
large ones. So the device is kept busy before each sample. The host then issues the sample's work
while the device has other work, as in a step; where issuing takes longer than the work, it counts.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

REPEATS = {"cuda": 5, "cpu": 7}
BUSY_SIZE = 8192
BUSY_PRODUCTS = 24
"""Products of so large matrices before each sample: about 40 ms of a current GPU."""

Result = TypeVar("Result")


class Clock:
    """The clock of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.kind: str = device.type
        self.repeats: int = REPEATS[device.type]
        self._operand: torch.Tensor | None = None

    def times(
        self, forward: Callable[[], Result], backward: Callable[[Result], None]
    ) -> tuple[float, float]:
        """Typical milliseconds of both, after one round to warm up."""
        forwards, backwards = [], []
        for repeat in range(1 + self.repeats):
            self._keep_busy()
            issued, marks = [time.perf_counter()], [self._mark()]
            result = forward()
            issued.append(time.perf_counter())
            marks.append(self._mark())
            backward(result)
            issued.append(time.perf_counter())
            marks.append(self._mark())
            if repeat:
                for found, a, b in ((forwards, 0, 1), (backwards, 1, 2)):
                    host_ms = (issued[b] - issued[a]) * 1e3
                    found.append(max(self._between(marks[a], marks[b]), host_ms))
        return self.typical(forwards), self.typical(backwards)

    def _keep_busy(self) -> None:
        if self.kind != "cuda":
            return
        if self._operand is None:
            shape = (BUSY_SIZE, BUSY_SIZE)
            self._operand = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        for _ in range(BUSY_PRODUCTS):
            torch.mm(self._operand, self._operand)

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
