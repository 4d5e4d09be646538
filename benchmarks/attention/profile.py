"""The kernels of shared-prefix attention, ours and the stock calls alone, by torch's profiler.

Ours and the stock calls are timed in turn first, then five calls of each are profiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.attention.cases import SUITES, Case, Inputs, cases, check_cuda
from benchmarks.kernel_kinds import Spent, by_kind
from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import time_cuda_in_turn

CALLS = 5
KINDS = {
    "FlashAttention-4 preprocess": r"preprocess",
    "FlashAttention-4 postprocess": r"postprocess",
    "attention kernel": r"flash|fmha|cudnn|cutlass",
    "merge and sums": r"sum_parts|sums|_kernel$",
    "logaddexp of the sums": r"logaddexp",
    "fills": r"memset|fill",
    "copies": r"memcpy|copy",
}


def kernels_of(call: Callable[[], object]) -> list[tuple[str, Spent]]:
    """Times of one call's kernels by kind, the longest first; others stand by their names."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found = by_kind(profile.key_averages(), KINDS, rest=None).items()
    each = [(k, Spent(s.us / CALLS, round(s.launches / CALLS))) for k, s in found if s.launches]
    return sorted(each, key=lambda one: -one[1].us)


def profiled(case: Case, kernel: str) -> Iterator[ResultRow]:
    inputs = Inputs(case)
    o, lse = inputs.forward(kernel)
    stock_forward, stock_backward = inputs.stock_calls(kernel, o, lse)
    name = ProfileAttention.NAME
    for direction, ours, stock in (
        ("forward", lambda: inputs.forward(kernel), stock_forward),
        ("backward", lambda: inputs.backward(kernel, o, lse), stock_backward),
    ):
        timings = time_cuda_in_turn(ours, stock)
        yield ResultRow(
            bench=name,
            case=case.name,
            metric=f"{direction}, over stock",
            unit="ratio",
            value=timings[0].p50 / timings[1].p50,
        )
        for side, call, timing in zip(("ours", "stock"), (ours, stock), timings, strict=True):
            yield timed_row(name, case.name, f"{direction}, {side}", timing)
            for kind, spent in kernels_of(call):
                yield ResultRow(
                    bench=name,
                    case=case.name,
                    metric=f"{direction}, {side}: {kind}",
                    unit="us",
                    value=spent.us,
                    note=f"{spent.launches} launches",
                )


@dataclass(frozen=True, kw_only=True)
class ProfileAttention(Benchmark):
    """Profile the kernels of shared-prefix attention, ours and the stock calls alone.

    Attributes:
        kernel: Which attention kernel.
        cases: Beginnings of the names of cases of the benchmark named attention, in bfloat16.
    """

    NAME: ClassVar[str] = "profile-attention"

    kernel: str = "fa4"
    cases: tuple[str, ...] = ("dualkv/P4096", "ragged/P5059")

    def check(self) -> None:
        check_cuda(self.NAME)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for case in (case for suite in SUITES for case in cases(suite)):
            if case.dtype != torch.bfloat16 or not case.name.startswith(self.cases):
                continue
            if not deadline.over(case.name):
                yield from profiled(case, self.kernel)
                torch.cuda.empty_cache()
