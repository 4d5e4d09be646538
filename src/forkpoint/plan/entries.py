"""Entries of the head: one for each trained edge and each temperature at which it is trained."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class Entries:
    """The head's entries of one forest, numbered so that those of one edge are neighbours.

    Hidden states do not depend on a rollout's temperature and the log-prob of a label does. So
    rollouts share an edge whatever their temperatures, and those of one temperature its entry.
    """

    numbers: int
    """Numbers are below this. Where no edge has two entries, an entry has its edge's number."""
    trained: IntArray
    """[n] positions of trained tokens in the batch's flat tokens, but of those that do not run."""
    of_trained: IntArray
    """[n] the entry that each of them reads."""
    count: NDArray[np.bool_] | IntArray
    """[E] how many entries each edge has."""
    first: IntArray | None
    """[E] the number of each edge's first entry; None where no edge has two."""

    def at(self, edges: IntArray) -> tuple[IntArray, IntArray]:
        """Places with entries, and the entries: int64 [m] each, by place, then by temperature.

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
    """The entries of a forest of so many edges.

    Args:
        edges: E.
        token_edge: [T] what `Forest.token_edges` gave.
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
    """int64 [S]: entries that the head computes for each segment's edges."""
    edges = forest.token_edges(batch.offsets)
    found = entries_of(forest.edges, edges, batch, uses_temperature=uses_temperature)
    before = np.concatenate([[0], np.cumsum(found.count, dtype=np.int64)])
    begin = forest.edge_offsets
    return before[begin[1:]] - before[begin[:-1]]
