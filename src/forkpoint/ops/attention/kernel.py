"""Interface of an attention kernel: two functions and a record of what they support."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forkpoint.ops.attention.table import Launch
from forkpoint.ops.choice import Asked as Asked
from forkpoint.ops.choice import Candidate, no_refusal

MOST_ELEMENTS = 1 << 31


class Options(NamedTuple):
    """Options of an attention, as in `shared_attention`."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    deterministic: bool = False


Forward = Callable[[Tensor, Tensor, Tensor, Launch, Options], tuple[Tensor, Tensor]]
"""q [Tq, H, D], k [Tk, K, D], v [Tk, K, E] of one launch -> o [Tq, H, E], lse [H, Tq].

o in the inputs' dtype or in `accumulate_dtype`, lse in the latter, natural logarithm, both freshly
allocated. Inputs are contiguous in their last dimension and may be strided in others.
"""


class BackwardInputs(NamedTuple):
    """Tensors of one launch's backward.

    A flash backward uses only P = exp(s - lse) and the row sums of do * o. So with o and lse of the
    merged result, it returns this launch's part of the exact gradients.
    """

    do: Tensor
    """Gradient of o: [Tq, H, E]."""
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    """Merged result, not that of this launch."""
    lse: Tensor
    """[H, Tq], of the merged result."""


Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v, in the inputs' dtype or in `accumulate_dtype`, freshly allocated."""
Backward = Callable[[BackwardInputs, Launch, Options], Gradients]


@dataclass(frozen=True, kw_only=True)
class Kernel(Candidate):
    """An attention kernel, and the properties for which it has been shown exact. Others are
    refused."""

    forward: Forward
    backward: Backward
    refuses_launch: Callable[[Launch, Asked], str | None] = no_refusal
    """Returns another reason why it cannot serve a launch ("it needs ..."), or None."""
    softcap: bool = False
    window: bool = False
    causal_offset: bool = False
    """Whether causal launches may have more keys than queries, as in windowed layers."""
    ragged: bool = False
    """Whether sequences of a launch may differ in length."""
    repeats_keys: bool = False
    """Whether its backward allocates gradients of keys and values for every head of queries, and
    then sums those of a key head."""
    auto_pairs: int = 0
    """"auto" prefers the next kernel for launches with fewer (query, key) pairs."""

    def refusal(self, asked: Asked) -> str | None:
        """Why it cannot serve such attention, worded to follow its name; None if it can."""
        if found := super().refusal(asked):
            return found
        if asked.softcap and not self.softcap:
            return f"it has no softcap (asked for {asked.softcap})"
        if asked.window and not (self.window and self.causal_offset):
            return f"it has no sliding window (asked for {asked.window})"
        return None

    def launch_refusal(self, launch: Launch, asked: Asked) -> str | None:
        """Why it cannot serve this launch of an attention that it serves; None if it can."""
        if launch.ragged and not self.ragged:
            return "it takes sequences of equal length, and a launch has others"
        longer = launch.k_end - launch.k_begin != launch.q_end - launch.q_begin
        if launch.causal and longer and not self.causal_offset:
            return "it has no causal mask for more keys than queries, and a launch needs it"
        return self.refuses_launch(launch, asked)


def refuses_elements(queries: int, keys: int, asked: Asked) -> str | None:
    """Reason why a kernel with 32-bit indices cannot serve these numbers of queries and keys, or
    None."""
    heads = max(queries * asked.heads, keys * asked.kv_heads)
    elements = heads * max(asked.head_dim, asked.value_dim)
    if elements < MOST_ELEMENTS:
        return None
    return f"it takes fewer than {MOST_ELEMENTS:,} elements, and a launch has {elements:,}"
