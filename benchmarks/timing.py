"""Repeats of a call, timed by the host's clock or by CUDA events."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds over repeats."""

    samples_ms: Sequence[float]

    @property
    def p50(self) -> float:
        return statistics.median(self.samples_ms)

    def quantile(self, share: float) -> float:
        return quantile(self.samples_ms, share)


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample below which that share of the samples lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def time_of_loop() -> float:
    """Time of a fixed loop in Python, in milliseconds: about 4 on an idle core.

    A virtual core takes up to twice as long while other work shares its physical core. This changes
    within a second.
    """
    begin, total = time.perf_counter(), 0
    for number in range(100_000):
        total += number & 7
    return (time.perf_counter() - begin) * 1e3


def time_host(
    function: Callable[[], object],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time a function by a clock of the host, in seconds; it runs once before, to warm up."""
    function()
    samples = []
    for _ in range(repeats):
        begin = clock()
        made = function()
        samples.append((clock() - begin) * 1e3)
        del made  # what it frees is not timed
    return Timing(samples)


def time_cuda(function: Callable[[], object]) -> Timing:
    """Time a function by CUDA events, warm, for a quarter of a second: 3 to 30 repeats.

    Between repeats a buffer larger than the L2 cache is overwritten, so that nothing is read from
    where the repeat before left it.
    """
    function()
    once_ms = max(_timed(function, 1).p50, 1e-3)
    return _timed(function, max(3, min(30, int(250.0 / once_ms))))


def _timed(function: Callable[[], object], repeats: int) -> Timing:
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    marks = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return Timing([begin.elapsed_time(end) for begin, end in marks])
