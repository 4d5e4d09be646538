"""Ordered forests, in which the children of a node have an order, and numbers for equal ones."""

from dataclasses import dataclass, field

EMPTY = 0
"""The number of the forest without nodes."""
CLOSE = -1
"""A closing, among nodes that open."""


class Shape:
    """An ordered forest. Nodes are numbered in order of opening (preorder)."""

    def __init__(self, parents: list[int]) -> None:
        """Derive siblings, ends and depths in O(n).

        Args:
            parents: parent of each node, -1 for a root.
        """
        count = len(parents)
        end, sibling, depth = list(range(1, count + 1)), [-1] * count, [0] * count
        self.parents: list[int] = parents
        self.end: list[int] = end
        """One more than the last node below each node (the node itself where it has no child)."""
        self.sibling: list[int] = sibling
        """The next sibling of each node, -1 for none."""
        self.depth: list[int] = depth
        for node in range(count - 1, -1, -1):
            parent = parents[node]
            if parent >= 0 and end[parent] < end[node]:
                end[parent] = end[node]
        for node, parent in enumerate(parents):
            if parent >= 0:
                depth[node] = depth[parent] + 1
            after = end[node]
            if after < count and parents[after] == parent:
                sibling[node] = after

    def __len__(self) -> int:
        return len(self.parents)

    def opens_at(self, node: int) -> int:
        """The place of a node's opening in the sequence of all openings and closings."""
        return 2 * node - self.depth[node]

    def closed_at(self, node: int) -> int:
        """The place that follows a node's closing in the sequence of openings and closings."""
        return 2 * self.end[node] - self.depth[node]

    def sequence(self, begin: int, end: int) -> list[int]:
        """Openings (a node) and closings (CLOSE) of nodes [begin, end), which are whole trees."""
        found: list[int] = []
        opened: list[int] = []
        for node in range(begin, end):
            while opened and self.end[opened[-1]] <= node:
                opened.pop()
                found.append(CLOSE)
            opened.append(node)
            found.append(node)
        found.extend([CLOSE] * len(opened))
        return found

    def cut(self, begin: int, end: int) -> "Shape":
        """The forest of the nodes [begin, end), which are whole trees of siblings."""
        return Shape([p - begin if p >= begin else -1 for p in self.parents[begin:end]])


@dataclass
class Forests:
    """Numbers of forests, the same for equal forests. EMPTY is the forest without nodes."""

    number: dict[tuple[int, int, int], int] = field(default_factory=dict)
    parts: list[tuple[int, int, int]] = field(default_factory=lambda: [(EMPTY, EMPTY, 0)])
    """By number: the children of the first root, the other trees, and the first root's kind."""

    def of(self, shape: Shape, kinds: list[int]) -> list[int]:
        """The number of the forest of each node and its later siblings, in O(n).

        Args:
            shape: the forest that the nodes belong to.
            kinds: kind of each node; forests are equal only if the kinds of their nodes are.

        Returns:
            [n + 1]; the last entry is EMPTY, so that index -1 (no sibling) gives it.
        """
        found = [EMPTY] * (len(shape) + 1)
        end, sibling, number, parts = shape.end, shape.sibling, self.number, self.parts
        for node in range(len(shape) - 1, -1, -1):
            below = found[node + 1] if end[node] > node + 1 else EMPTY
            key = (below, found[sibling[node]], kinds[node])
            forest = number.get(key)
            if forest is None:
                forest = number[key] = len(parts)
                parts.append(key)
            found[node] = forest
        return found
