"""Microbatches: segments that go through the model in one forward. In numpy."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One packed token sequence that goes through the model in one forward."""

    index: int
    parent: int
    """The microbatch that must be open while this one runs, -1 for none."""
    segments: tuple[int, ...]
    """Segments of the plan's forest, in the order in which they lie in the microbatch."""
    segment_begin: tuple[int, ...]
    """Where each segment starts in the microbatch."""
    cache_begin: tuple[int, ...]
    """First slot of each segment in the prefix cache; -1 where no other microbatch reads it. A
    slot holds what all layers keep of one token."""
    children: tuple[int, ...]
    tokens: int
    """Edges of its segments: the tokens that a forward runs."""
    state_index: tuple[int, ...] = ()
    """Slot of each segment's final state; -1 where no segment of another microbatch starts from
    it. States have slots of their own."""
    activations: str = "keep"
    """Where its activations are while its children run: keep, offload or recompute."""
    checkpointing: str = "none"
    """Which activations its own backward computes again: none, selective or full."""
    keeps_logits: bool = False
    """Whether its head keeps all logits for the backward instead of computing them again."""
    num_loss_entries: int = 0
    """Entries that its head computes: edges whose label some rollout trains on, each as often as
    there are temperatures at which it is trained."""
    shared_prompt: Literal["", "sent", "received"] = ""
    """Whether it holds prompts, which several ranks read: sent to the others, or received from
    them, so that it does not run here."""
    parts: tuple[Self, ...] = ()
    """By rank of context parallelism the segments that it runs whole, as a microbatch of their own;
    they follow one another. Empty where each of these ranks runs a part of every segment."""
    gathered: bool = False
    """Whether these ranks, which have its prefix cache by heads, gather it for parts of other
    microbatches."""

    @property
    def lengths(self) -> IntArray:
        """int64 [S]: tokens of each segment."""
        return np.diff([*self.segment_begin, self.tokens])

    @property
    def captured_tokens(self) -> int:
        """Tokens whose prefix cache other microbatches read."""
        return int(self.lengths[np.asarray(self.cache_begin) >= 0].sum())

    @property
    def keeps_boundary(self) -> bool:
        """Whether other microbatches read the prefix cache of any of its segments."""
        return any(begin >= 0 for begin in self.cache_begin)

    @property
    def kept_states(self) -> frozenset[int]:
        """Segments that a segment of another microbatch starts from."""
        places = zip(self.segments, self.state_index, strict=True)
        return frozenset(segment for segment, place in places if place >= 0)


def token_steps(forest: Forest, microbatch: Microbatch) -> tuple[IntArray, IntArray]:
    """For each token of a microbatch, its segment and its step in the segment: int64 [T] each."""
    segments = np.asarray(microbatch.segments)
    lengths = forest.length[segments]
    begin = np.repeat(np.asarray(microbatch.segment_begin), lengths)
    return np.repeat(segments, lengths), np.arange(microbatch.tokens) - begin
