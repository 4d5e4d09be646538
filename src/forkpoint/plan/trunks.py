"""Trunks: the first tokens of rollouts that lie on several ranks, computed on one of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True)
class Trunk:
    """The first edges of some rollouts of this rank, which rollouts of other ranks have as well.

    No token among them is trained. The rank that owns a trunk runs it, and sends its prefix cache
    to the others, whose gradients come back.
    """

    number: int
    """Of all trunks of the step, the same on all ranks."""
    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""
    received: bool
    """Whether another rank owns it."""

    def segments(self, forest: Forest) -> list[int]:
        """Its segments in a forest that is cut where it ends, from the root down."""
        path = forest.path(int(forest.leaf[self.rollouts[0]]))
        return [segment for segment in path if forest.start[segment] < self.edges]


def cut_below(forest: Forest, trunks: tuple[Trunk, ...]) -> Forest:
    """The forest with its trees cut where trunks end.

    The rollouts of a trunk share no token with others, so its first segment is a root.
    """
    return forest.split({t.segments(forest)[-1]: t.edges for t in trunks})


def classes_of(trunks: tuple[Trunk, ...], classes: IntArray) -> IntArray:
    """int64 [N] which rollouts may share: those of a trunk with each other alone.

    classes: int64 [N], none negative, which may otherwise share.
    """
    found = classes.copy()
    for trunk in trunks:
        found[list(trunk.rollouts)] = -1 - trunk.number
    return found


def untrained_prefix(
    token_ids: NDArray[np.integer], offsets: IntArray, mask: NDArray[np.bool_], rollouts: IntArray
) -> int:
    """How many first tokens all of these rollouts share before any of them trains on one.

    Args:
        token_ids: [T], those of the batch back to back.
        offsets: [N + 1].
        mask: [T], what is trained.
        rollouts: positions in the batch, at least one.
    """
    first = int(rollouts[0])
    own = token_ids[offsets[first] : offsets[first + 1]]
    shared = len(own)
    for rollout in rollouts.tolist():
        begin, end = int(offsets[rollout]), int(offsets[rollout + 1])
        shared = min(shared, end - begin)
        for differs in (
            mask[begin : begin + shared],
            token_ids[begin : begin + shared] != own[:shared],
        ):
            if differs[:shared].any():
                shared = min(shared, int(differs[:shared].argmax()))
    return shared
