"""Two ordered forests too large to be merged exactly, merged part by part."""

from collections.abc import Mapping

from forkpoint.plan.ordered_forest import CLOSE, Forests, Shape
from forkpoint.plan.supertree import Base, Ints, Laid, Places


class Parts:
    """Lays a large forest over another one. The result is valid, not always the smallest."""

    def __init__(
        self, base: Shape, shape: Shape, kinds: list[int], worth: Mapping[int, Ints], most: int
    ) -> None:
        """Number the trees of both forests, in O(n + m).

        Args:
            base: the forest that the other one is laid over, m >= 1 nodes.
            shape: the forest to lay over it, n nodes.
            kinds: kind of each node of `shape`.
            worth: by kind: [m], what it is worth to lay such a node over each of `base`, >= 1.
            most: no part of `shape` can be worth so much.
        """
        self._base, self._shape, self._kinds = base, shape, kinds
        self._worth, self._most = worth, most
        forests = Forests()
        # Trees are equal where what is below their roots is.
        self._base_numbers = forests.of(base, [0] * len(base))
        self._numbers = forests.of(shape, [0] * len(shape))
        self._laid = Laid([-1] * len(shape))
        self.entries: int = 0
        """Entries of all tables that were built."""

    def lay(self, limit: int) -> Laid:
        """Lay the forest over its base.

        Equal trees at either end of the two lists of trees lie over each other, which loses no
        slot. What is left is merged exactly if its tables have at most `limit` entries in all.
        Else both lists are cut in two, near half of their nodes, or two single trees at their
        roots. Takes O((n + m) log (n + m)) besides the exact merges.
        """
        base, shape = self._base, self._shape
        # Nodes [a, b) of the forest go to nodes [s, e) of the base, from a place of its sequence
        # on. Two single trees of more than `untried` nodes are not merged exactly: on the way down
        # two long chains they would be found too large again and again.
        todo = [(0, len(shape), 0, len(base), 0, len(shape) + len(base))]
        while todo:
            a, b, s, e, done, untried = todo.pop()
            while a < b and s < e and self._equal(a, s):
                done = base.closed_at(s)
                a, s = self._over(a, s)
            b, e = self._without_equal_ends(a, b, s, e)
            if a == b:
                continue
            if s == e:
                self._new(a, b, done)
                continue
            size = b - a + e - s
            one, other = shape.end[a] == b, base.end[s] == e
            if size <= untried or not (one and other):
                if self._exact(a, b, s, e, limit):
                    continue
                untried = size * 3 // 4
            if one and other:
                self._laid.place[a] = s
                todo.append((a + 1, b, s + 1, e, base.opens_at(s) + 1, untried))
            elif one:
                largest = max(roots(base, s, e), key=lambda node: base.end[node] - node)
                todo.append((a, b, largest, base.end[largest], base.opens_at(largest), untried))
            elif other:
                largest = max(roots(shape, a, b), key=lambda node: shape.end[node] - node)
                end = shape.end[largest]
                self._new(a, largest, done)
                todo.append((end, b, e, e, base.closed_at(s), untried))
                todo.append((largest, end, s, e, done, untried))
            else:
                middle, base_middle = half(shape, a, b), half(base, s, e)
                todo.append((middle, b, base_middle, e, base.opens_at(base_middle), untried))
                todo.append((a, middle, s, base_middle, done, untried))
        return self._laid

    def _equal(self, node: int, base_node: int) -> bool:
        below, base_below = node + 1, base_node + 1
        below = below if self._shape.end[node] > below else -1
        base_below = base_below if self._base.end[base_node] > base_below else -1
        return self._numbers[below] == self._base_numbers[base_below]

    def _over(self, node: int, base_node: int) -> tuple[int, int]:
        """Lay a tree over an equal one. Returns where both end."""
        end, base_end = self._shape.end[node], self._base.end[base_node]
        self._laid.place[node:end] = range(base_node, base_end)
        return end, base_end

    def _without_equal_ends(self, a: int, b: int, s: int, e: int) -> tuple[int, int]:
        trees, base_trees = roots(self._shape, a, b), roots(self._base, s, e)
        while trees and base_trees and self._equal(trees[-1], base_trees[-1]):
            b, e = trees.pop(), base_trees.pop()
            self._over(b, e)
        return b, e

    def _new(self, a: int, b: int, at: int) -> None:
        if a < b:
            self._laid.gaps.setdefault(at, []).extend(self._shape.sequence(a, b))

    def _exact(self, a: int, b: int, s: int, e: int, limit: int) -> bool:
        places = Places(self._base.cut(s, e))
        if places.choices > limit:
            return False
        shape, forests = self._shape.cut(a, b), Forests()
        numbers = forests.of(shape, self._kinds[a:b])
        if places.choices * len(set(numbers)) > limit:
            return False
        self.entries += places.choices * len(set(numbers))
        worth = {kind: self._worth[kind][s:e] for kind in set(self._kinds[a:b])}
        laid = Base(places, worth, self._most).lay(shape, numbers, forests)
        for node, place in enumerate(laid.place):
            if place >= 0:
                self._laid.place[a + node] = s + place
        for at, tokens in laid.gaps.items():
            found = self._laid.gaps.setdefault(self._base.opens_at(s) + at, [])
            found.extend(token if token == CLOSE else a + token for token in tokens)
        return True


def roots(shape: Shape, begin: int, end: int) -> list[int]:
    """The roots of the trees that are the nodes [begin, end)."""
    found = []
    while begin < end:
        found.append(begin)
        begin = shape.end[begin]
    return found


def half(shape: Shape, begin: int, end: int) -> int:
    """The root, other than the first, before which there are about half of the nodes."""
    return min(roots(shape, begin, end)[1:], key=lambda root: abs(2 * root - begin - end))
