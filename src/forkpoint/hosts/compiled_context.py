"""Attention with context parallelism in compiled decoder blocks: one operator for exchanges and
attention (see `compiled_attention` and `torch_dist.context_parallel`).

Tensors saved for the backward have rows for the places of all ranks, with padding. Their number is
a multiple of the operator's input rows, so compiled code knows the sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forkpoint.hosts.compiled_attention import begin_call, call_of, current_call
from forkpoint.hosts.operators import differentiable, operator
from forkpoint.hosts.torch_dist.context_parallel import DealtPlaces, WholeSegments
from forkpoint.ops.attention.operator import attend
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.parallel.topology import Places


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    index: int,
    scale: float,
    softcap: float,
    window: int,
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    places, tokens = _places(current_call().places), current_call().inputs.part.tokens
    rows = len(q) * ranks
    own_sinks = None if sinks is None else places.own_heads(sinks)
    q, k, v = (x.contiguous() for x in places.heads_of((q, k, v), rows))
    call, handle = begin_call(k[:tokens], v[:tokens], index, scale, softcap, window)
    o_THE, lse_HT = attend(q[:tokens], k[:tokens], v[:tokens], own_sinks, call.reading)
    (own_o_tHE,) = places.places_of((o_THE,), tokens)
    if tokens < len(q):
        o_THE = torch.nn.functional.pad(o_THE, (0, 0, 0, 0, 0, len(q) - tokens))
        lse_HT = torch.nn.functional.pad(lse_HT, (0, len(q) - tokens))
    q, k, v, o_THE = (x.contiguous().view(rows, -1, x.shape[2]) for x in (q, k, v, o_THE))
    return own_o_tHE, q, k, v, o_THE, lse_HT.contiguous().view(-1, rows), handle


def _run_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, zeros unless wanted, and of sinks, empty unless wanted.

    All three are always sent, as in eager blocks, because another rank may run the block eagerly
    after a failure of its compiler.
    """
    call = call_of(handle)
    places, tokens = _places(call.places), call.tokens
    own_sinks = None if sinks is None else places.own_heads(sinks)
    (do_THE,) = places.heads_of((do,), tokens)
    heads = do_THE.shape[1]
    q_THD = q.view(-1, heads, q.shape[2])
    k_TKD, v_TKE, o_THE = (x.view(len(q_THD), -1, x.shape[2])[:tokens] for x in (k, v, o))
    qkv = (q_THD[:tokens], k_TKD, v_TKE)
    lse_HT = lse.view(heads, -1)[:, :tokens]
    *found, dsinks = call.backward(do_THE, *qkv, o_THE, lse_HT, own_sinks, wants)
    gradients = tuple(
        dx if wanted else torch.zeros_like(x)
        for dx, x, wanted in zip(found, qkv, wants[:3], strict=True)
    )
    dq, dk, dv = (x.contiguous() for x in places.places_of(gradients, tokens))
    if sinks is not None and wants[3]:
        every = torch.zeros_like(sinks)
        places.own_heads(every).copy_(dsinks)
        dsinks = every
    return dq, dk, dv, dsinks


def _places(places: Places) -> DealtPlaces | WholeSegments:
    assert isinstance(places, DealtPlaces | WholeSegments)
    return places


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    ranks: int = rest[-1]
    rows = q.shape[0] * ranks
    q_ThD, k_TKD, v_TKE = (x.new_empty(rows, x.shape[1] // ranks, x.shape[2]) for x in (q, k, v))
    o_THE = q.new_empty(*q_ThD.shape[:2], v.shape[2])
    lse_HT = q.new_empty(q_ThD.shape[1], rows, dtype=accumulate_dtype(q.dtype))
    handle = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty(*q.shape[:2], v.shape[2]), q_ThD, k_TKD, v_TKE, o_THE, lse_HT, handle


def _fake_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks, wants = rest[2], rest[-1]
    ranks = do.shape[1] // q.shape[1]
    gradients = (x.new_empty(do.shape[0], x.shape[1] * ranks, x.shape[2]) for x in (q, k, v))
    return *gradients, sinks.new_empty(sinks.shape) if wants[3] else q.new_empty(0)


context_attention_forward: Callable[..., Any] = operator(
    "attention_over_ranks_forward", _run, _fake
)
context_attention_backward: Callable[..., Any] = operator(
    "attention_over_ranks_backward", _run_backward, _fake_backward
)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = context_attention_forward(*inputs)
        ctx.mark_non_differentiable(*outputs[1:])
        *kept, handle = outputs[1:]
        ctx.save_for_backward(*kept, inputs[3], handle)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wants = [bool(wanted) for wanted in ctx.needs_input_grad[:4]]
        found = context_attention_backward(grad_outputs[0], *ctx.saved_tensors, wants)
        gradients = (x if wanted else None for x, wanted in zip(found, wants, strict=True))
        return *gradients, *([None] * 5)  # index, scale, softcap, window, ranks


context_attention: Callable[..., Any] = differentiable(
    "attention_over_ranks", _run, _ContextAttention
)
"""Attention of a module of the running block, for this rank's places.

q, k, v: [t, H, D], with numbers of heads that are multiples of the number of ranks. sinks: [H].
Returns o [t, H, E]; q, k, v, o and lse [h, T] of this rank's heads at all places; and the handle.
If the microbatch is split by responses, these are of all heads at this rank's places, viewed in the
same shapes.
"""
