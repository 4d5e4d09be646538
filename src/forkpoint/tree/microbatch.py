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
    cache_begin: tuple[int, ...]
    """First cache slot of each segment; -1 if no other microbatch reads it. A slot holds the data
    of one token in all layers."""
    children: tuple[int, ...]
    tokens: int
    """Number of edges of its segments: the tokens that a forward runs."""
    state_index: tuple[int, ...] = ()
    """Slot of each segment's final state; -1 if no segment of another microbatch starts from it.
    States have separate slots."""
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

    @property
    def lengths(self) -> IntArray:
        """int64 [S]: number of tokens of each segment."""
        return np.diff([*self.segment_begin, self.tokens])

    @property
    def captured_tokens(self) -> int:
        """Number of tokens whose prefix cache other microbatches read."""
        return int(self.lengths[np.asarray(self.cache_begin) >= 0].sum())

    @property
    def keeps_boundary(self) -> bool:
        """Whether other microbatches read the prefix cache of any of its segments."""
        return any(begin >= 0 for begin in self.cache_begin)

    @property
    def kept_states(self) -> frozenset[int]:
        """Segments from whose final state a segment of another microbatch starts."""
        places = zip(self.segments, self.state_index, strict=True)
        return frozenset(segment for segment, place in places if place >= 0)


def token_steps(forest: Forest, microbatch: Microbatch) -> tuple[IntArray, IntArray]:
    """Segment of each token of a microbatch, and its position in the segment: int64 [T] each."""
    segments = np.asarray(microbatch.segments)
    lengths = forest.length[segments]
    begin = np.repeat(np.asarray(microbatch.segment_begin), lengths)
    return np.repeat(segments, lengths), np.arange(microbatch.tokens) - begin
