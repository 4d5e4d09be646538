"""Alternatives to shared-prefix attention: what users have without it."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.cases import Case, Inputs
from benchmarks.timing import Timing, time_cuda
from forkpoint.ops.attention import Kernel, Launch
from forkpoint.ops.attention.kernel import Options
from forkpoint.plan.pricing.cost import visible_pairs
from forkpoint.tree.forest import IntArray

# Dense work is linear in the responses: so many are timed, and the time is scaled.
DENSE_RESPONSES = 2


def dense(inputs: Inputs, chosen: Kernel) -> tuple[Timing, Timing, float]:
    """The prefix replicated for every response: some of them, scaled to all."""
    forward, backward, factor = dense_calls(inputs, chosen, every=inputs.case.small)
    return time_cuda(forward), time_cuda(backward), factor


def dense_lengths(case: Case, *, ragged: bool, every: bool) -> list[int]:
    """Tokens of each replicated sequence that is timed: a few, one where they differ and the kernel
    takes none but equal ones."""
    lengths = [p + r for p, rs in zip(case.prefixes, case.responses, strict=True) for r in rs]
    timed = lengths if every else lengths[:DENSE_RESPONSES]
    return timed if ragged or len(set(timed)) == 1 else timed[:1]


def dense_calls(
    inputs: Inputs, chosen: Kernel, *, every: bool
) -> tuple[Callable[[], object], Callable[[], object], float]:
    case = inputs.case
    lengths = dense_lengths(case, ragged=True, every=True)
    timed = dense_lengths(case, ragged=chosen.ragged, every=every)
    total, part = (
        visible_pairs(np.zeros(len(x), np.int64), np.asarray(x), 0) for x in (lengths, timed)
    )
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
    options = Options(inputs.scale)
    o, lse = chosen.forward(q, k, v, launch, options)

    def forward() -> object:
        return chosen.forward(q, k, v, launch, options)

    def backward() -> object:
        return chosen.backward(do, q, k, v, o, lse, launch, options)

    return forward, backward, total / part


def graphed(function: Callable[[], None]) -> Callable[[], None]:
    """A replay of the function's work as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def copied_keys(
    inputs: Inputs, chosen: Kernel, index: Tensor, launch: Launch, q: Tensor, do: Tensor
) -> tuple[Timing, Timing, float]:
    options = Options(inputs.scale)

    def forward() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = inputs.k[index], inputs.v[index]
        return (k, v, *chosen.forward(q, k, v, launch, options))

    k, v, o, lse = forward()
    runs = runs_of(index.cpu().numpy(), inputs.row.segment_begin)
    backwards = []
    # Which way to sum is faster depends on the sizes; the method has the faster one.
    for add in (_index_add, sum_of_copies):

        def backward(add: Callable[..., Tensor] = add) -> None:
            _, dk, dv = chosen.backward(do, q, k, v, o, lse, launch, options)
            for part in (dk, dv):
                add(part, index, runs, len(inputs.k))

        backwards.append(time_cuda(backward))
    return time_cuda(forward), min(backwards, key=lambda timing: timing.p50), 1.0


def runs_of(index: IntArray, begins: Sequence[int]) -> list[tuple[int, int, int]]:
    """(begin in the copies, begin in the original, length) of each segment that was copied.

    `begins` are where the original's segments begin.
    """
    starts = np.flatnonzero(np.isin(index, begins))
    lengths = np.diff(np.append(starts, len(index)))
    return [(int(a), int(index[a]), int(n)) for a, n in zip(starts, lengths, strict=True)]


def _index_add(part: Tensor, index: Tensor, runs: object, length: int) -> Tensor:
    return part.new_zeros(length, *part.shape[1:]).index_add_(0, index, part)


def sum_of_copies(
    part: Tensor, index: Tensor, runs: list[tuple[int, int, int]], length: int
) -> Tensor:
    """The same sum [length, ...] segment by segment, as the backward of torch.cat goes: everything
    is read in order, without atomics. Each place of the original has been copied from."""
    total = part.new_empty(length, *part.shape[1:])
    written: set[int] = set()
    for at, to, count in runs:
        target, source = total[to : to + count], part[at : at + count]
        if to in written:
            target += source
        else:
            target.copy_(source)
            written.add(to)
    return total


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # The same backward is timed again and again, so its buffers must not be given away.
    config: Any = torch._functorch.config  # pyright: ignore[reportAttributeAccessIssue]
    config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def flex_attention(inputs: Inputs) -> tuple[tuple[Timing, Timing, float], Tensor]:
    """FlexAttention over the whole row with the shared-prefix mask, on its Triton kernels.

    Its output [T, H, D] beside its times. Raises what the compiler and its kernels raise.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    # It compiles for each shape, and after some shapes the compiler gives up without a word: the
    # mask would then be made whole.
    torch._dynamo.reset()
    case = inputs.case
    forest = case.forest()
    padded = -(-inputs.row.tokens // 128) * 128
    # Of what fills the last block; roots are below -1.
    segment = torch.full((padded,), -3, device="cuda")
    above = torch.full((padded,), -2, device="cuda")
    for index, begin in inputs.begin_of.items():
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
    return (time_forward, backward, 1.0), o.detach()[0].transpose(0, 1)[: inputs.row.tokens]
