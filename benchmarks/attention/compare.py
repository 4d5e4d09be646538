"""Shared-prefix attention beside its alternatives, on one GPU.

Every case is one packed microbatch: prefixes, each with its responses. TFLOP/s count visible pairs
only, 4 H D a pair forward and 2.5 times that backward. All alternatives run in the same process on
the same inputs: the stock calls of the composition alone, dense attention with the prefix
replicated for every response, FlexAttention with the shared-prefix mask, and FlashAttention-4 with
the prefix's keys copied for every response. Numbers are checked before anything is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from benchmarks.attention.alternatives import (
    copied_keys,
    dense,
    dense_calls,
    dense_lengths,
    flex_attention,
    graphed,
)
from benchmarks.attention.cases import SUITES, Case, Inputs, cases, check_cuda, kernel_for
from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import Timing, time_cuda_in_turn
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.ops.attention import KERNELS, Kernel, select_kernel
from forkpoint.ops.attention.kernel import Asked, Options

MOST_ERROR = 2e-2
"""The most relative difference from one ragged kernel over copied keys, in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Attention(Benchmark):
    """Measure shared-prefix attention on this GPU, beside dense and other ways to share, by kernel.

    Attributes:
        suite: Which shapes; several may be named.
        kernels: Attention kernels to measure; by default those that can run here.
        dtypes: Data types to measure.
        only: Parts of the names of cases to measure, such as R64; by default every case.
    """

    NAME: ClassVar[str] = "attention"

    suite: tuple[Literal["dualkv", "prompt-caching", "ragged", "small"], ...] = SUITES
    kernels: tuple[str, ...] = ()
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    only: tuple[str, ...] = ()

    def check(self) -> None:
        known = [kernel.name for kernel in KERNELS]
        for name in self.kernels:
            if name not in known:
                raise ConfigError(f"kernels has {name!r}; allowed are {', '.join(known)}.")
        if not self.dtypes:
            raise ConfigError(
                "dtypes names none, so there is nothing to measure; name at least one."
            )
        if not self._cases():
            raise ConfigError(
                f"no case of {', '.join(self.suite)} has {' or '.join(self.only) or 'such dtypes'} "
                "in its name; leave --only out to see their names."
            )
        check_cuda(self.NAME)

    def _cases(self) -> list[Case]:
        return [
            case
            for suite in self.suite
            for case in cases(suite)
            if str(case.dtype).removeprefix("torch.") in self.dtypes
            and (not self.only or any(part in case.name for part in self.only))
        ]

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        kernels = self.kernels or available_kernels()
        for case in self._cases():
            if not deadline.over(case.name):
                yield from run_case(case, kernels)
                torch.cuda.empty_cache()


def run_case(case: Case, kernels: tuple[str, ...]) -> Iterator[ResultRow]:
    """Check, then time, one case with each kernel and its alternatives."""
    inputs = Inputs(case)
    speeds: dict[str, tuple[float, float]] = {}
    reference = _checked_reference(inputs)
    for kernel in kernels:
        try:
            o, lse = inputs.forward(kernel)
            grads = inputs.backward(kernel, o, lse)
        except UnsupportedError:
            continue
        errors = [_distance(a, b) for a, b in zip((o, *grads[:3]), reference, strict=True)]
        checked = _row(case, f"{kernel}/error", "relative", max(errors), bar=MOST_ERROR)
        yield checked
        if checked.failed:
            continue
        stock_forward, stock_backward = inputs.stock_calls(kernel, o, lse)
        forward, forward_stock = time_cuda_in_turn(
            lambda k=kernel: inputs.forward(k), stock_forward
        )
        backward, backward_stock = time_cuda_in_turn(
            lambda k=kernel, o=o, s=lse: inputs.backward(k, o, s), stock_backward
        )
        speeds[kernel] = (forward.p50, backward.p50)
        for name, timing, alone, is_backward in (
            ("forward", forward, forward_stock, False),
            ("backward", backward, backward_stock, True),
        ):
            yield _timed(case, f"{kernel}/{name}", timing)
            rate = case.tflops(timing.p50, backward=is_backward)
            yield _row(case, f"{kernel}/{name}_rate", "TFLOP/s", rate)
            yield _row(
                case,
                f"{kernel}/{name}_over_stock",
                "ratio",
                timing.p50 / alone.p50,
                baseline="the stock calls alone",
            )
        del o, lse, grads
    yield from _alternatives(inputs, kernels, speeds, reference[0])


def _checked_reference(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk, dv by one ragged kernel over copied keys: nothing of the composition."""
    index, slots, launch, _ = inputs.copied()
    chosen = kernel_for("auto", inputs.q, launch)
    options = Options(inputs.scale)
    k, v = inputs.k[index], inputs.v[index]
    q, do = inputs.q[slots], inputs.do[slots]
    o, lse = chosen.forward(q, k, v, launch, options)
    dq, dk, dv = chosen.backward(do, q, k, v, o, lse, launch, options)
    back = torch.empty_like(slots)
    back[slots] = torch.arange(len(slots), device="cuda")
    wide = [torch.zeros_like(inputs.k, dtype=torch.float32) for _ in range(2)]
    for total, part in zip(wide, (dk, dv), strict=True):
        for chunk in torch.arange(len(index), device="cuda").split(1 << 18):
            total.index_add_(0, index[chunk], part[chunk].float())
    return o[back], dq[back], wide[0], wide[1]


def _alternatives(
    inputs: Inputs,
    kernels: tuple[str, ...],
    speeds: dict[str, tuple[float, float]],
    reference_o: Tensor,
) -> Iterator[ResultRow]:
    case = inputs.case
    best = min(speeds.values(), key=sum) if speeds else None
    found: dict[str, tuple[Timing, Timing, float]] = {}
    timed: dict[str, int] = {}
    index, slots, launch, _ = inputs.copied()
    for kernel in kernels:
        try:
            dims = (case.head_dim, case.head_dim)
            asked = Asked(inputs.q.device, case.dtype, *dims, 0.0, 0, False)
            chosen = select_kernel(kernel, asked)
        except UnsupportedError:
            continue
        found[f"dense_{kernel}"] = dense(inputs, chosen)
        lengths = dense_lengths(case, ragged=chosen.ragged, every=case.small)
        timed[f"dense_{kernel}"] = len(lengths)
        if case.small and chosen.ragged:
            yield from _overhead(inputs, kernel, chosen)
        if chosen.ragged:
            # As in the published method, the copy of the keys and the sum of their gradients count.
            q, do = inputs.q[slots], inputs.do[slots]
            found[f"copied_keys_{kernel}"] = copied_keys(inputs, chosen, index, launch, q, do)
    try:
        found["flex"], o = flex_attention(inputs)
        yield _row(case, "flex/error", "relative", _distance(o, reference_o))
        del o
    except RuntimeError as error:  # of memory, of the compiler, of the kernel it made
        torch.cuda.empty_cache()
        note = f"{type(error).__name__}: {error}"[:120]
        yield _row(case, "flex/failed", "1 is yes", 1.0, note=note)
    for name, (forward, backward, factor) in found.items():
        note = None if factor == 1 else f"{timed[name]} responses timed, scaled by {factor:g}"
        yield _timed(case, f"{name}/forward", forward, factor, note)
        yield _timed(case, f"{name}/backward", backward, factor, note)
        if best is not None:
            theirs = (forward.p50 + backward.p50) * factor
            yield _row(
                case,
                "speedup",
                "ratio",
                theirs / sum(best),
                baseline=name,
                bound=case.dense_pairs / case.pairs if name.startswith("dense") else None,
            )


def _overhead(inputs: Inputs, kernel: str, chosen: Kernel) -> Iterator[ResultRow]:
    """Microseconds that sharing takes more (or less) than the prefix replicated, for small cases.

    Forward and backward together, launched one by one and replayed as a CUDA graph: the difference
    between the two is what the host costs.
    """
    dense_forward, dense_backward = dense_calls(inputs, chosen, every=True)[:2]
    o, lse = inputs.forward(kernel)

    def shared() -> None:
        inputs.forward(kernel)
        inputs.backward(kernel, o, lse)

    def replicated() -> None:
        dense_forward()
        dense_backward()

    for how, wrapped in (("launched", lambda f: f), ("graph", graphed)):
        ours, theirs = time_cuda_in_turn(wrapped(shared), wrapped(replicated))
        yield ResultRow(
            bench="attention",
            case=inputs.case.name,
            metric=f"{kernel}/extra_{how}",
            unit="us",
            value=(ours.p50 - theirs.p50) * 1e3,
            p20=(ours.quantile(0.2) - theirs.quantile(0.8)) * 1e3,
            p80=(ours.quantile(0.8) - theirs.quantile(0.2)) * 1e3,
            baseline=f"dense_{kernel} {how}: {theirs.p50 * 1e3:.1f} us",
        )


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm())


def _row(case: Case, metric: str, unit: str, value: float, **rest) -> ResultRow:
    return ResultRow(
        bench="attention", case=case.name, metric=metric, unit=unit, value=value, **rest
    )


def _timed(
    case: Case, metric: str, timing: Timing, factor: float = 1.0, note: str | None = None
) -> ResultRow:
    return timed_row("attention", case.name, metric, timing, factor=factor, note=note)


def available_kernels() -> tuple[str, ...]:
    """Names of the CUDA kernels that can run here."""
    return tuple(
        k.name
        for k in KERNELS
        if k.device_types == ("cuda",)
        and k.refuses_device(torch.device("cuda", torch.cuda.current_device())) is None
    )
