"""The flash attention that torch ships for CPUs.

Source: `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, as found by experiment
in torch 2.11 and 2.13:
- Tensors are [B, H, T, D] with any strides but a last dimension of stride 1, so packed sequences go
  in as views; the output has the strides of q. lse is [B, H, T], natural logarithm, float32
  (float64 for float64); the backward takes it with any strides.
- float64, float32, bfloat16, float16. Key-value heads may be fewer than query heads, in both
  directions. Value and key head dims must be equal.
- is_causal aligns top-left, so it is used where there are as many keys as queries. attn_mask is
  additive, in the dtype of q. There is no window argument, and masked scores are computed. So
  windows are computed in blocks of queries, each with only the keys in its windows.
- No softcap.
- The backward sums dk and dv over blocks of queries in the dtype of the inputs. In bfloat16 this is
  inexact (relative error 3e-3 with 1,000 queries, 1.5e-2 with 40,000), and prefixes have many
  queries. So the backward of 16-bit inputs runs in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Gradients, Kernel, Options
from forkpoint.ops.attention.table import Launch
from forkpoint.ops.dtypes import accumulate_dtype

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_BLOCK_QUERIES = 256
"""Queries of a masked block. More would waste time on masked keys, fewer on calls."""


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    heads = q_THD.shape[1]
    o_THE = q_THD.new_empty(len(q_THD), heads, v_TKE.shape[2])
    lse_HT = q_THD.new_empty(heads, len(q_THD), dtype=accumulate_dtype(q_THD.dtype))
    for call in _calls(launch, options.window):
        q_BHTD, k_BKTD, v_BKTE = call.queries(q_THD), call.keys(k_TKD), call.keys(v_TKE)
        o, lse = _flash(
            q_BHTD,
            k_BKTD,
            v_BKTE,
            is_causal=call.causal,
            attn_mask=call.mask(q_BHTD.dtype),
            scale=options.scale,
        )
        call.queries(o_THE).copy_(o)
        call.lse(lse_HT).copy_(lse)
    return o_THE, lse_HT


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    dtype = accumulate_dtype(inputs.q.dtype)
    do_THE, q_THD, k_TKD, v_TKE, o_THE = (x.to(dtype) for x in inputs[:5])
    dq_THD = torch.empty_like(q_THD)
    # Blocks of one sequence share keys, so their gradients are summed.
    dk_TKD, dv_TKE = torch.zeros_like(k_TKD), torch.zeros_like(v_TKE)
    for call in _calls(launch, options.window):
        dq, dk, dv = _flash_backward(
            call.queries(do_THE),
            call.queries(q_THD),
            call.keys(k_TKD),
            call.keys(v_TKE),
            call.queries(o_THE),
            call.lse(inputs.lse),
            dropout_p=0.0,
            is_causal=call.causal,
            attn_mask=call.mask(dtype),
            scale=options.scale,
        )
        call.queries(dq_THD).copy_(dq)
        call.keys(dk_TKD).add_(dk)
        call.keys(dv_TKE).add_(dv)
    return dq_THD, dk_TKD, dv_TKE


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the stock kernel, for the queries `block_q` and the keys `block_k` of each of
    `batch` adjacent sequences of equal lengths, which begin at q_at and k_at."""

    batch: int
    q_at: int
    q_length: int
    k_at: int
    k_length: int
    block_q: slice
    block_k: slice
    causal: bool = False
    masked: bool = False
    window: int = 0

    def queries(self, x_THD: Tensor) -> Tensor:
        return _batch(x_THD, self.q_at, self.batch, self.q_length)[:, :, self.block_q]

    def keys(self, x_TKD: Tensor) -> Tensor:
        return _batch(x_TKD, self.k_at, self.batch, self.k_length)[:, :, self.block_k]

    def lse(self, x_HT: Tensor) -> Tensor:
        x_HT = x_HT[:, self.q_at : self.q_at + self.batch * self.q_length]
        x_HBT = x_HT.view(-1, self.batch, self.q_length)
        return x_HBT.transpose(0, 1)[:, :, self.block_q]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        if not self.masked:
            return None
        queries = self.block_q.stop - self.block_q.start
        keys = self.block_k.stop - self.block_k.start
        return _mask(queries, keys, self.window, dtype)


@lru_cache(maxsize=8)  # blocks differ only near the starts and ends of segments
def _mask(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [queries, keys] of a block whose last query is at its last key."""
    hidden = torch.ones(queries, keys, dtype=torch.bool, device="cpu").triu(keys - queries + 1)
    if window:
        hidden |= torch.ones_like(hidden).tril(keys - queries - window)
    return torch.zeros(queries, keys, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)


def _batch(x_THD: Tensor, at: int, batch: int, length: int) -> Tensor:
    """View of `batch` sequences of one length that begin at `at`, as [B, H, T, D]."""
    x_THD = x_THD[at : at + batch * length]
    return x_THD.view(batch, length, *x_THD.shape[1:]).transpose(1, 2)


def _calls(launch: Launch, window: int) -> Iterator[_Call]:
    """The calls of a launch: one for each run of adjacent sequences of equal lengths. If the kernel
    lacks the mask, one for each block of queries of such a run."""
    q_at = k_at = 0
    lengths = ((q1 - q0, k1 - k0) for q0, q1, k0, k1 in launch.sequences())
    for (queries, keys), run in groupby(lengths):
        batch = sum(1 for _ in run)
        call = partial(_Call, batch, q_at, queries, k_at, keys)
        q_at, k_at = q_at + batch * queries, k_at + batch * keys
        offset = keys - queries
        if not launch.causal:
            yield call(slice(0, queries), slice(0, keys))
        elif offset == 0 and not 0 < window < keys:
            yield call(slice(0, queries), slice(0, keys), causal=True)
        else:
            for begin in range(0, queries, _BLOCK_QUERIES):
                end = min(begin + _BLOCK_QUERIES, queries)
                reach = max(0, begin + offset - window + 1) if window else 0
                block_q, block_k = slice(begin, end), slice(reach, end + offset)
                yield call(block_q, block_k, masked=True, window=window)


def _refuses(asked: Asked) -> str | None:
    if asked.head_dim == asked.value_dim:
        return None
    dims = f"{asked.head_dim} and {asked.value_dim}"
    return f"it needs equal head dims of keys and values, not {dims}"


KERNEL = Kernel(
    name="cpu_flash",
    forward=forward,
    backward=backward,
    device_types=("cpu",),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    refuses=_refuses,
    window=True,
    causal_offset=True,
    ragged=True,
    deterministic=True,
)
