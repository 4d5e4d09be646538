"""Meters price the microbatches of a plan: by counted FLOPs or, without a model's shape, by tokens.

The meter that prices by measurements of a device and a model is in plan/pricing/measured.py.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    ModelShape,
    visible_pairs,
)
from forkpoint.tree import Microbatch

# Below this many tokens a matrix product is bound by reading its weights, so that fewer tokens take
# no less time: about the FLOPs per byte at which current GPUs turn from memory- to compute-bound.
EFFICIENT_TOKENS = 256

# What a query that attends to ancestors by a further launch costs besides, in keys: reading and
# merging partial outputs, and the backward's passes over its queries. Measured on an H200 with
# FlashAttention-4, heads 32:8 of 128, as what sharing a prefix of 512 tokens adds to replicating it
# (benchmarks/results/attention-h200.jsonl, small/P512-N8-R2048). There it is a hundredth of what a
# layer's matrix products take for the token; of small models, whose products are not bound by their
# FLOPs either, it is at most so much of them.
LAUNCH_KEYS = 240
LAUNCH_MOST = 0.02

# Of two plans whose predicted times differ by less than this part, the simpler one is chosen.
NOISE = 0.005

# What each microbatch's backward costs besides, in tokens: it adds to all gradients. 12 ms on an
# H200 in a model of 8B (benchmarks/results/profile-h200.jsonl, "additions", and writing what is
# added).
ROW_TOKENS = 180


class Meter(Protocol):
    """Prices of the microbatches of one plan, in one unit.

    They are the same wherever activations of microbatches are meanwhile: a meter of a plan serves
        those that differ from it in activations alone.
    """

    unit: str

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float: ...

    def backward(self, microbatch: Microbatch) -> float:
        """With what its checkpointing computes again."""
        ...

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        """A copy to the host's memory, or back from there; None where its price is unknown."""
        ...

    def kept_bytes(self, microbatch: Microbatch) -> int:
        """Cost of what a microbatch keeps between its forward and its backward."""
        ...

    def working_bytes(self, microbatch: Microbatch) -> int:
        """Most that its backward needs besides."""
        ...


class CountedMeter:
    """FLOPs of what runs: edges, padding, microbatches too short to fill a device, and what a
    microbatch and a further launch of attention cost besides. Bytes as counted."""

    unit = "FLOPs"

    def __init__(self, plan: Plan, labelled_of_microbatch: Sequence[int]) -> None:
        assert plan.shape is not None
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        self.labelled_of_microbatch: Sequence[int] = labelled_of_microbatch
        self._parts_of: dict[int, tuple[float, float, float]] = {}

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        linear, head, attention = self._parts(microbatch)
        return linear + attention + (0.0 if boundary_only else head)

    def backward(self, microbatch: Microbatch) -> float:
        linear, head, attention = self._parts(microbatch)
        again = self.shape.repeated_flops_share(microbatch.checkpointing)
        # What a selective policy runs again are products of MLPs, and no attention.
        repeated = again * linear + (attention if again == 1.0 else 0.0)
        gradients = (1 + LINEAR_BACKWARD) * 2.0 * ROW_TOKENS * self.shape.linear_parameters
        return (
            LINEAR_BACKWARD * (linear + head)
            + (0.0 if microbatch.keeps_logits else head)
            + ATTENTION_BACKWARD * attention
            + repeated
            + gradients
        )

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        return None

    def kept_bytes(self, microbatch: Microbatch) -> int:
        kept = microbatch.run_tokens * self.shape.activation_bytes(microbatch.checkpointing)
        return kept + logits_bytes(
            microbatch, self.shape, self.labelled_of_microbatch[microbatch.index]
        )

    def working_bytes(self, microbatch: Microbatch) -> int:
        return 0

    def _parts(self, microbatch: Microbatch) -> tuple[float, float, float]:
        """FLOPs of a forward: blocks without attention, head, attention."""
        if microbatch.index not in self._parts_of:
            self._parts_of[microbatch.index] = self._counted(microbatch)
        return self._parts_of[microbatch.index]

    def _counted(self, microbatch: Microbatch) -> tuple[float, float, float]:
        shape, segments = self.shape, list(microbatch.segments)
        start, length = self.plan.forest.start[segments], self.plan.forest.length[segments]
        every = {w: visible_pairs(start, length, w) for w in set(shape.windows)}
        pairs = sum(every[window] for window in shape.windows)
        linear = 2.0 * max(microbatch.run_tokens, EFFICIENT_TOKENS) * shape.linear_parameters
        head = 2.0 * self.labelled_of_microbatch[microbatch.index] * shape.hidden * shape.vocab
        key = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
        further = min(
            LAUNCH_KEYS * key * shape.windows.count(0),
            LAUNCH_MOST * 2.0 * shape.linear_parameters,
        )
        return linear, head, key * pairs + further * self._queries_of_rectangles(microbatch)

    def _queries_of_rectangles(self, microbatch: Microbatch) -> int:
        """Tokens that have ancestors outside of their causal sequence (see `layout.full_table`)."""
        forest, segments = self.plan.forest, np.asarray(microbatch.segments)
        heads = np.ones(len(segments), bool)
        if not microbatch.width:
            heads[1:] = forest.parent[segments[1:]] != segments[:-1]
        above = forest.parent[segments[heads]] >= 0
        return int(forest.length[segments][above[np.cumsum(heads) - 1]].sum())


class TokenMeter:
    """Passes of tokens, where nothing is known of the model: a backward counts as two."""

    unit = "tokens"

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        return max(microbatch.run_tokens, EFFICIENT_TOKENS)

    def backward(self, microbatch: Microbatch) -> float:
        return 2 * max(microbatch.run_tokens, EFFICIENT_TOKENS)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        return None

    def kept_bytes(self, microbatch: Microbatch) -> int:
        return 0

    def working_bytes(self, microbatch: Microbatch) -> int:
        return 0


def logits_bytes(microbatch: Microbatch, shape: ModelShape, labelled: int) -> int:
    """Bytes of a microbatch's kept logits, as the head's product leaves them."""
    return labelled * shape.vocab * shape.dtype_bytes if microbatch.keeps_logits else 0
