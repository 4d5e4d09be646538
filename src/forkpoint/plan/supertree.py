"""The smallest ordered forest that holds two others, by dynamic programming in numpy.

A forest holds another one if deleting some of its nodes gives the other one. A deleted node's
children take its place below its parent, so order and ancestry of the remaining nodes are kept.

The smallest forest that holds two forests is their optimal *alignment* as defined by Jiang, Wang
and Zhang, "Alignment of trees - an alternative to tree edit", Theoretical Computer Science 143
(1995), 137-148: blank nodes are inserted into both until they have the same form, then one is laid
over the other. The recurrence here is theirs. Only the states are numbered differently, so that one
step is a few numpy operations on all places of one forest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forkpoint.plan.ordered_forest import CLOSE, EMPTY, Forests, Shape

Ints = NDArray[np.integer]


class Places:
    """Index tables of the forest that others are laid over. They depend on its form alone.

    A *run* (s, e) is a node s and some of its next siblings with all that is below them, up to the
    node e - 1. The runs of one node come first, in order of nodes; then, for each node, those of
    two and more.

    A *region* (x, y) holds the nodes x to y - 1. y is the end of some node. Take the outermost node
    that ends there, and the first of its siblings: x is this sibling, or any node after it up to
    y - 1, or y itself, which makes the region empty. So a region is what lies behind some point of
    a list of siblings, up to the end of one of them. Tables have entries for the empty regions, for
    those that are a run, and for what is left of a region behind a run. Regions with the same y are
    neighbours, in order of falling x.
    """

    def __init__(self, shape: Shape) -> None:
        """Count what the tables will hold, in O(m).

        Args:
            shape: a forest of m >= 1 nodes.
        """
        count = len(shape)
        self.shape: Shape = shape
        later, earlier = [0] * count, [0] * count  # siblings after and before each node
        for node in range(count - 1, -1, -1):
            if shape.sibling[node] >= 0:
                later[node] = later[shape.sibling[node]] + 1
        for node in range(count):
            if shape.sibling[node] >= 0:
                earlier[shape.sibling[node]] = earlier[node] + 1
        self._parents: Ints = np.array(shape.parents)
        self._end: Ints = np.array(shape.end)
        self._later: Ints = np.array(later)
        self._earlier: Ints = np.array(earlier)
        # The outermost node that ends at y is not the last child of its parent, or the last root.
        tops = np.flatnonzero((self._later > 0) | (self._parents < 0))
        self._tops: Ints = tops[np.argsort(self._end[tops])]
        tops, ends = self._tops, self._end[self._tops]
        # A region (x, y) may begin with any run from x that ends by y. With y the end of a sibling
        # of x these are the runs up to that sibling, else all. An empty region gets one run.
        beside = self._earlier[tops] + 1
        before = np.concatenate([[0], np.cumsum(self._later + 1)])
        of_siblings = beside * (beside + self._later[tops]) - beside * (beside - 1) // 2
        within = before[ends] - before[self._parents[tops] + 1]
        runs = within - of_siblings + beside * (beside + 1) // 2 + 1
        self.choices: int = int(runs.sum())
        """Pairs of a region and a run that it may begin with: the size of the tables."""
        self._built: bool = False

    def build(self) -> None:
        """Build the tables unless they are, in time and memory linear in `choices`."""
        if self._built:
            return
        self._built = True
        count, end, later, tops = len(self.shape), self._end, self._later, self._tops
        node, parents, ends = np.arange(count), self._parents, self._end[self._tops]
        # All regions, to begin with: (x, y) is the number first_region[y] + y - x of them.
        sizes = ends - parents[tops]
        first_region = np.full(count + 1, -1)
        first_region[ends] = np.cumsum(sizes) - sizes
        self.columns: int = len(ends)
        """How many different y there are."""
        column = np.repeat(np.arange(len(ends)), sizes)
        y, top = ends[column], tops[column]
        x = y - np.arange(len(column)) + np.repeat(first_region[ends], sizes)
        at = np.minimum(x, count - 1)
        beside = parents[at] == parents[top]
        # Regions to keep. What follows a run begins at the end of a node: after a leaf.
        leaf = np.append(end == node + 1, True)
        keep = beside | leaf[x - 1] | (x == y) | (end[x - 1] == y)
        kept = np.cumsum(keep) - 1
        self.column: Ints = column[keep]
        """By region: the number of its y."""
        self.x: list[int] = x[keep].tolist()
        """By region: its first node."""
        self.first_region: list[int] = first_region.tolist()
        self.kept: list[int] = kept.tolist()
        """By first_region[y] + y - x: the number of the region (x, y)."""

        starts = np.repeat(node, later)
        by_parent = np.argsort(parents, kind="stable")
        place = np.empty(count, np.int64)
        place[by_parent] = node
        first_run = count + np.cumsum(later) - later
        nth = count + np.arange(len(starts)) - np.repeat(first_run, later)
        run_start = np.concatenate([node, starts])
        run_last = np.concatenate([node, by_parent[place[starts] + 1 + nth]])
        run_end = end[run_last]
        region_of_run = kept[first_region[run_end] + run_end - run_start]
        region_below = kept[first_region[end] + end - node - 1]
        self.region_of_value: Ints = np.concatenate([region_of_run, region_below, [0]])
        """The regions of all runs, those of all that is below each node, and an empty one."""

        # A kept region takes over the choices of those before it that are not kept.
        runs = np.where(beside, self._earlier[top] - self._earlier[at], later[at]) + 1
        runs[x == y] = 1
        first_choice = np.cumsum(runs) - runs
        self.first_choice: Ints = first_choice[np.append(0, np.flatnonzero(keep)[:-1] + 1)]
        """By region: its first choice, a run that it may begin with. Its others follow."""
        nth = np.arange(self.choices) - np.repeat(first_choice, runs)
        x, y, at = np.repeat(x, runs), np.repeat(y, runs), np.repeat(at, runs)
        run = np.where(nth == 0, at, first_run[at] + nth - 1)
        run[x == y] = len(self.region_of_value) - 1
        self.value_of_choice: Ints = run
        """By choice: the run, or the last of `region_of_value` for an empty region."""
        after = np.where(x == y, y, run_end[np.where(x == y, 0, run)])
        self.region_after_choice: Ints = kept[first_region[y] + y - after]


@dataclass
class Laid:
    """How one forest lies over another."""

    place: list[int]
    """By node of the one: the node of the other that it lies over, -1 where it needs a new one."""
    gaps: dict[int, list[int]] = field(default_factory=dict)
    """New nodes: what opens and closes before each place of the other's sequence."""


class Base:
    """A forest that others are laid over."""

    def __init__(self, places: Places, worth: Mapping[int, Ints], most: int) -> None:
        """Prepare for forests whose nodes are of certain kinds.

        Args:
            places: tables of this forest, m nodes.
            worth: by kind: [m], what it is worth to lay such a node over each of the nodes, >= 1.
            most: no forest that will be laid over this one can be worth so much.
        """
        places.build()
        self.places: Places = places
        # Tables hold values plus a multiple of `most` that grows with y: so one running maximum
        # over all regions restarts at each y.
        dtype = np.int32 if (places.columns + 1) * most < 2**31 else np.int64
        self.worth: dict[int, Ints] = {kind: own.astype(dtype) for kind, own in worth.items()}
        self.column: Ints = (places.column * most).astype(dtype)
        self.tables: dict[int, Ints] = {EMPTY: self.column}
        self._without = -self.column[places.region_of_value]
        self._added: dict[int, Ints] = {}
        self._leaf: dict[int, Ints] = {}

    def lay(self, shape: Shape, numbers: list[int], forests: Forests) -> Laid:
        """Lay a forest over this one for the greatest total worth.

        Takes O(f c) for f different forests among `numbers` and c `choices` of this forest, at most
        n and m h d^2 for forests of n and m nodes, the latter h deep with at most d children a
        node. Tables of forests that were met before are kept.

        Args:
            shape: the forest, n nodes.
            numbers: what `forests.of` gave for it.
            forests: where these numbers are from.
        """
        if not len(shape):
            return Laid([])
        for forest in dict.fromkeys(reversed(numbers)):
            if forest not in self.tables:
                self.tables[forest] = self._table(*forests.parts[forest])
        return self._trace(shape, numbers, forests)

    def _table(self, below: int, rest: int, kind: int) -> Ints:
        """By region: the greatest worth of a forest within it, plus the multiple of the column.

        Its first root, u, becomes a new node, and so does all below it. Or u lies over a node s,
        and what is below u within what is below s. Or u becomes a new node around a run from s, and
        what is below u lies within this run. In the last two cases the other trees lie in what
        follows in the region.
        """
        places, q_rest = self.places, self.tables[rest]
        choice = q_rest.take(places.region_after_choice)
        choice += self._of_leaf(kind) if below == EMPTY else self._of_runs(below, kind)
        best = np.maximum.reduceat(choice, places.first_choice)
        np.maximum(best, q_rest, out=best)
        return np.maximum.accumulate(best, out=best)

    def _of_runs(self, below: int, kind: int) -> Ints:
        """By choice: the worth of a tree in the run, given what is below its root."""
        places, count = self.places, len(self.places.shape)
        if kind not in self._added:
            self._added[kind] = self._without.copy()
            self._added[kind][-count - 1 : -1] += self.worth[kind]
        value = self.tables[below].take(places.region_of_value)
        value += self._added[kind]
        np.maximum(value[:count], value[-count - 1 : -1], out=value[:count])
        return value.take(places.value_of_choice)

    def _of_leaf(self, kind: int) -> Ints:
        """By choice: the worth of a single node in the run."""
        if kind not in self._leaf:
            value = np.zeros_like(self._without)
            value[: len(self.places.shape)] = self.worth[kind]
            self._leaf[kind] = value.take(self.places.value_of_choice)
        return self._leaf[kind]

    def _trace(self, shape: Shape, numbers: list[int], forests: Forests) -> Laid:
        """Read from the tables how the greatest worth comes about, in O(n (log m + d))."""
        base, tables, x_of = self.places.shape, self.tables, self.places.x
        first_region, kept = self.places.first_region, self.places.kept
        laid = Laid([-1] * len(shape))
        gap = laid.gaps.setdefault
        # An entry is a first root with its later siblings, the region (x, y) they lie in, and the
        # place of the base's sequence up to which all is done. Or CLOSE, and before which place.
        todo = [(0, 0, len(base), 0)]
        while todo:
            node, x, y, done = todo.pop()
            if node == CLOSE:
                gap(done, []).append(CLOSE)
                continue
            sibling, empty = shape.sibling[node], kept[first_region[y]]
            region = kept[first_region[y] + y - x]
            rest, table = tables[numbers[sibling]], tables[numbers[node]]
            best = table[region]
            if rest[region] == best:
                gap(done, []).extend(shape.sequence(node, shape.end[node]))
                if sibling >= 0:
                    todo.append((sibling, x, y, done))
                continue
            # Several regions of this y may give the best. The smallest is the first of them.
            region = empty + int(table[empty : region + 1].searchsorted(best))
            start, last, matched = self._first_run(
                forests.parts[numbers[node]], range(x_of[region], x_of[region - 1]), y, best
            )
            end = base.end[last]
            if sibling >= 0:
                todo.append((sibling, end, y, base.closed_at(last)))
            if matched:
                laid.place[node] = start
                if shape.end[node] > node + 1:
                    todo.append((node + 1, start + 1, end, base.opens_at(start) + 1))
            else:
                # The node has children: without, it would be worth no more than `rest`.
                gap(base.opens_at(start), []).append(node)
                todo.append((CLOSE, 0, 0, base.closed_at(last)))
                todo.append((node + 1, start, end, base.opens_at(start)))
        return laid

    def _first_run(
        self, parts: tuple[int, int, int], starts: range, y: int, best: np.integer
    ) -> tuple[int, int, bool]:
        """Find the run in which the first root lies where a forest has its greatest worth.

        Args:
            parts: the forest, as in `Forests.parts`.
            starts: nodes of which one begins the run.
            y: end of the region.
            best: worth of the forest in the region.

        Returns:
            The run's first and last node, and whether the first root lies over the first node,
            which is then the last as well. Else the first root is a new node around the run.
        """
        base, column = self.places.shape, self.column
        first_region, kept = self.places.first_region, self.places.kept
        below, rest, worth = self.tables[parts[0]], self.tables[parts[1]], self.worth[parts[2]]
        for start in reversed(starts):
            last = start
            while last >= 0 and (end := base.end[last]) <= y:
                inside = kept[first_region[end] + end - start]
                wanted = best - rest[kept[first_region[y] + y - end]] + column[inside]
                if (
                    last == start
                    and worth[start] == wanted - below[kept[first_region[end] + end - start - 1]]
                ):
                    return start, last, True
                if below[inside] == wanted:
                    return start, last, False
                last = base.sibling[last]
        raise AssertionError("no run gives the worth that the tables hold")


def grown(base: Shape, laid: Laid) -> tuple[Shape, Ints, Ints]:
    """The forest that holds a base and what is laid over it, in O(n + m).

    Returns:
        The forest; [m + 1] where the base's nodes are in it, and -1 at last, so that index -1 gives
        -1; and [n] where the nodes laid over the base are.
    """
    if not laid.gaps:
        same = np.append(np.arange(len(base)), -1)
        return base, same, same[laid.place]
    old, new = [-1] * (len(base) + 1), [-1] * len(laid.place)
    parents: list[int] = []
    opened = [-1]
    sequence = base.sequence(0, len(base))
    at = 0
    for gap in sorted({*laid.gaps, len(sequence)}):
        for tokens, names in ((sequence[at:gap], old), (laid.gaps.get(gap, ()), new)):
            for node in tokens:
                if node == CLOSE:
                    del opened[-1]
                else:
                    names[node] = count = len(parents)
                    parents.append(opened[-1])
                    opened.append(count)
        at = gap
    found = [old[place] if place >= 0 else own for place, own in zip(laid.place, new, strict=True)]
    return Shape(parents), np.array(old), np.array(found)
