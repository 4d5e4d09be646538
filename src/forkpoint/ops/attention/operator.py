"""The attention of a microbatch as torch operators: forward, backward, and what compilers see of
them.

A query sees its own segment causally and every ancestor whole. That is one causal call over the
microbatch's segments and one unmasked call for each further level of ancestors; the partial results
are merged by log-sum-exp. Since P = exp(s - LSE) and only the row sums of dO * O are needed
besides, each call's stock backward, given the merged O and LSE, returns its part of the exact
gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention.kernel import Asked, Kernel, Options
from forkpoint.ops.attention.merge import Part, merge
from forkpoint.ops.attention.registry import launch_kernel
from forkpoint.ops.attention.source import RowSum, Source
from forkpoint.ops.attention.table import AttentionTable, CacheSlice, Launch, read_launches
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.tree import FROM_CACHE, FROM_GATHER, FROM_OWN


def shared_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    *,
    table: AttentionTable,
    cache: CacheSlice | None = None,
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

    Raises UnsupportedError where the kernel cannot serve; AssertionError for inputs that contradict
    one another or the table.
    """
    cache_tensors = (None, None, None, None)
    if cache is not None:
        cache_tensors = (cache.k, cache.v, cache.grad_k, cache.grad_v)
    function = _forward_op if _observed() else _Direct.apply
    return function(
        q_THD,
        k_TKD,
        v_TKE,
        *cache_tensors,
        sinks,
        table.launches,
        table.cu_cpu,
        table.cu_device,
        table.own_gather,
        table.cache_gather,
        scale,
        softcap,
        window,
        kernel,
        deterministic,
    )


def _observed() -> bool:
    """Whether somebody wants to see an operator: a compiler, a fake or a dispatch mode.

    Otherwise autograd calls the same functions directly. Through torch's dispatcher an operator
    with so many arguments takes longer on the host than a small attention on the device.
    """
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor | None,
    cache_v: Tensor | None,
    cache_grad_k: Tensor | None,
    cache_grad_v: Tensor | None,
    sinks: Tensor | None,
    launches: Tensor,
    cu_cpu: Tensor,
    cu_device: Tensor,
    own_gather: Tensor | None,
    cache_gather: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    kernel: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Forward of the operator, arguments as in `shared_attention`; gives o and lse."""
    calls = read_launches(launches, cu_cpu, cu_device)
    cached = 0 if cache_k is None else len(cache_k)
    _check(q, k, v, calls, cached, own_gather is not None, window)
    options = Options(scale, softcap, window, deterministic)
    kernels = _select(q, v, calls, kernel, options)

    q = _dense_last(q)
    keys = Source(k, cache_k, own_gather, cache_gather)
    values = Source(v, cache_v, own_gather, cache_gather)
    parts = []
    with _without_autocast(q):
        for chosen, launch in zip(kernels, calls, strict=True):
            o_THE, lse_HT = chosen.forward(
                q[launch.q_begin : launch.q_end],
                _dense_last(keys.read(launch)),
                _dense_last(values.read(launch)),
                launch,
                options,
            )
            parts.append(Part(launch.q_begin, o_THE, lse_HT))
        return merge(parts, sinks, q.dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, calls: list[Launch], cached: int, gathers: bool, window: int
) -> None:
    """Raise AssertionError where tensors and launches contradict one another; never a sync."""
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
    cache_k: Tensor | None,
    cache_v: Tensor | None,
    cache_grad_k: Tensor | None,
    cache_grad_v: Tensor | None,
    sinks: Tensor | None,
    launches: Tensor,
    cu_cpu: Tensor,
    cu_device: Tensor,
    own_gather: Tensor | None,
    cache_gather: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    kernel: str,
    deterministic: bool,
    wants_q: bool,
    wants_k: bool,
    wants_v: bool,
    wants_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its gradients by q, k, v and sinks, each empty unless wanted; the cache's are added to."""
    calls = read_launches(launches, cu_cpu, cu_device)
    options = Options(scale, softcap, window, deterministic)
    kernels = _select(q, v, calls, kernel, options)

    do, q = do.contiguous(), _dense_last(q)
    keys = Source(k, cache_k, own_gather, cache_gather, cache_grad_k)
    values = Source(v, cache_v, own_gather, cache_gather, cache_grad_v)
    dq_sum = RowSum(q)
    with _without_autocast(q):
        for chosen, launch in zip(kernels, calls, strict=True):
            if not (
                wants_q
                or (launch.source != FROM_CACHE and (wants_k or wants_v))
                or (launch.source != FROM_OWN and cache_grad_k is not None)
            ):
                continue
            queries = slice(launch.q_begin, launch.q_end)
            dq, dk, dv = chosen.backward(
                do[queries],
                q[queries],
                _dense_last(keys.read(launch)),
                _dense_last(values.read(launch)),
                o[queries],
                lse[:, queries],
                launch,
                options,
            )
            if wants_q:
                dq_sum.add(dq, launch.q_begin)
            keys.add_grad(launch, dk, wants_k, deterministic)
            values.add_grad(launch, dv, wants_v, deterministic)
        # An operator returns tensors, not None: what is not wanted is an empty one.
        return (
            dq_sum.result() if wants_q else q.new_empty(0),
            keys.grad.result() if wants_k else q.new_empty(0),
            values.grad.result() if wants_v else q.new_empty(0),
            _sinks_gradient(do, o, lse, sinks)
            if wants_sinks and sinks is not None
            else q.new_empty(0),
        )


def _sinks_gradient(do_THE: Tensor, o_THE: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """A sink has the share exp(s_h - LSE) of a softmax and no value: ds = share * (0 - dO . O)."""
    dtype = lse_HT.dtype
    delta_HT = (do_THE.to(dtype) * o_THE).sum(-1).T
    share_HT = (sinks_H.to(dtype)[:, None] - lse_HT).exp_()
    return -(share_HT * delta_HT).sum(-1).to(sinks_H.dtype)


_forward_op = torch.library.custom_op("forkpoint::shared_attention", attend, mutates_args=())
_backward_op = torch.library.custom_op(
    "forkpoint::shared_attention_backward",
    attend_backward,
    mutates_args=("cache_grad_k", "cache_grad_v"),
)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = q.shape
    o_THE = q.new_empty(tokens, heads, v.shape[2])
    return o_THE, q.new_empty(heads, tokens, dtype=accumulate_dtype(q.dtype))


@_backward_op.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks, wanted = rest[6], rest[-4:]
    return tuple(
        x.new_empty(x.shape) if wants else q.new_empty(0)
        for x, wants in zip((q, k, v, sinks), wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *cache, sinks = inputs[:8]
    o_THE, lse_HT = output
    ctx.mark_non_differentiable(lse_HT)
    ctx.save_for_backward(q, k, v, o_THE, lse_HT, sinks)
    # Not saved for backward: autograd would take a write to any slice of the cache for an error,
    # and offloading would take the cache for an activation of this microbatch.
    ctx.cache = cache
    ctx.rest = inputs[8:]


def _backward(
    ctx: Any, do_THE: Tensor, _: Tensor | None, function: Callable = _backward_op
) -> tuple[Tensor | None, ...]:
    q, k, v, o_THE, lse_HT, sinks = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[at] for at in (0, 1, 2, 7)]
    found = function(do_THE, q, k, v, o_THE, lse_HT, *ctx.cache, sinks, *ctx.rest, *wanted)
    dq, dk, dv, dsinks = (x if wants else None for x, wants in zip(found, wanted, strict=True))
    return dq, dk, dv, None, None, None, None, dsinks, *([None] * len(ctx.rest))


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class _Direct(torch.autograd.Function):
    """The operator without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = attend(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "shared attention has no second derivative, and its backward was called with "
                "create_graph=True; call it without."
            )
        do_THE, _ = grad_outputs
        return _backward(ctx, do_THE, None, attend_backward)


def _select(
    q: Tensor, v: Tensor, launches: list[Launch], kernel: str, options: Options
) -> list[Kernel]:
    """The kernel of each launch, the same in forward and backward."""
    grouped = q.shape[1] != v.shape[1]
    asked = Asked(q.device, q.dtype, q.shape[2], v.shape[2], *options[1:], grouped)
    return [launch_kernel(kernel, launch, asked) for launch in launches]


def _without_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast reaches into operators: here it would round float32 sums and products to 16 bit."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _dense_last(x: Tensor) -> Tensor:
    """Kernels take any strides but in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
