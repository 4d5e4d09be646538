"""Pieces of single ranks, made anew for each set of items that is tried.

Items of one rank that share a segment lie in one subtree, which may go into one microbatch whole.
"""

import numpy as np

from forkpoint.parallel.placement.items import Items, Priced, spans
from forkpoint.parallel.placement.packed import Pieces, largest_subtrees
from forkpoint.tree.forest import IntArray


class RankPieces:
    """The largest subtrees that fit in a microbatch, of any sets of items."""

    def __init__(self, priced: Priced, items: Items, capacity: int) -> None:
        self.priced: Priced = priced
        self.items: Items = items
        self.capacity: int = capacity
        parent, private = priced.forest.parent, items.owner >= 0
        large = private & (priced.subtree_tokens > capacity)
        fits = private & ~large
        # Nodes of items: what fits is one with all below it.
        node = np.flatnonzero(large | (fits & ~((parent >= 0) & fits[parent])))
        self.node: IntArray = node[np.argsort(items.owner[node], kind="stable")]
        self.begin: IntArray = np.searchsorted(items.owner[self.node], np.arange(len(items) + 1))
        sizes = np.where(large, priced.forest.length, priced.subtree_tokens)
        self.tokens: IntArray = sizes[self.node]
        costs = np.where(large, priced.cost, priced.subtree_cost)
        self.cost: IntArray = costs[self.node]

    def of(self, row: IntArray, item: IntArray) -> Pieces:
        """The pieces of each row (a rank), whose items those of `item` are that have its number.

        Args:
            row: [n] numbers of rows.
            item: [n] an item of each.
        """
        nodes, at = spans(self.begin, item)
        shares, shared = spans(self.items.begin, item)
        shared = self.items.shared[shared]
        segment = self.items.shared_segment[shared]
        return largest_subtrees(
            self.priced,
            np.concatenate([np.repeat(row, nodes), np.repeat(row, shares)]),
            np.concatenate([self.node[at], segment]),
            (
                np.concatenate([self.tokens[at], self.priced.forest.length[segment]]),
                np.concatenate([self.cost[at], self.items.shared_cost[shared]]),
            ),
            self.capacity,
        )
