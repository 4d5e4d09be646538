"""Shared-prefix attention beside its alternatives, on one GPU.

Every case is one packed row: prefixes, each with its responses. TFLOP/s count visible pairs only,
4 H D a pair forward and 2.5 times that backward. What is compared runs in the same process on the
same inputs: the stock calls of the composition alone, dense attention with the prefix replicated
for every response, FlexAttention with the shared-prefix mask, and FlashAttention-4 with the
prefix's keys copied for every response. Numbers are checked before anything is timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from forkpoint.bench.rows import ResultRow, Timing, time_cuda
from forkpoint.errors import UnsupportedError
from forkpoint.forest import Forest
from forkpoint.ops.attention import KERNELS, AttentionTable, Launch, select_kernel
from forkpoint.ops.attention.table import read_launches
from forkpoint.plan.cost import ATTENTION_BACKWARD, visible_pairs
from forkpoint.plan.layout import Row, full_table

# Dense work is linear in the responses: so many are timed, and the time is scaled.
DENSE_RESPONSES = 2


@dataclass(frozen=True)
class Case:
    """A row of groups: prefix lengths, and for each the lengths of its responses."""

    name: str
    prefixes: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    flex: bool = False

    @classmethod
    def flat(cls, kind: str, prefix: int, lengths: tuple[int, ...], **options) -> "Case":
        case = cls("", (prefix,), (lengths,), **options)
        ragged = len(set(lengths)) > 1
        size = f"U{min(lengths)}-{max(lengths)}" if ragged else f"{lengths[0]}"
        heads = f"H{case.heads}K{case.kv_heads}D{case.head_dim}"
        dtype = str(case.dtype).removeprefix("torch.")
        name = f"{kind}/P{prefix}-N{len(lengths)}-R{size}-{heads}-{dtype}"
        return cls(name, (prefix,), (lengths,), **options)

    def forest(self) -> Forest:
        parent, start, length = [], [], []
        for prefix, responses in zip(self.prefixes, self.responses, strict=True):
            root = len(parent)
            parent += [-1, *[root] * len(responses)]
            start += [0, *[prefix] * len(responses)]
            length += [prefix, *responses]
        zeros = np.zeros(len(parent), np.int64)
        parents, starts, lengths = (np.asarray(x, np.int64) for x in (parent, start, length))
        return Forest(zeros, parents, starts, lengths, zeros, zeros, zeros)

    def row(self, forest: Forest) -> Row:
        from forkpoint.plan.packing import breadth_or_depth

        order = breadth_or_depth(forest, list(range(len(forest))))
        begins = np.cumsum([0, *forest.length[order]]).tolist()
        return Row(
            index=0,
            parent=-1,
            segments=tuple(order),
            slot_begin=tuple(begins[:-1]),
            width=0,
            arena_begin=(-1,) * len(order),
            children=(),
            slots=begins[-1],
            tokens=begins[-1],
        )

    @property
    def pairs(self) -> int:
        forest = self.forest()
        return visible_pairs(forest.start, forest.length, 0)

    @property
    def dense_pairs(self) -> int:
        whole = np.asarray(
            [p + r for p, rs in zip(self.prefixes, self.responses, strict=True) for r in rs]
        )
        return visible_pairs(np.zeros_like(whole), whole, 0)

    def tflops(self, ms: float, *, backward: bool, pairs: int | None = None) -> float:
        flops = 4.0 * self.heads * self.head_dim * (self.pairs if pairs is None else pairs)
        return flops * (ATTENTION_BACKWARD if backward else 1.0) / (ms * 1e9)


def cases(suite: str) -> Iterator[Case]:
    """The cases of a suite: dualkv, prompt-caching, ragged, small, groups."""
    if suite == "dualkv":
        for n, p in ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536)):
            for dtype in (torch.bfloat16, torch.float16):
                flex = dtype == torch.bfloat16 and p <= 16384
                yield Case.flat(suite, p, (2048,) * n, dtype=dtype, flex=flex)
    elif suite == "prompt-caching":
        for heads, kv_heads, dim in ((16, 4, 256), (32, 8, 128)):
            for p, r in ((16384, 64), (16384, 128), (16384, 1024), (8192, 4096)):
                options = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
                yield Case.flat(suite, p, (r,) * 9, flex=dim == 128 and r >= 1024, **options)
    elif suite == "ragged":
        for p, n in ((5059, 32), (8192, 16), (16384, 8), (32768, 4)):
            lengths = tuple(np.random.default_rng(42).integers(131, 2048, n).tolist())
            yield Case.flat(suite, p, lengths, flex=p <= 8192)
        rng = np.random.default_rng(42)
        prefixes = tuple(rng.integers(256, 4096, 8).tolist())
        responses = tuple(tuple(rng.integers(131, 2048, 4).tolist()) for _ in prefixes)
        yield Case("ragged/8-groups-PU256-4096-N4-RU131-2048", prefixes, responses)
    elif suite == "small":
        for p in (64, 256, 512):
            for r in (64, 256, 2048):
                yield Case.flat(suite, p, (r,) * 8)
    else:
        raise ValueError(f"there is no suite {suite!r}")


SUITES = ("dualkv", "prompt-caching", "ragged", "small")


class Inputs:
    """One case's tensors, and its operator's calls with everything but the numbers fixed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        forest = case.forest()
        self.row = case.row(forest)
        table = full_table(forest, self.row, {})
        self.table = AttentionTable.from_numpy(table.launches, table.cu, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (self.row.slots, heads, case.head_dim)
            return torch.randn(shape, generator=generator, device="cuda", dtype=case.dtype)

        self.q, self.do = normal(case.heads), normal(case.heads)
        self.k, self.v = normal(case.kv_heads), normal(case.kv_heads)
        self.scale = case.head_dim**-0.5
        self.slot_of = dict(zip(self.row.segments, self.row.slot_begin, strict=True))

    def forward(self, kernel: str) -> tuple[Tensor, Tensor]:
        return torch.ops.forkpoint.shared_attention(
            self.q, self.k, self.v, *[None] * 5, *self._table(), self.scale, 0.0, 0, kernel, False
        )

    def backward(self, kernel: str, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.forkpoint.shared_attention_backward(
            self.do, self.q, self.k, self.v, o, lse, *[None] * 5, *self._table(),
            self.scale, 0.0, 0, kernel, False, True, True, True, False,
        )  # fmt: skip

    def _table(self) -> tuple[Tensor | None, ...]:
        t = self.table
        return t.launches, t.cu_cpu, t.cu_device, t.row_gather, t.arena_gather

    def launches(self) -> list[Launch]:
        return read_launches(self.table.launches, self.table.cu_cpu, self.table.cu_device)

    def stock_calls(self, kernel: str, o: Tensor, lse: Tensor) -> tuple[Callable, Callable]:
        """The kernels' own calls that the operator is made of, forward and backward."""
        options = {"scale": self.scale, "softcap": 0.0, "window": 0}
        calls = []
        for launch in self.launches():
            chosen = kernel_for(kernel, self.q, launch)
            queries = slice(launch.q_begin, launch.q_end)
            keys = slice(launch.k_begin, launch.k_end)
            tensors = (self.q[queries], self.k[keys], self.v[keys])
            merged = (o[queries], lse[:, queries].contiguous())
            calls.append((chosen, launch, queries, tensors, merged))

        def forward() -> None:
            for chosen, launch, _, tensors, _ in calls:
                chosen.forward(*tensors, launch, **options)

        def backward() -> None:
            for chosen, launch, queries, tensors, merged in calls:
                chosen.backward(
                    self.do[queries], *tensors, *merged, launch, **options, deterministic=False
                )

        return forward, backward

    def copied(self) -> tuple[Tensor, Tensor, Launch, Tensor]:
        """Keys and values with each prefix before each of its responses, and one causal launch.

        Also returns which slots of the row the launch's queries are (all of them, prefixes first).
        """
        case, keys, q_lengths, k_lengths, slots = self.case, [], [], [], []
        forest = case.forest()
        for segment in sorted(range(len(forest)), key=lambda s: forest.parent[s] >= 0):
            begin, length = self.slot_of[segment], int(forest.length[segment])
            own = torch.arange(begin, begin + length, device="cuda")
            parent = int(forest.parent[segment])
            path = [own]
            if parent >= 0:
                at = self.slot_of[parent]
                above = torch.arange(at, at + int(forest.length[parent]), device="cuda")
                path = [above, own]
            keys.append(torch.cat(path))
            slots.append(own)
            q_lengths.append(length)
            k_lengths.append(len(keys[-1]))
        index = torch.cat(keys)
        cu_q, cu_k = (
            torch.tensor(np.cumsum([0, *x]), dtype=torch.int32) for x in (q_lengths, k_lengths)
        )
        launch = Launch(
            0, True, 0, sum(q_lengths), 0, sum(k_lengths), max(q_lengths), max(k_lengths),
            len(q_lengths), cu_q.cuda(), cu_k.cuda(), cu_q, cu_k,
        )  # fmt: skip
        return index, torch.cat(slots), launch, cu_k


def kernel_for(name: str, q: Tensor, launch: Launch):
    """The kernel that the operator takes for a launch."""
    from forkpoint.ops.attention.registry import launch_kernel

    return launch_kernel(name, launch, q.device, q.dtype, q.shape[2], q.shape[2], 0.0, 0, False)


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
        if max(errors) > 2e-2:
            yield _row(case, f"{kernel}/error", "relative", max(errors), note="FAILED, not timed")
            continue
        forward = time_cuda(lambda k=kernel: inputs.forward(k))
        backward = time_cuda(lambda k=kernel, o=o, s=lse: inputs.backward(k, o, s))
        stock_forward, stock_backward = inputs.stock_calls(kernel, o, lse)
        stock = time_cuda(stock_forward), time_cuda(stock_backward)
        speeds[kernel] = (forward.p50, backward.p50)
        yield _row(case, f"{kernel}/error", "relative", max(errors))
        for name, timing, alone, is_backward in (
            ("forward", forward, stock[0], False),
            ("backward", backward, stock[1], True),
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
    del reference
    yield from _alternatives(inputs, kernels, speeds)


def _checked_reference(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk, dv by one ragged kernel over copied keys: nothing of the composition."""
    index, slots, launch, _ = inputs.copied()
    chosen = kernel_for("auto", inputs.q, launch)
    options = {"scale": inputs.scale, "softcap": 0.0, "window": 0}
    k, v = inputs.k[index], inputs.v[index]
    q, do = inputs.q[slots], inputs.do[slots]
    o, lse = chosen.forward(q, k, v, launch, **options)
    dq, dk, dv = chosen.backward(do, q, k, v, o, lse, launch, **options, deterministic=False)
    back = torch.empty_like(slots)
    back[slots] = torch.arange(len(slots), device="cuda")
    wide = [torch.zeros_like(inputs.k, dtype=torch.float32) for _ in range(2)]
    for total, part in zip(wide, (dk, dv), strict=True):
        for chunk in torch.arange(len(index), device="cuda").split(1 << 18):
            total.index_add_(0, index[chunk], part[chunk].float())
    return o[back], dq[back], wide[0], wide[1]


def _alternatives(
    inputs: Inputs, kernels: tuple[str, ...], speeds: dict[str, tuple[float, float]]
) -> Iterator[ResultRow]:
    case = inputs.case
    best = min(speeds.values(), key=sum) if speeds else None
    found: dict[str, tuple[Timing, Timing, float]] = {}
    index, slots, launch, _ = inputs.copied()
    for kernel in kernels:
        try:
            chosen = select_kernel(
                kernel, inputs.q.device, case.dtype, case.head_dim, case.head_dim, 0.0, 0, False
            )
        except UnsupportedError:
            continue
        if len(case.prefixes) == 1:
            found[f"dense_{kernel}"] = _dense(inputs, chosen)
        if chosen.ragged:
            # As in the published method, the copy of the keys and the sum of their gradients count.
            q, do = inputs.q[slots], inputs.do[slots]
            found[f"copied_keys_{kernel}"] = _copied(inputs, chosen, index, launch, q, do)
    if case.flex:
        found["flex"] = _flex(inputs)
    for name, (forward, backward, factor) in found.items():
        note = None if factor == 1 else f"{DENSE_RESPONSES} responses timed, scaled by {factor:g}"
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


def _dense(inputs: Inputs, chosen) -> tuple[Timing, Timing, float]:
    """The prefix replicated for every response: some of them, scaled to all."""
    case = inputs.case
    lengths = [case.prefixes[0] + r for r in case.responses[0]]
    timed = lengths[:DENSE_RESPONSES]
    total = visible_pairs(np.zeros(len(lengths), np.int64), np.asarray(lengths), 0)
    part = visible_pairs(np.zeros(len(timed), np.int64), np.asarray(timed), 0)
    if not chosen.ragged:
        timed = timed[:1]
        part = visible_pairs(np.zeros(1, np.int64), np.asarray(timed), 0)
    tokens = sum(timed)
    generator = torch.Generator("cuda").manual_seed(1)
    q, do, k, v = (
        torch.randn(tokens, h, case.head_dim, generator=generator, device="cuda", dtype=case.dtype)
        for h in (case.heads, case.heads, case.kv_heads, case.kv_heads)
    )
    cu = torch.tensor(np.cumsum([0, *timed]), dtype=torch.int32)
    launch = Launch(
        0, True, 0, tokens, 0, tokens, max(timed), max(timed), len(timed),
        cu.cuda(), cu.cuda(), cu, cu,
    )  # fmt: skip
    options = {"scale": inputs.scale, "softcap": 0.0, "window": 0}
    o, lse = chosen.forward(q, k, v, launch, **options)
    forward = time_cuda(lambda: chosen.forward(q, k, v, launch, **options))
    backward = time_cuda(
        lambda: chosen.backward(do, q, k, v, o, lse, launch, **options, deterministic=False)
    )
    return forward, backward, total / part


def _copied(
    inputs: Inputs, chosen, index: Tensor, launch: Launch, q: Tensor, do: Tensor
) -> tuple[Timing, Timing, float]:
    options = {"scale": inputs.scale, "softcap": 0.0, "window": 0}

    def forward() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = inputs.k[index], inputs.v[index]
        return (k, v, *chosen.forward(q, k, v, launch, **options))

    k, v, o, lse = forward()

    def backward() -> None:
        _, dk, dv = chosen.backward(do, q, k, v, o, lse, launch, **options, deterministic=False)
        for part in (dk, dv):
            inputs.k.new_zeros(inputs.k.shape).index_add_(0, index, part)

    return time_cuda(forward), time_cuda(backward), 1.0


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: Inputs) -> tuple[Timing, Timing, float]:
    """FlexAttention over the whole row with the shared-prefix mask, on its Triton kernels."""
    from torch.nn.attention.flex_attention import create_block_mask

    case = inputs.case
    forest = case.forest()
    padded = -(-inputs.row.slots // 128) * 128
    segment = torch.full((padded,), -1, device="cuda")
    above = torch.full((padded,), -2, device="cuda")
    for index, begin in inputs.slot_of.items():
        end = begin + int(forest.length[index])
        segment[begin:end] = index
        above[begin:end] = int(forest.parent[index])

    def mask(b, h, q, k):
        return ((segment[q] == segment[k]) & (q >= k)) | (above[q] == segment[k])

    blocks = create_block_mask(mask, None, None, padded, padded, device="cuda", _compile=True)
    q, k, v, do = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padded - len(x)))
        .transpose(0, 1)[None]
        .contiguous()
        .requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, inputs.do)
    )
    flex = _compiled_flex()

    def forward() -> Tensor:
        return flex(q, k, v, block_mask=blocks, scale=inputs.scale, enable_gqa=True)

    o = forward()
    backward = time_cuda(lambda: torch.autograd.grad(o, (q, k, v), do.detach(), retain_graph=True))
    with torch.no_grad():
        time_forward = time_cuda(forward)
    return time_forward, backward, 1.0


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
    return ResultRow(
        bench="attention",
        case=case.name,
        metric=metric,
        unit="ms",
        value=timing.p50 * factor,
        p20=timing.quantile(0.2) * factor,
        p80=timing.quantile(0.8) * factor,
        note=note,
    )


def available_kernels() -> tuple[str, ...]:
    """Names of the CUDA kernels that can run here."""
    return tuple(
        k.name
        for k in KERNELS
        if k.device_types == ("cuda",)
        and k.refuses_device(torch.device("cuda", torch.cuda.current_device())) is None
    )
