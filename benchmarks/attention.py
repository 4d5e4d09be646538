"""Shared-prefix attention beside dense attention, on one GPU, by kernel.

Every case is one packed microbatch: a prefix with its responses. TFLOP/s count visible pairs only,
4 H D a pair forward and 2.5 times that backward. Dense attention has the prefix replicated for
every response. Numbers are compared with one ragged kernel over copied keys before anything is
timed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import Timing, time_cuda
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.ops.attention import KERNELS, AttentionTable, Kernel, Launch, select_kernel
from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Options
from forkpoint.ops.attention.operator import Reading, attend, attend_backward
from forkpoint.ops.attention.registry import launch_kernel
from forkpoint.plan.packing import breadth_or_depth
from forkpoint.plan.pricing.cost import ATTENTION_BACKWARD, visible_pairs
from forkpoint.tree import CacheSlots, Microbatch, full_table
from forkpoint.tree.forest import Forest

MOST_ERROR = 2e-2
"""The most relative difference from one ragged kernel over copied keys, in 16 bits."""
DENSE_RESPONSES = 2
"""Dense work is linear in the responses: so many are timed, and the time is scaled."""
Heads = tuple[int, int, int]
HEADS: Heads = (32, 8, 128)
"""Query heads, heads of keys and values, and their size."""
Suite = Literal["dualkv", "prompt-caching", "ragged", "small"]
SUITES: tuple[Suite, ...] = ("dualkv", "prompt-caching", "ragged", "small")


@dataclass(frozen=True)
class Case:
    """A prefix and the lengths of its responses, in tokens."""

    suite: str
    prefix: int
    responses: tuple[int, ...]
    heads: Heads = HEADS
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        least, most = min(self.responses), max(self.responses)
        size = f"{least}" if least == most else f"U{least}-{most}"
        group = f"P{self.prefix}-N{len(self.responses)}-R{size}"
        heads = "H{}K{}D{}".format(*self.heads)
        return f"{self.suite}/{group}-{heads}-{str(self.dtype).removeprefix('torch.')}"

    def forest(self) -> Forest:
        count = len(self.responses)
        parent = np.asarray([-1, *[0] * count], np.int64)
        start = np.asarray([0, *[self.prefix] * count], np.int64)
        length = np.asarray([self.prefix, *self.responses], np.int64)
        zeros = np.zeros(count + 1, np.int64)
        return Forest(zeros, parent, start, length, zeros, zeros, zeros)

    @property
    def pairs(self) -> int:
        forest = self.forest()
        return visible_pairs(forest.start, forest.length, 0)

    @property
    def paths(self) -> list[int]:
        """Tokens of the prefix with each response."""
        return [self.prefix + response for response in self.responses]


def pairs_of(lengths: Sequence[int]) -> int:
    """Visible pairs of causal sequences of these lengths."""
    return visible_pairs(np.zeros(len(lengths), np.int64), np.asarray(lengths), 0)


def cases(suite: Suite) -> Iterator[Case]:
    if suite == "dualkv":
        for n, p in ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536)):
            for dtype in (torch.bfloat16, torch.float16):
                yield Case(suite, p, (2048,) * n, dtype=dtype)
    elif suite == "prompt-caching":
        for heads in ((16, 4, 256), HEADS):
            for p, r in ((16384, 64), (16384, 128), (16384, 1024), (8192, 4096)):
                yield Case(suite, p, (r,) * 9, heads)
    elif suite == "ragged":
        for p, n in ((5059, 32), (8192, 16), (16384, 8), (32768, 4)):
            lengths = np.random.default_rng(42).integers(131, 2048, n).tolist()
            yield Case(suite, p, tuple(lengths))
    else:
        for p in (64, 256, 512):
            for r in (64, 256, 2048):
                yield Case(suite, p, (r,) * 8)


@dataclass(frozen=True, kw_only=True)
class Attention(Benchmark):
    """Measure shared-prefix attention on this GPU, beside dense attention, by kernel.

    Attributes:
        suite: Which shapes; several may be named.
        kernels: Attention kernels to measure; by default those that can run here.
        dtypes: Data types to measure.
        only: Parts of the names of cases to measure, such as R64; by default every case.
    """

    NAME: ClassVar[str] = "attention"

    suite: tuple[Suite, ...] = SUITES
    kernels: tuple[str, ...] = ()
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    only: tuple[str, ...] = ()

    def check(self) -> None:
        known = [kernel.name for kernel in KERNELS]
        for name in self.kernels:
            if name not in known:
                raise ConfigError(f"kernels has {name!r}; allowed are {', '.join(known)}.")
        if not self._cases():
            raise ConfigError(
                f"no case of {', '.join(self.suite)} has {' or '.join(self.only) or 'such dtypes'} "
                "in its name; leave --only out to see their names."
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                "attention measures GPU kernels, and torch sees no CUDA device here; run it on a "
                "machine with one."
            )

    def _cases(self) -> list[Case]:
        return [
            case
            for suite in self.suite
            for case in cases(suite)
            if str(case.dtype).removeprefix("torch.") in self.dtypes
            and (not self.only or any(part in case.name for part in self.only))
        ]

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = torch.device("cuda", torch.cuda.current_device())
        kernels = self.kernels or tuple(
            kernel.name
            for kernel in KERNELS
            if kernel.device_types == ("cuda",) and kernel.refuses_device(device) is None
        )
        for case in self._cases():
            if not deadline.over(case.name):
                yield from run_case(case, kernels)
                torch.cuda.empty_cache()


class Inputs:
    """One case's tensors, and what autograd calls with everything but the numbers fixed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        forest = case.forest()
        order = breadth_or_depth(forest, list(range(len(forest))))
        begins = np.cumsum([0, *forest.length[order]]).tolist()
        row = Microbatch(
            index=0,
            parent=-1,
            segments=tuple(order),
            segment_begin=tuple(begins[:-1]),
            children=(),
            tokens=begins[-1],
        )
        table = full_table(forest, row, CacheSlots())
        self.table = AttentionTable(table, device="cuda")
        self.begin_of = dict(zip(order, begins, strict=False))
        self.q, self.do, self.k, self.v = random_tensors(case, row.tokens, 0)
        self.options = Options(case.heads[2] ** -0.5)

    def forward(self, kernel: str) -> tuple[Tensor, Tensor]:
        return attend(self.q, self.k, self.v, None, self._reading(kernel))

    def backward(self, kernel: str, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        tensors = (self.do, self.q, self.k, self.v, o, lse)
        wants = (True, True, True, False)
        return attend_backward(*tensors, None, self._reading(kernel), wants)

    def _reading(self, kernel: str) -> Reading:
        return Reading(self.table, None, self.options, kernel)

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute o, dq, dk and dv by one ragged kernel over copied keys."""
        lengths = [self.case.prefix, *self.case.responses]
        own = [
            torch.arange(self.begin_of[n], self.begin_of[n] + length, device="cuda")
            for n, length in enumerate(lengths)
        ]
        keys = [own[0], *(torch.cat([own[0], response]) for response in own[1:])]
        index, slots = torch.cat(keys), torch.cat(own)
        launch = causal_launch(lengths, [len(k) for k in keys])
        dim = self.case.heads[2]
        asked = Asked(self.q.device, self.q.dtype, dim, dim, 0.0, 0, False)
        chosen = launch_kernel("auto", launch, asked)
        k, v, q, do = self.k[index], self.v[index], self.q[slots], self.do[slots]
        o, lse = chosen.forward(q, k, v, launch, self.options)
        dq, dk, dv = chosen.backward(BackwardInputs(do, q, k, v, o, lse), launch, self.options)
        back = torch.empty_like(slots)
        back[slots] = torch.arange(len(slots), device="cuda")
        wide = [torch.zeros_like(self.k, dtype=torch.float32) for _ in range(2)]
        for total, part in zip(wide, (dk, dv), strict=True):
            for chunk in torch.arange(len(index), device="cuda").split(1 << 18):
                total.index_add_(0, index[chunk], part[chunk].float())
        return o[back], dq[back], wide[0], wide[1]


def random_tensors(case: Case, tokens: int, seed: int) -> list[Tensor]:
    """q, the gradient of the output, k and v."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads, kv_heads, dim = case.heads
    return [
        torch.randn(tokens, h, dim, generator=generator, device="cuda", dtype=case.dtype)
        for h in (heads, heads, kv_heads, kv_heads)
    ]


def causal_launch(queries: Sequence[int], keys: Sequence[int]) -> Launch:
    """Sequences of so many queries, each the last of its keys."""
    cu_q, cu_k = (torch.tensor(np.cumsum([0, *x]), dtype=torch.int32) for x in (queries, keys))
    return Launch(
        0, True, 0, sum(queries), 0, sum(keys), max(queries), max(keys), len(queries),
        cu_q.cuda(), cu_k.cuda(), cu_q, cu_k,
    )  # fmt: skip


def run_case(case: Case, kernels: tuple[str, ...]) -> Iterator[ResultRow]:
    """Check, then time, one case with each kernel, and dense attention with each."""
    inputs = Inputs(case)
    reference = inputs.expected()
    row = partial(ResultRow, bench="attention", case=case.name)
    flops = 4.0 * case.heads[0] * case.heads[2] * case.pairs
    best = float("inf")
    for kernel in kernels:
        try:
            o, lse = inputs.forward(kernel)
            grads = inputs.backward(kernel, o, lse)
        except UnsupportedError:
            continue
        error = max(_distance(a, b) for a, b in zip((o, *grads[:3]), reference, strict=True))
        checked = row(metric=f"{kernel}/error", unit="relative", value=error, bar=MOST_ERROR)
        yield checked
        if checked.failed:
            continue
        forward = time_cuda(partial(inputs.forward, kernel))
        backward = time_cuda(partial(inputs.backward, kernel, o, lse))
        best = min(best, forward.p50 + backward.p50)
        for name, timing, factor in (
            ("forward", forward, 1.0),
            ("backward", backward, ATTENTION_BACKWARD),
        ):
            yield timed_row("attention", case.name, f"{kernel}/{name}", timing)
            rate = flops * factor / (timing.p50 * 1e9)
            yield row(metric=f"{kernel}/{name}_rate", unit="TFLOP/s", value=rate)
        del o, lse, grads
    for kernel in kernels if best < float("inf") else ():
        dim = case.heads[2]
        asked = Asked(inputs.q.device, case.dtype, dim, dim, 0.0, 0, False)
        try:
            chosen = select_kernel(kernel, asked)
        except UnsupportedError:
            continue
        yield from _dense(case, chosen, f"dense_{kernel}", best)


def dense_lengths(case: Case, *, ragged: bool) -> list[int]:
    """Tokens of each replicated sequence that is timed: a few, one where they differ and the kernel
    takes none but equal ones."""
    timed = case.paths if case.suite == "small" else case.paths[:DENSE_RESPONSES]
    return timed if ragged or len(set(timed)) == 1 else timed[:1]


def _dense(case: Case, chosen: Kernel, name: str, best: float) -> Iterator[ResultRow]:
    """The prefix replicated for every response: some of them, scaled to all."""
    timed = dense_lengths(case, ragged=chosen.ragged)
    factor = pairs_of(case.paths) / pairs_of(timed)
    launch, options = causal_launch(timed, timed), Options(case.heads[2] ** -0.5)
    q, do, k, v = random_tensors(case, sum(timed), 1)
    o, lse = chosen.forward(q, k, v, launch, options)
    inputs = BackwardInputs(do, q, k, v, o, lse)
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: chosen.forward(q, k, v, launch, options),
        "backward": lambda: chosen.backward(inputs, launch, options),
    }
    note = None if factor == 1 else f"{len(timed)} responses timed, scaled by {factor:g}"
    whole = 0.0
    for way, run in runs.items():
        timing: Timing = time_cuda(run)
        whole += timing.p50 * factor
        metric = f"{name}/{way}"
        yield timed_row("attention", case.name, metric, timing, factor=factor, note=note)
    yield ResultRow(
        bench="attention",
        case=case.name,
        metric="speedup",
        unit="ratio",
        value=whole / best,
        baseline=name,
        bound=pairs_of(case.paths) / case.pairs,
    )


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm())
