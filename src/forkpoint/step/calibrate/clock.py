"""Times a forward and a backward on one device, with events on CUDA.

A GPU at its power limit runs at a lower clock than an idle GPU. So work of a few milliseconds
between pauses would seem faster than within a step, small rows more than large ones. Therefore the
device is kept busy before each sample. The host then issues the sample's work while the device is
busy, as in a step, and host time is measured separately.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from forkpoint.device import between_ms, mark

BUSY_SIZE = 8192
STEADY = 6
"""Least number of timed repeats. The same number of untimed repeats runs first."""
STEADY_MS = 300.0
"""Least time of the timed and of the untimed repeats. The device lowers its clock after some time
under load."""
MOST_HOST_RATIO = 0.8
LEAST_SHARE = 0.7
"""Lower limit of `steady_share`."""

Result = TypeVar("Result")


class Times(NamedTuple):
    """Typical milliseconds of the device, and of the host to issue the work. Host times are 0 on a
    CPU."""

    forward: float
    backward: float
    issued_forward: float = 0.0
    issued_backward: float = 0.0

    @property
    def host_ratio(self) -> float:
        """Ratio of the host's time to the device's."""
        return (self.issued_forward + self.issued_backward) / (self.forward + self.backward)

    @property
    def waits_for_host(self) -> bool:
        """Whether the device may wait for the host between repeats of the same work."""
        return self.host_ratio > MOST_HOST_RATIO


class Clock:
    """The clock of one device."""

    def __init__(self, device: torch.device, *, repeats: int, busy_products: int) -> None:
        """
        Args:
            repeats: samples of each figure, after one round to warm up.
            busy_products: number of matrix products of size 8,192 before each sample on a GPU; each
                takes 2 ms.
        """
        self.device: torch.device = device
        self.kind: str = device.type
        self.repeats: int = repeats
        self.seconds: float = 0.0
        """Time of all samples, without first runs, which compile and choose kernels."""
        self._busy_products = busy_products
        self._operand: torch.Tensor | None = None

    def times(self, forward: Callable[[], Result], backward: Callable[[Result], None]) -> Times:
        """Measure the times of both."""
        samples: list[Times] = []
        for _ in range(1 + self.repeats):
            begin = time.perf_counter()
            self._keep_busy()
            issued, marks = [time.perf_counter()], [mark(self.device)]
            result = forward()
            issued.append(time.perf_counter())
            marks.append(mark(self.device))
            backward(result)
            issued.append(time.perf_counter())
            marks.append(mark(self.device))
            device = [between_ms(*marks[n : n + 2]) for n in (0, 1)]
            host = [(issued[n + 1] - issued[n]) * 1e3 * (self.kind == "cuda") for n in (0, 1)]
            self.seconds += (time.perf_counter() - begin) * bool(samples)
            samples.append(Times(*device, *host))
        return Times(*(self.typical(list(each)) for each in zip(*samples[1:], strict=True)))

    def steady_share(
        self, forward: Callable[[], Result], backward: Callable[[Result], None], alone: Times
    ) -> float:
        """Ratio, at most 1, of the time of both in repeats of themselves to their time after matrix
        products.

        Matrix products draw more power than other work, so a GPU at its power limit runs at a lower
        clock after them than within a step. The ratio is 1 on a CPU, and if the host takes longer
        than the device. `alone`: the `times` of both.
        """
        if self.kind != "cuda" or alone.waits_for_host:
            return 1.0
        whole = alone.forward + alone.backward
        half = max(STEADY, round(STEADY_MS / whole))
        begin, marks = time.perf_counter(), [mark(self.device)]
        for _ in range(2 * half):
            backward(forward())
            marks.append(mark(self.device))
        steady = between_ms(marks[half], marks[-1]) / half
        self.seconds += time.perf_counter() - begin
        return min(1.0, max(LEAST_SHARE, steady / whole))

    def _keep_busy(self) -> None:
        if self.kind != "cuda":
            return
        if self._operand is None:
            shape = (BUSY_SIZE, BUSY_SIZE)
            self._operand = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        for _ in range(self._busy_products):
            torch.mm(self._operand, self._operand)

    def typical(self, samples_ms: list[float]) -> float:
        """The median; on a CPU the minimum, because other load of the machine can only add time."""
        return median(samples_ms) if self.kind == "cuda" else min(samples_ms)
