"""Demands of a router's statistics on a plan: which tokens run, and whether counts come first.

A statistic of a mixture's routers is taken over whole rollouts, so tokens run for it that no loss
of log-probs needs: the last one of each rollout. A load-balancing loss is a product of two means
over the same tokens. Where these lie in several microbatches, one mean has to be known before the
first backward, which takes a pass of scores.
"""

from dataclasses import dataclass

import numpy as np

from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class RouterDemand:
    """Tokens that a plan's routers must see, and those whose counts are one statistic."""

    last_tokens: bool
    """Whether rollouts' last tokens run."""
    parts: IntArray | None = None
    """int64 [N], the statistic that each rollout is part of, where its counts are needed before the
    first backward that they enter; None where none are, or where they are given."""
    over_ranks: bool = False
    """Whether these statistics have tokens of other ranks as well."""

    def spans(self, forest: Forest, microbatches: tuple[Microbatch, ...]) -> bool:
        """Whether the tokens of some statistic lie in several microbatches."""
        if self.parts is None:
            return False
        if self.over_ranks:
            return len(microbatches) > 0
        rollouts, segments = paths(forest)
        return span_microbatches(self.parts[rollouts], segments, forest, microbatches)


def span_microbatches(
    classes: IntArray, segments: IntArray, forest: Forest, microbatches: tuple[Microbatch, ...]
) -> bool:
    """Whether segments of one class lie in several microbatches.

    Args:
        classes: int64 [n].
        segments: int64 [n], the segment that each is paired with.
    """
    microbatch_of = np.zeros(len(forest), np.int64)
    for microbatch in microbatches:
        microbatch_of[list(microbatch.segments)] = microbatch.index
    count = max(1, len(microbatches))
    pairs = np.unique(classes * count + microbatch_of[segments])
    return len(np.unique(pairs // count)) < len(pairs)


def paths(forest: Forest) -> tuple[IntArray, IntArray]:
    """Each rollout with each segment on its path: int64 [n] and [n]."""
    levels = list(forest.levels())
    nothing = np.zeros(0, np.int64)
    rollouts, segments = zip(*levels, strict=True) if levels else ((nothing,), (nothing,))
    return np.concatenate(rollouts), np.concatenate(segments)
