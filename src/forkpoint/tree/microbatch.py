"""Microbatches, and the places of their segments. In numpy."""

from dataclasses import dataclass
from typing import Literal

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
    width: int
    """Places of each segment in a padded microbatch (batch x longest); 0 where the microbatch is
    packed."""
    cache_begin: tuple[int, ...]
    """First slot of each segment in the prefix cache; -1 where no other microbatch reads it. A
    slot holds what all layers keep of one token."""
    children: tuple[int, ...]
    padded_tokens: int
    """Tokens that the forward runs, padding included."""
    tokens: int
    """Edges that the microbatch holds."""
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
    padding: int = 0
    """Places after the last segment of a packed microbatch, so that its length is a multiple of
    what the host takes. They are a sequence of their own, which nothing else reads."""
    shared_prompt: Literal["", "sent", "received"] = ""
    """Whether it holds prompts, which several ranks read: sent to the others, or received from
    them, so that it does not run here."""

    @property
    def keeps_boundary(self) -> bool:
        return any(begin >= 0 for begin in self.cache_begin)

    @property
    def length(self) -> int:
        """The length of the sequences that the model is given: [1, length], or [B, length]."""
        return self.width or self.padded_tokens

    @property
    def kept_states(self) -> frozenset[int]:
        """Segments that a segment of another microbatch starts from."""
        places = zip(self.segments, self.state_index, strict=True)
        return frozenset(segment for segment, place in places if place >= 0)


def token_steps(forest: Forest, microbatch: Microbatch) -> tuple[IntArray, IntArray]:
    """For each place of a microbatch, its segment and its step in the segment: int64 [places] each.

    Steps from the segment's length on are padding. That at the end of a packed microbatch counts as
    the last segment's.
    """
    segments = np.asarray(microbatch.segments)
    places = np.asarray(segment_widths(forest, microbatch))
    places[-1] += microbatch.padding
    step = np.arange(microbatch.padded_tokens) - np.repeat(
        np.asarray(microbatch.segment_begin), places
    )
    return np.repeat(segments, places), step


def segment_widths(forest: Forest, microbatch: Microbatch) -> list[int]:
    """How many places each segment of the microbatch takes: its length, or the width of a padded
    microbatch. Padding at the end of a packed one is none of them."""
    return [microbatch.width or int(forest.length[s]) for s in microbatch.segments]
