"""Microbatches: segments that run in one forward of the model. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Segments that run as one packed sequence of tokens in one forward of the model."""

    index: int
    parent: int
    """Index of the microbatch that must be open while this one runs, -1 for none."""
    segments: tuple[int, ...]
    """Segments of the plan's forest, in their order in the microbatch."""
    segment_begin: tuple[int, ...]
    """Place of the first token of each segment."""
    children: tuple[int, ...]
    tokens: int
    """Number of edges of its segments: the tokens that a forward runs."""
    activations: str = "keep"
    """Storage of its activations while its children run: keep, offload or recompute."""
    checkpointing: str = "none"
    """Activations that its backward recomputes: none, selective or full."""
    keeps_logits: bool = False
    """Whether its head keeps all logits for the backward instead of computing them again."""
    num_loss_entries: int = 0
    """Number of entries that the head computes: one for each edge with a trained label, and for
    each temperature at which it is trained."""
    shared_prompt: Literal["", "sent", "received"] = ""
    """Whether it holds prompts of several ranks: "sent" to other ranks, or "received" from one, so
    that it does not run here; else ""."""
    parts: tuple[Self, ...] = ()
    """For a leaf by responses, the consecutive segments that each context-parallel rank runs, as
    one microbatch for each rank. Empty if the leaf is split by heads."""
    gathered: bool = False
    """Whether context-parallel ranks gather its prefix cache, which is split by heads, for leaves
    by responses."""


def token_steps(forest: Forest, microbatch: Microbatch) -> tuple[IntArray, IntArray]:
    """Segment of each token of a microbatch, and its position in the segment: int64 [T] each."""
    segments = np.asarray(microbatch.segments)
    lengths = forest.length[segments]
    begin = np.repeat(np.asarray(microbatch.segment_begin), lengths)
    return np.repeat(segments, lengths), np.arange(microbatch.tokens) - begin
