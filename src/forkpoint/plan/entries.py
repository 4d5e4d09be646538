"""Entries of the head: one for each trained edge and each temperature at which it is trained."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray

FEW_LABELS = 128
"""Labels up to which those of all rollouts are read at once, which takes 8 bytes for each of them.
More are read rollout by rollout."""


@dataclass(frozen=True, eq=False)
class Entries:
    """The head's entries of one forest. Entries of one edge have consecutive numbers.

    Hidden states do not depend on a rollout's temperature, but log-probs of labels do. So rollouts
    with different temperatures share an edge, and rollouts with equal temperatures also share its
    entry.
    """

    numbers: int
    """Upper bound of the numbers of entries. If no edge has two entries, an entry has the number of
    its edge."""
    trained: IntArray
    """[n] positions, in the batch's flat tokens, of the trained tokens that run."""
    of_trained: IntArray
    """[n] the entry of each of these tokens."""
    count: NDArray[np.bool_] | IntArray
    """[E] number of entries of each edge."""
    first: IntArray | None
    """[E] first entry of each edge; None if no edge has two."""

    def at(self, edges: IntArray) -> tuple[IntArray, IntArray]:
        """Places with entries, and their entries: int64 [m] each, sorted by place, then by
        temperature.

        edges: int64 [T], the edge of each place.
        """
        counts = self.count[edges]
        places = np.flatnonzero(counts)
        if self.first is None:
            return places, edges[places]
        counts = counts[places]
        before = np.cumsum(counts) - counts
        entry = np.arange(counts.sum()) + np.repeat(self.first[edges[places]] - before, counts)
        return np.repeat(places, counts), entry


def entries_of(
    edges: int, token_edge: IntArray, batch: RolloutBatch, *, uses_temperature: bool = True
) -> Entries:
    """Number the entries of a forest with E edges.

    Args:
        edges: E.
        token_edge: [T] the result of `Forest.token_edges`.
        uses_temperature: whether the head's outputs depend on temperatures, as log-probs do.
    """
    trained = np.flatnonzero(batch.loss_mask & (token_edge >= 0))
    trained_edge = token_edge[trained]
    temperatures, classes = np.unique(batch.temperatures, return_inverse=True)
    if uses_temperature and len(temperatures) > 1:
        rollout = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))[trained]
        pairs, of_trained = np.unique(
            trained_edge * len(temperatures) + classes[rollout], return_inverse=True
        )
        count = np.bincount(pairs // len(temperatures), minlength=edges)
        if count.max(initial=0) > 1:
            return Entries(len(pairs), trained, of_trained, count, np.cumsum(count) - count)
    has_entry = np.zeros(edges, bool)
    has_entry[trained_edge] = True
    return Entries(edges, trained, trained_edge, has_entry, None)


def segment_entries(
    forest: Forest, batch: RolloutBatch, *, uses_temperature: bool = True
) -> IntArray:
    """int64 [S]: number of entries that the head computes for each segment's edges.

    As many as `entries_of` has. Plans of several forests need only the counts, which are taken from
    the masks here: arrays of all tokens and edges would take most of the time of a large plan.
    """
    mask, order = batch.loss_mask, forest.order
    of_rollout = np.unique(batch.temperatures, return_inverse=True)[1]
    several = uses_temperature and bool(of_rollout.any())
    firsts, ends = batch.offsets[:-1][order], batch.offsets[1:].tolist()
    columns = (forest.start, forest.length, forest.owner_begin, forest.owner_end)
    found: list[int] = []
    for start, length, first, last in zip(*(x.tolist() for x in columns), strict=True):
        # The first label. The edge of a last token has none.
        label = int(firsts[first]) + 1 + start
        length = min(length, ends[order[first]] - label)
        if last - first == 1:
            found.append(int(np.count_nonzero(mask[label : label + length])))
            continue
        begins = firsts[first:last] + (1 + start)
        temperatures = of_rollout[order[first:last]]
        groups = [begins]
        if several:
            groups = [begins[temperatures == each] for each in np.unique(temperatures)]
        found.append(sum(_count_trained(mask, each, length) for each in groups))
    return np.asarray(found, np.int64)


def _count_trained(mask_T: NDArray[np.bool_], begins: IntArray, length: int) -> int:
    """Number of labels, of `length`, that at least one rollout trains. `begins`: first label of
    each rollout."""
    if length <= FEW_LABELS:
        return int(np.count_nonzero(mask_T[begins[:, None] + np.arange(length)].any(0)))
    any_trained = np.zeros(length, bool)
    for begin in begins.tolist():
        any_trained |= mask_T[begin : begin + length]
    return int(np.count_nonzero(any_trained))
