"""The attention of a microbatch: its forward and its exact backward.

A query attends causally to its own segment and fully to every ancestor. So there is one causal
launch over the microbatch's segments, and one unmasked launch for each further level of ancestors.
Their partial results are merged by log-sum-exp. A flash backward uses only P = exp(s - LSE) and the
row sums of dO * O. So each launch's stock backward, with the merged O and LSE, returns its part of
the exact gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Gradients, Kernel, Options
from forkpoint.ops.attention.merge import Part, merge
from forkpoint.ops.attention.registry import launch_kernel
from forkpoint.ops.attention.source import RowSum, Source, rows
from forkpoint.ops.attention.table import Ancestors, AttentionTable, CacheSlice, Launch
from forkpoint.ops.dtypes import without_autocast
from forkpoint.tree import FROM_CACHE, FROM_GATHER, FROM_OWN, REPEATED_BYTES


@torch.compiler.disable()
def shared_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    *,
    table: AttentionTable,
    cache: Ancestors | None = None,
    sinks: Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    kernel: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens of one microbatch over their paths, in the microbatch and in the
    cache.

    q_THD [T, H, D], k_TKD [T, K, D], v_TKE [T, K, E]: one floating dtype and device; H is a
    multiple of K, and query head h reads key-value head h // (H / K). sinks [H], any floating
    dtype: learnable logits without a value in every softmax. scale multiplies the scores; softcap
    c > 0 makes them c * tanh(s / c); window W > 0 lets a query at i see keys j with i - W < j <= i,
    by a table made for it: one causal launch, which gathers the tails of the paths.

    Returns o_THE [T, H, E] in the dtype of q, and lse_HT [H, T], float32 (float64 for float64), the
    log of the softmax denominators, sinks included; lse is not differentiable.

    The backward returns the gradients of q, k, v and sinks that are required, and adds those of the
    cache into cache.grad_k and cache.grad_v, in place, where these are given. Autograd's version
    counter does not guard the cache: other slices of its buffer may be written between forward and
    backward, but not this one. There is no second derivative.

    Raises UnsupportedError if no kernel, or not the named one, can serve, and AssertionError for
    inputs that contradict one another or the table.
    """
    options = Options(scale, softcap, window, deterministic)
    return _SharedAttention.apply(  # type: ignore[return-value]
        q_THD, k_TKD, v_TKE, sinks, Reading(table, cache, options, kernel)
    )


class Reading(NamedTuple):
    """Tables, prefix cache and options of an attention: see `shared_attention`."""

    table: AttentionTable
    cache: Ancestors | None
    options: Options
    kernel: str


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reading: Reading
) -> tuple[Tensor, Tensor]:
    """Compute the forward. Returns o and lse."""
    table, options = reading.table, reading.options
    cache = None if reading.cache is None else reading.cache.open()
    kernels = _select(q, k, v, reading, cache)

    q = _dense_last(q)
    gathers = (table.own_gather, table.cache_gather)
    keys = Source(k, cache and cache.k, *gathers)
    values = Source(v, cache and cache.v, *gathers)
    parts = []
    with without_autocast(q):
        for chosen, launch in zip(kernels, table.calls, strict=True):
            o_THE, lse_HT = chosen.forward(
                rows(q, launch.q_begin, launch.q_end),
                _dense_last(keys.read(launch)),
                _dense_last(values.read(launch)),
                launch,
                options,
            )
            parts.append(Part(launch.q_begin, o_THE, lse_HT))
        return merge(parts, sinks, q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, reading: Reading, cache: CacheSlice | None) -> None:
    """Raise AssertionError if tensors and launches contradict one another. Does not wait for the
    device."""
    calls, window = reading.table.calls, reading.options.window
    cached = 0 if cache is None else len(cache.k)
    gathers = reading.table.own_gather is not None
    assert q.ndim == 3 and len(q) == len(k) == len(v) == calls[0].q_end, "one token, one query"
    assert q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert k.shape[1] == v.shape[1] and q.dtype == k.dtype == v.dtype, (k.shape, v.shape)
    keys = {FROM_OWN: len(q), FROM_CACHE: cached}
    for launch in calls:
        assert launch.q_end <= len(q), launch
        assert launch.source == FROM_GATHER or launch.k_end <= keys[launch.source], launch
        assert launch.source != FROM_GATHER or (gathers and window), (
            "a gathering launch holds only the tails of its paths: it needs key_index and a window"
        )
    assert not window or (len(calls) == 1 and calls[0].causal), (
        "a window is one causal launch; an unmasked rectangle cannot express it"
    )


def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    reading: Reading,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and sinks, each empty unless wanted. Adds to the cache's
    gradients."""
    table, options = reading.table, reading.options
    cache = None if reading.cache is None else reading.cache.open()
    wants_q, wants_k, wants_v, wants_sinks = wants
    kernels = _select(q, k, v, reading, cache)

    do, q = do.contiguous(), _dense_last(q)
    gathers = (table.own_gather, table.cache_gather)
    keys = Source(k, cache and cache.k, *gathers, cache and cache.grad_k)
    values = Source(v, cache and cache.v, *gathers, cache and cache.grad_v)
    dq_sum = RowSum(q)
    with without_autocast(q):
        for chosen, launch in zip(kernels, table.calls, strict=True):
            if not (
                wants_q
                or (launch.source != FROM_CACHE and (wants_k or wants_v))
                or (launch.source != FROM_OWN and cache is not None and cache.grad_k is not None)
            ):
                continue
            queries = launch.q_begin, launch.q_end
            inputs = BackwardInputs(
                rows(do, *queries),
                rows(q, *queries),
                _dense_last(keys.read(launch)),
                _dense_last(values.read(launch)),
                rows(o, *queries),
                lse[:, launch.q_begin : launch.q_end],
            )
            dq, dk, dv = _launch_backward(chosen, inputs, launch, options)
            if wants_q:
                dq_sum.add(dq, launch.q_begin)
            keys.add_grad(launch, dk, wants_k, options.deterministic)
            values.add_grad(launch, dv, wants_v, options.deterministic)
        if reading.cache is not None:
            reading.cache.close()
        # An operator must return tensors, so unwanted gradients are empty ones.
        return (
            dq_sum.result() if wants_q else q.new_empty(0),
            keys.grad.result() if wants_k else q.new_empty(0),
            values.grad.result() if wants_v else q.new_empty(0),
            _sinks_gradient(do, o, lse, sinks)
            if wants_sinks and sinks is not None
            else q.new_empty(0),
        )


def _launch_backward(
    kernel: Kernel, inputs: BackwardInputs, launch: Launch, options: Options
) -> Gradients:
    """A kernel's backward, in groups of heads if repeated keys would take much memory.

    With a million keys of 4 heads of 256 and 16 heads of queries, they would take 17 GB.
    """
    _, q, k, v, *_ = inputs
    heads, key_heads = q.shape[1], k.shape[1]
    repeated_bytes = len(k) * heads * (k.shape[2] + v.shape[2]) * k.element_size()
    fewest = -(-repeated_bytes // REPEATED_BYTES)
    if not kernel.repeats_keys or key_heads in (1, heads) or fewest <= 1:
        return kernel.backward(inputs, launch, options)
    groups = next((n for n in range(fewest, key_heads) if key_heads % n == 0), key_heads)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for n in range(groups):
        its = (x.chunk(groups, 1)[n] for x in inputs[:5])
        group = BackwardInputs(*its, lse=inputs.lse.chunk(groups)[n])
        found = kernel.backward(group, launch, options)
        for output, part in zip((dq, dk, dv), found, strict=True):
            output.chunk(groups, 1)[n].copy_(part)
    return dq, dk, dv


def _sinks_gradient(do_THE: Tensor, o_THE: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient of sinks. A sink has the weight exp(s_h - LSE) and the value 0, so ds = weight *
    (0 - dO . O)."""
    dtype = lse_HT.dtype
    delta_HT = (do_THE.to(dtype) * o_THE).sum(-1).T
    share_HT = (sinks_H.to(dtype)[:, None] - lse_HT).exp_()
    return -(share_HT * delta_HT).sum(-1).to(sinks_H.dtype)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        o_THE, lse_HT = attend(q, k, v, sinks, reading)
        ctx.mark_non_differentiable(lse_HT)
        ctx.save_for_backward(q, k, v, o_THE, lse_HT, sinks)
        # save_for_backward is not used: autograd would raise an error after a write to any slice of
        # the cache, and the cache would be offloaded as an activation of this microbatch.
        ctx.reading = reading
        return o_THE, lse_HT

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "shared attention has no second derivative, and its backward was called with "
                "create_graph=True; call it without."
            )
        wants = ctx.needs_input_grad[:4]
        q, k, v, o_THE, lse_HT, sinks = ctx.saved_tensors
        do_THE = grad_outputs[0]
        found = attend_backward(do_THE, q, k, v, o_THE, lse_HT, sinks, ctx.reading, wants)
        return *(x if wanted else None for x, wanted in zip(found, wants, strict=True)), None


def _select(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, cache: CacheSlice | None
) -> list[Kernel]:
    """The kernel of each launch, the same in forward and backward and in equal layers.

    Raises AssertionError if tensors and launches contradict one another.
    """
    shapes = (q.shape, k.shape, v.shape, None if cache is None else len(cache.k))
    key = (reading.kernel, reading.options, q.dtype, shapes)
    kernels = reading.table.chosen.get(key)
    if kernels is None:
        _check(q, k, v, reading, cache)
        dims, heads = (q.shape[2], v.shape[2]), (q.shape[1], v.shape[1])
        asked = Asked(q.device, q.dtype, *dims, *reading.options[1:], *heads)
        kernels = [launch_kernel(reading.kernel, launch, asked) for launch in reading.table.calls]
        reading.table.chosen[key] = kernels
    return kernels


def _dense_last(x: Tensor) -> Tensor:
    """Kernels need a stride of 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
