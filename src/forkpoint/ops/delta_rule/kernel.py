"""Interface of a kernel of the gated delta rule: a differentiable function, and what it
supports."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forkpoint.ops.choice import Candidate
from forkpoint.ops.recurrence import Sequences

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by its root."""
CHUNK = 64
"""Tokens of a chunk, for which kernels have one state."""
MOST_ELEMENTS = 1 << 31
"""Elements of a tensor that 32-bit indices do not allow."""


DeltaScan = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Sequences, bool],
    tuple[Tensor, Tensor | None],
]
"""q, k [T, H, D], v [T, G, E], g, beta [T, G], initial, sequences, final -> o, states.

Sequences are adjacent. o is [T, G, E] in v's dtype. With `final`, states at the ends of sequences
are [S, G, D, E] in float32 (float64 for float64), which is also the dtype of `initial`; None is
zeros. All outputs are differentiable by autograd.
"""


@dataclass(frozen=True, kw_only=True)
class DeltaKernel(Candidate):
    """A kernel and the properties for which it has been shown exact. Others are refused."""

    scan: DeltaScan
    scan_levels: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    """(inputs, table, initial) -> results of `over_levels` with `scan`, in fewer launches."""


def is_large(v_TGE: Tensor, key_dim: int, sequences: int) -> bool:
    """Whether the values, or the states at the starts of all chunks, have too many elements for
    32-bit indices. States of many short sequences have more than values."""
    tokens, heads, value_dim = v_TGE.shape
    chunks = tokens // CHUNK + sequences
    largest = max(tokens * max(key_dim, value_dim), chunks * key_dim * value_dim)
    return heads * largest >= MOST_ELEMENTS


def normalized(x_THD: Tensor) -> Tensor:
    """Normalize queries or keys to length 1."""
    return x_THD * torch.rsqrt((x_THD * x_THD).sum(-1, keepdim=True) + NORM_EPS)


def by_value_head(x_THD: Tensor, heads: int) -> Tensor:
    """[..., H, D] -> [..., G, D]: each query or key head serves G / H neighbouring value heads."""
    return x_THD.repeat_interleave(heads // x_THD.shape[-2], dim=-2)


def decay_gate(a_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor) -> Tensor:
    """g = -exp(log_rate) softplus(a + bias): the log of the factor by which a token decays the
    state."""
    return -log_rate_G.exp() * F.softplus(a_TG + bias_G)
