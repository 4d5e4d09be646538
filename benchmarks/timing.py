"""Repeats of a call, timed by the host's clock or by CUDA events."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CudaMarks = list[tuple[torch.cuda.Event, torch.cuda.Event]]


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


def time_host(
    function: Callable[[], object],
    *,
    repeats: int,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time a function by a clock of the host, in seconds; it runs once before, to warm up."""
    if warm_up:
        function()
    samples = []
    for _ in range(repeats):
        begin = clock()
        made = function()
        samples.append((clock() - begin) * 1e3)
        del made  # what it frees is not timed
    return Timing(samples)


def time_cuda(
    function: Callable[[], object], *, budget_ms: float = 250.0, most: int = 30, least: int = 3
) -> Timing:
    """Time a function by CUDA events, warm, repeated within a budget.

    Between repeats a buffer larger than the L2 cache is overwritten, so that nothing is read from
    where the repeat before left it.
    """
    return time_cuda_in_turn(function, budget_ms=budget_ms, most=most, least=least)[0]


def time_cuda_in_turn(
    *functions: Callable[[], object], budget_ms: float = 250.0, most: int = 30, least: int = 3
) -> list[Timing]:
    """Time several functions as `time_cuda` does, one repeat of each in turn.

    Under its power limit a GPU's clock changes within a second by more than the differences that
    are looked for; what is measured in turn has the same clocks. The budget is for each.
    """
    for function in functions:
        function()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for function in functions:
        function()
    end.record()
    torch.cuda.synchronize()
    once_ms = max(begin.elapsed_time(end) / len(functions), 1e-3)
    repeats = max(least, min(most, int(budget_ms / once_ms)))
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    marks: list[CudaMarks] = [[] for _ in functions]
    for _ in range(repeats):
        for function, pairs in zip(functions, marks, strict=True):
            flush.zero_()
            pairs.append(_marked(function))
    return _elapsed(marks)


def _marked(function: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    return begin, end


def _elapsed(marks: list[CudaMarks]) -> list[Timing]:
    torch.cuda.synchronize()
    return [Timing([begin.elapsed_time(end) for begin, end in pairs]) for pairs in marks]
