"""The forest of segments that a batch's rollouts share.

Nodes are edges: a token of a rollout with the token after it. Edge i of a rollout reads token i and
has token i + 1 as its label, so two rollouts share edge i when their first i + 2 tokens are the
same, and every fork lies one token before the tokens part. A segment is a maximal run of edges with
the same set of rollouts through it.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SortedRollouts:
    """Rollouts in the order of their tokens, with what neighbours share.

    In this order every set of rollouts that shares a segment is contiguous, so that the forest, and
    any forest in which fewer rollouts share, follows from `shared_edges` alone.
    """

    rollouts: IntArray
    """[M] positions in the batch; rollouts without an edge (of one token) are left out."""
    edges: IntArray
    """[M] how many edges each has: its tokens less one, or its tokens where last tokens run."""
    shared_edges: IntArray
    """[M] how many leading edges each shares with the one before it; entry 0 is 0."""

    def cut(self, where: NDArray[np.bool_]) -> "SortedRollouts":
        """The same order with nothing shared between entry i - 1 and entry i where `where[i]`."""
        return replace(self, shared_edges=np.where(where, 0, self.shared_edges))

    def take(self, entries: IntArray) -> "SortedRollouts":
        """The entries named, ascending. Neighbours then share what all between them shared."""
        shared = self.shared_edges[entries]
        shared[:1] = 0
        for at in np.flatnonzero(np.diff(entries) > 1).tolist():
            shared[at + 1] = self.shared_edges[entries[at] + 1 : entries[at + 1] + 1].min()
        return SortedRollouts(self.rollouts[entries], self.edges[entries], shared)

    @property
    def new_edges(self) -> IntArray:
        """[M] edges of each that the one before it does not have; their sum is the forest's."""
        return self.edges - self.shared_edges


def sort_rollouts(
    token_ids: NDArray[np.integer],
    offsets: NDArray[np.integer],
    classes: NDArray[np.integer],
    *,
    last_tokens: bool = False,
    routes: NDArray[np.integer] | None = None,
) -> SortedRollouts:
    """Sort a ragged batch by class, then by tokens, and measure what neighbours share.

    Args:
        token_ids: [T] token ids of all rollouts, back to back, none negative.
        offsets: [N + 1] where each rollout starts; the last entry is T.
        classes: [N] only rollouts of the same class may share.
        last_tokens: whether each rollout has one more edge, which reads its last token and has the
            rollout's end as its label. Only rollouts of equal tokens share that one.
        routes: [T] a number below 2^32 for what decides, besides the tokens, what a token computes
            (the experts that it is sent to); an edge is shared where those of its token and of all
            before it are equal.

    Runs in time and memory linear in tokens apart from the comparisons of the sort.
    """
    offsets = np.asarray(offsets, np.int64)
    lengths = np.diff(offsets)
    # Big-endian bytes compare as the tokens do, and comparing them is one memcmp.
    width = 4 if token_ids.size == 0 or int(token_ids.max()) < 2**32 else 8
    if routes is not None:
        # A token comes before its route: rollouts part at the first of either that differs.
        assert width == 4, "token ids with routes are below 2^32"
        token_ids, width = (
            (np.asarray(token_ids, np.uint64) << 32) | np.asarray(routes, np.uint64),
            8,
        )
    flat = np.ascontiguousarray(token_ids, dtype=f">u{width}")
    raw = flat.tobytes()
    starts = (offsets * width).tolist()
    keys = [raw[a:b] for a, b in itertools.pairwise(starts)]
    class_list = np.asarray(classes).tolist()
    left_out = 0 if last_tokens else 1
    order = sorted(
        np.flatnonzero(lengths > left_out).tolist(),
        key=lambda rollout: (class_list[rollout], keys[rollout]),
    )
    shared = np.zeros(len(order), np.int64)
    begin = offsets.tolist()
    for entry in range(1, len(order)):
        before, this = order[entry - 1], order[entry]
        if class_list[before] == class_list[this]:
            same = min(begin[before + 1] - begin[before], begin[this + 1] - begin[this])
            differ = (
                flat[begin[before] : begin[before] + same] != flat[begin[this] : begin[this] + same]
            )
            first = int(differ.argmax())
            tokens = first if differ[first] else same
            ends = last_tokens and tokens == lengths[before] == lengths[this]
            # The token itself is the label of the edge before it.
            labels = (
                routes is not None
                and tokens < same
                and _same_token(flat, begin[before] + tokens, begin[this] + tokens)
            )
            shared[entry] = tokens if ends or labels else max(tokens - 1, 0)
    rollouts = np.asarray(order, np.int64)
    return SortedRollouts(rollouts, lengths[rollouts] - left_out, shared)


def _same_token(flat: NDArray[np.uint64], one: int, other: int) -> bool:
    """Whether entries of tokens and routes have the same token."""
    return int(flat[one]) >> 32 == int(flat[other]) >> 32


@dataclass(frozen=True, eq=False)
class Forest:
    """Segments in depth-first order, parents before children, children in the rollouts' order."""

    order: IntArray
    """[M] rollouts in sorted order; a segment's owners are a slice of it."""
    parent: IntArray
    """[S] the segment above, -1 for a root."""
    start: IntArray
    """[S] position of the segment's first token on its path, the same for every owner."""
    length: IntArray
    """[S] edges of the segment, at least 1."""
    owner_begin: IntArray
    """[S] owners are `order[owner_begin : owner_end]`."""
    owner_end: IntArray
    """[S]"""
    leaf: IntArray
    """[N] the segment that holds each rollout's last edge, -1 for a rollout of one token."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def edges(self) -> int:
        """How many edges there are: what a plan over this forest computes."""
        return int(self.length.sum())

    @property
    def roots(self) -> int:
        return int((self.parent < 0).sum())

    @property
    def multiplicity(self) -> IntArray:
        """[S] how many rollouts go through each segment."""
        return self.owner_end - self.owner_begin

    @property
    def edge_offsets(self) -> IntArray:
        """[S + 1] where each segment's edges start when all are numbered in segment order."""
        return np.concatenate([[0], np.cumsum(self.length)]).astype(np.int64)

    @property
    def depth(self) -> IntArray:
        """[S] how many segments lie above each."""
        depth = np.zeros(len(self), np.int64)
        for segment, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                depth[segment] = depth[parent] + 1
        return depth

    def owners(self, segment: int) -> IntArray:
        """The rollouts through a segment, as positions in the batch."""
        return self.order[self.owner_begin[segment] : self.owner_end[segment]]

    def path(self, segment: int) -> list[int]:
        """The segments from the root down to this one, itself included; [] for -1."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = int(self.parent[segment])
        return found[::-1]

    def children(self) -> list[list[int]]:
        """For each segment, the segments below it."""
        below: list[list[int]] = [[] for _ in range(len(self))]
        for segment, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                below[parent].append(segment)
        return below

    def subtree_edges(self) -> IntArray:
        """[S] edges of each segment and all below it."""
        total, parents = self.length.tolist(), self.parent.tolist()
        for segment in range(len(self) - 1, -1, -1):
            if parents[segment] >= 0:
                total[parents[segment]] += total[segment]
        return np.asarray(total, np.int64)

    def token_edges(self, offsets: IntArray) -> IntArray:
        """[T] for each token of the batch, the edge whose label it is; -1 for first tokens.

        Edges of last tokens have no label among them.
        """
        edges = np.full(int(offsets[-1]), -1, np.int64)
        every = np.arange(self.edges)
        firsts = self.edge_offsets
        offsets = np.asarray(offsets, np.int64)
        for rollout, segment in self.levels():
            begin = offsets[rollout] + 1 + self.start[segment]
            first = firsts[segment]
            length = np.minimum(self.length[segment], offsets[rollout + 1] - begin)
            for at, end, edge, last in zip(
                begin.tolist(),
                (begin + length).tolist(),
                first.tolist(),
                (first + length).tolist(),
                strict=True,
            ):
                edges[at:end] = every[edge:last]
        return edges

    def levels(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Rollouts and a segment on the path of each, from their last segments up, level by level:
        each pair of the two comes once."""
        rollout = np.flatnonzero(self.leaf >= 0)
        segment = self.leaf[rollout]
        while len(segment):
            yield rollout, segment
            segment = self.parent[segment]
            here = segment >= 0
            rollout, segment = rollout[here], segment[here]

    def segment_tokens(self, offsets: IntArray) -> IntArray:
        """[S] where in the batch's flat tokens each segment's first token stands (one owner's)."""
        return np.asarray(offsets, np.int64)[self.order[self.owner_begin]] + self.start

    def split(self, where: Mapping[int, int]) -> "Forest":
        """The same edges with each of these segments cut in two after so many edges.

        A cut that is no shorter than its segment changes nothing.
        """
        first = np.zeros(len(self), np.int64)
        for segment, edges in where.items():
            first[segment] = edges if edges < self.length[segment] else 0
        if not first.any():
            return self
        pieces = 1 + (first > 0)
        last_piece = np.cumsum(pieces) - 1
        segment = np.repeat(np.arange(len(self)), pieces)
        second = np.arange(len(segment)) > last_piece[segment] - pieces[segment] + 1
        cut = first[segment]
        length = self.length[segment]
        above = np.where(self.parent >= 0, last_piece[self.parent], -1)
        return replace(
            self,
            parent=np.where(second, np.arange(len(segment)) - 1, above[segment]),
            start=self.start[segment] + np.where(second, cut, 0),
            length=np.where(second, length - cut, np.where(cut > 0, cut, length)),
            owner_begin=self.owner_begin[segment],
            owner_end=self.owner_end[segment],
            leaf=np.where(self.leaf >= 0, last_piece[self.leaf], -1),
        )

    def chained(self, max_tokens: int) -> "Forest":
        """The same edges with every longer segment cut into a chain of at most `max_tokens`.

        The pieces of one segment are as equal as whole tokens allow, so that no row is a sliver.
        """
        pieces = -(-self.length // max_tokens)
        if (pieces <= 1).all():
            return self
        first_piece = np.cumsum(pieces) - pieces
        last_piece = first_piece + pieces - 1
        segment = np.repeat(np.arange(len(self)), pieces)
        piece = np.arange(len(segment)) - first_piece[segment]
        size, longer = self.length[segment] // pieces[segment], self.length % pieces
        begin = piece * size + np.minimum(piece, longer[segment])
        above = np.where(self.parent >= 0, last_piece[self.parent], -1)
        return replace(
            self,
            parent=np.where(piece > 0, np.arange(len(segment)) - 1, above[segment]),
            start=self.start[segment] + begin,
            length=size + (piece < longer[segment]),
            owner_begin=self.owner_begin[segment],
            owner_end=self.owner_end[segment],
            leaf=np.where(self.leaf >= 0, last_piece[self.leaf], -1),
        )


class _Node:
    """A segment while the forest is built: its children may still move to a lower part."""

    __slots__ = ("begin", "children", "end", "ends", "owner_begin", "owner_end")

    def __init__(self, begin: int, end: int, owner_begin: int) -> None:
        self.begin, self.end, self.owner_begin = begin, end, owner_begin
        self.owner_end = owner_begin + 1
        self.children: list[_Node] = []
        self.ends: list[int] = []


def build_forest(order: SortedRollouts, rollouts: int) -> Forest:
    """Build the forest of rollouts sorted by their tokens.

    Args:
        order: the sorted rollouts, cut wherever neighbours may not share.
        rollouts: N, how many rollouts the batch has, those of one token included.
    """
    roots: list[_Node] = []
    stack: list[_Node] = []
    for entry, (edges, shared) in enumerate(
        zip(order.edges.tolist(), order.shared_edges.tolist(), strict=True)
    ):
        while stack and stack[-1].begin >= shared:
            stack.pop().owner_end = entry
        if stack and stack[-1].end > shared:
            upper = stack[-1]
            lower = _Node(shared, upper.end, upper.owner_begin)
            lower.owner_end = entry
            lower.children, lower.ends = upper.children, upper.ends
            upper.end, upper.children, upper.ends = shared, [lower], []
        if edges > shared:
            node = _Node(shared, edges, entry)
            (stack[-1].children if stack else roots).append(node)
            stack.append(node)
        stack[-1].ends.append(int(order.rollouts[entry]))
    for node in stack:
        node.owner_end = len(order.rollouts)

    parents: list[int] = []
    nodes: list[_Node] = []
    leaf = np.full(rollouts, -1, np.int64)
    for segment, (node, parent) in enumerate(_depth_first(roots)):
        nodes.append(node)
        parents.append(parent)
        leaf[node.ends] = segment

    def column(name: str) -> IntArray:
        return np.fromiter((getattr(node, name) for node in nodes), np.int64, len(nodes))

    begin = column("begin")
    return Forest(
        order=order.rollouts,
        parent=np.asarray(parents, np.int64),
        start=begin,
        length=column("end") - begin,
        owner_begin=column("owner_begin"),
        owner_end=column("owner_end"),
        leaf=leaf,
    )


def _depth_first(roots: list[_Node]) -> Iterator[tuple[_Node, int]]:
    todo = [(node, -1) for node in reversed(roots)]
    segment = 0
    while todo:
        node, parent = todo.pop()
        yield node, parent
        todo.extend((child, segment) for child in reversed(node.children))
        segment += 1
