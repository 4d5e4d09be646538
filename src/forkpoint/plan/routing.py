"""Demands of router statistics on a plan: tokens that must run, and whether a pass must count
experts first.

A router statistic covers whole rollouts, with the last token of each, which a loss of log-probs
does not need. A load-balancing loss is a product of two means over the same tokens. If these are in
several microbatches, one mean must be known before the first backward, which takes a pass of
scores.
"""

from dataclasses import dataclass

import numpy as np

from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class RouterDemand:
    """Tokens that a plan must run for router statistics, and the statistic of each rollout."""

    last_tokens: bool
    """Whether last tokens of rollouts run."""
    parts: IntArray | None = None
    """int64 [N], the statistic of each rollout, if its counts are needed before the first backward
    that uses them; None if they are not, or if the caller passes counts."""
    over_ranks: bool = False
    """Whether these statistics also contain tokens of other ranks."""

    def spans(self, forest: Forest, microbatches: tuple[Microbatch, ...]) -> bool:
        """Whether the tokens of a statistic are in several microbatches."""
        if self.parts is None:
            return False
        if self.over_ranks:
            return len(microbatches) > 0
        rollouts, segments = paths(forest)
        return span_microbatches(self.parts[rollouts], segments, forest, microbatches)


def span_microbatches(
    classes: IntArray, segments: IntArray, forest: Forest, microbatches: tuple[Microbatch, ...]
) -> bool:
    """Whether segments of one class are in several microbatches.

    Args:
        classes: int64 [n].
        segments: int64 [n], the segment of each entry of `classes`.
    """
    microbatch_of = np.zeros(len(forest), np.int64)
    for microbatch in microbatches:
        microbatch_of[list(microbatch.segments)] = microbatch.index
    count = max(1, len(microbatches))
    pairs = np.unique(classes * count + microbatch_of[segments])
    return len(np.unique(pairs // count)) < len(pairs)


def paths(forest: Forest) -> tuple[IntArray, IntArray]:
    """Pairs of a rollout and a segment on its path: int64 [n] and [n]."""
    levels = list(forest.levels())
    nothing = np.zeros(0, np.int64)
    rollouts, segments = zip(*levels, strict=True) if levels else ((nothing,), (nothing,))
    return np.concatenate(rollouts), np.concatenate(segments)
