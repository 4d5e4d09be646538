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
        """The entries named. Neighbours share what all between them shared; a rollout that follows
        a later one shares nothing."""
        shared = self.shared_edges[entries]
        shared[:1] = 0
        after_gap = np.flatnonzero(np.diff(entries) != 1) + 1
        if len(after_gap):
            low, high = entries[after_gap - 1] + 1, entries[after_gap] + 1
            bounds = np.stack([low, high], axis=1).ravel()
            # The last bound may be the end, where no run can begin.
            least = np.minimum.reduceat(np.append(self.shared_edges, 0), bounds)[::2]
            shared[after_gap] = np.where(low < high, least, 0)
        return SortedRollouts(self.rollouts[entries], self.edges[entries], shared)

    def grouped(self, classes: IntArray) -> "SortedRollouts":
        """Class after class, where only rollouts of the same class share.

        classes: int64 [N], by position in the batch.
        """
        of_entry = classes[self.rollouts]
        entries = np.argsort(of_entry, kind="stable")
        found, of_entry = self.take(entries), of_entry[entries]
        return found.cut(np.append(True, of_entry[1:] != of_entry[:-1])[: len(entries)])

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
    left_out = 0 if last_tokens else 1
    order = sorted(np.flatnonzero(lengths > left_out).tolist(), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    begin = offsets.tolist()
    for entry, (before, this) in enumerate(itertools.pairwise(order), 1):
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
            and int(flat[begin[before] + tokens]) >> 32 == int(flat[begin[this] + tokens]) >> 32
        )
        shared[entry] = tokens if ends or labels else max(tokens - 1, 0)
    rollouts = np.asarray(order, np.int64)
    found = SortedRollouts(rollouts, lengths[rollouts] - left_out, shared)
    return found.grouped(np.asarray(classes, np.int64)) if np.any(classes) else found


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
        cuts = {s: edges for s, edges in where.items() if 0 < edges < self.length[s]}
        pieces = np.ones(len(self), np.int64)
        pieces[list(cuts)] = 2
        begin = np.zeros(int(pieces.sum()), np.int64)
        begin[np.cumsum(pieces)[list(cuts)] - 1] = list(cuts.values())
        return self._cut(pieces, begin) if cuts else self

    def chained(self, max_tokens: int) -> "Forest":
        """The same edges with every longer segment cut into a chain of at most `max_tokens`.

        The pieces of one segment are as equal as whole tokens allow, so that no microbatch is a
        sliver.
        """
        pieces = -(-self.length // max_tokens)
        if (pieces <= 1).all():
            return self
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        size, longer = (np.repeat(x, pieces) for x in np.divmod(self.length, pieces))
        return self._cut(pieces, piece * size + np.minimum(piece, longer))

    def _cut(self, pieces: IntArray, begin: IntArray) -> "Forest":
        """The same edges with segments cut into chains.

        Args:
            pieces: [S] how many pieces each segment becomes.
            begin: [sum of pieces] where each piece begins in its segment.
        """
        last_piece = np.cumsum(pieces) - 1
        segment = np.repeat(np.arange(len(self)), pieces)
        is_last = np.arange(len(segment)) == last_piece[segment]
        end = np.where(is_last, self.length[segment], np.append(begin[1:], 0))
        above = np.where(self.parent >= 0, last_piece[self.parent], -1)
        return replace(
            self,
            parent=np.where(begin > 0, np.arange(len(segment)) - 1, above[segment]),
            start=self.start[segment] + begin,
            length=end - begin,
            owner_begin=self.owner_begin[segment],
            owner_end=self.owner_end[segment],
            leaf=np.where(self.leaf >= 0, last_piece[self.leaf], -1),
        )


def build_forest(order: SortedRollouts, rollouts: int) -> Forest:
    """Build the forest of rollouts sorted by their tokens.

    Args:
        order: the sorted rollouts, cut wherever neighbours may not share.
        rollouts: N, how many rollouts the batch has, those of one token included.
    """
    # By segment, in the order in which they are found.
    begins: list[int] = []
    ends: list[int] = []
    parents: list[int] = []
    first_owners: list[int] = []
    last_owners: list[int] = []
    leaves: list[int] = []  # by rollout
    path: list[int] = []  # of the rollout before
    count = len(order.rollouts)

    def add(begin: int, end: int, owner: int) -> int:
        begins.append(begin)
        ends.append(end)
        parents.append(path[-1] if path else -1)
        first_owners.append(owner)
        last_owners.append(count)
        return len(begins) - 1

    for entry, (edges, shared) in enumerate(
        zip(order.edges.tolist(), order.shared_edges.tolist(), strict=True)
    ):
        while path and begins[path[-1]] >= shared:
            last_owners[path.pop()] = entry
        if path and ends[path[-1]] > shared:
            # Its upper part is a new segment, so that what lies below keeps its parent.
            lower = path.pop()
            path.append(add(begins[lower], shared, first_owners[lower]))
            begins[lower], parents[lower], last_owners[lower] = shared, path[-1], entry
        if edges > shared:
            path.append(add(shared, edges, entry))
        leaves.append(path[-1])

    found = np.array([begins, ends, parents, first_owners, last_owners], np.int64)
    begin, end, parent, owner_begin, owner_end = found
    depth_first = np.lexsort((begin, owner_begin))
    number = np.append(np.argsort(depth_first), -1)
    leaf = np.full(rollouts, -1, np.int64)
    leaf[order.rollouts] = number[leaves]
    return Forest(
        order=order.rollouts,
        parent=number[parent[depth_first]],
        start=begin[depth_first],
        length=(end - begin)[depth_first],
        owner_begin=owner_begin[depth_first],
        owner_end=owner_end[depth_first],
        leaf=leaf,
    )
