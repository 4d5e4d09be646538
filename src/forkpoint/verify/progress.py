"""How long `verify` will take and how much memory, before and while it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forkpoint.units import format_bytes

TRIAL_SIZE = 512
"""Rows and columns of the matrices that a device's rate is measured with; on CUDA 8 times that."""
TRIALS = 3
REACHED = 0.4
"""The part of a large matrix product's rate that training reaches: attention, norms and launches
take the rest of the time."""


@dataclass(frozen=True)
class Forecast:
    """Work and memory of a verification, counted before it begins.

    Attributes:
        runs: names of the runs, in their order.
        flops: floating-point operations of all runs, each in its own precision.
        seconds: their time, from these and from the rate of a matrix product measured here.
        memory_bytes: the most that a run takes besides the model and its present gradients.
        free_bytes: bytes that are free for it on a CUDA device; None on the CPU, where nobody
            counts.
        ways: how runs of single rollouts save memory.
    """

    runs: tuple[str, ...]
    flops: float
    seconds: float
    memory_bytes: int
    free_bytes: int | None
    ways: str

    def text(self) -> str:
        """In one line."""
        memory = f"up to {format_bytes(self.memory_bytes)} besides the model"
        if self.free_bytes is not None:
            memory += f" ({format_bytes(self.free_bytes)} free)"
        ways = "" if self.ways == "plain" else f"; {self.ways}"
        return (
            f"{len(self.runs)} runs ({', '.join(self.runs)}): {self.flops / 1e12:,.3g} TFLOP, "
            f"about {_duration(self.seconds)}; {memory}{ways}"
        )


@dataclass(frozen=True)
class VerifyProgress:
    """Where a verification stands.

    Attributes:
        forecast: what was predicted before the first run.
        run: the run that is under way.
        done: the part of the whole work that is done, from 0 to 1.
        seconds_left: from what has been measured so far; of the forecast before the first run.
    """

    forecast: Forecast
    run: str
    done: float
    seconds_left: float

    def text(self) -> str:
        """Such as "reference, 12% done, about 40 s left"."""
        left = _duration(self.seconds_left)
        return f"{self.run}, {100 * self.done:.0f}% done, about {left} left"


Report = Callable[[VerifyProgress], None]


@dataclass(frozen=True)
class Run:
    """A run of a verification, and its work."""

    name: str
    flops: float
    dtype: torch.dtype


class Clock:
    """The time that is left: forecast first, corrected by what has been measured.

    Nothing is measured where nobody asks (`report` is None).
    """

    def __init__(
        self,
        runs: Sequence[Run],
        device: torch.device,
        report: Report | None,
        *,
        memory_bytes: int,
        free_bytes: int | None,
        ways: str,
    ) -> None:
        self._report = report
        if report is None:
            return
        rates = {dtype: _rate(device, dtype) for dtype in {run.dtype for run in runs}}
        self._seconds = {run.name: run.flops / rates[run.dtype] for run in runs}
        """The forecast of each run."""
        self._done: dict[str, float] = {}
        """The part of each run that is done."""
        self._start = time.monotonic()
        self.forecast: Forecast = Forecast(
            runs=tuple(run.name for run in runs),
            flops=sum(run.flops for run in runs),
            seconds=sum(self._seconds.values()),
            memory_bytes=memory_bytes,
            free_bytes=free_bytes,
            ways=ways,
        )

    def at(self, name: str, done: float) -> None:
        """A part of a run is done, from 0 to 1."""
        if self._report is None:
            return
        self._done[name] = min(1.0, done)
        spent = sum(part * self._seconds[run] for run, part in self._done.items())
        left = max(0.0, self.forecast.seconds - spent)
        correction = (time.monotonic() - self._start) / spent if spent else 1.0
        part = spent / self.forecast.seconds if self.forecast.seconds else 1.0
        self._report(VerifyProgress(self.forecast, name, min(1.0, part), left * correction))

    def end(self, name: str) -> None:
        """A run is over."""
        self.at(name, 1.0)


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs in a second that training is expected to reach here."""
    size = TRIAL_SIZE * (8 if device.type == "cuda" else 1)
    a = torch.ones((size, size), dtype=dtype, device=device)
    best = float("inf")
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for _ in range(TRIALS):
            begin = time.perf_counter()
            # Read back, so that the device is waited for.
            float((a @ a)[0, 0])
            best = min(best, time.perf_counter() - begin)
    return REACHED * 2 * size**3 / best


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{max(1, whole)} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
