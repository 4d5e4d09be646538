"""The forest of segments that rollouts of a batch share.

An edge is a token of a rollout with the token after it. Edge i of a rollout reads token i and has
token i + 1 as its label. So two rollouts share edge i if their first i + 2 tokens are equal, and a
fork is one token before the first different tokens. A segment is a maximal run of consecutive edges
of the same rollouts.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SortedRollouts:
    """Rollouts sorted by their tokens, with the numbers of edges that neighbours share.

    In this order each set of rollouts that shares a segment is contiguous. So `shared_edges`
    determines the forest, and every forest in which fewer rollouts share.
    """

    rollouts: IntArray
    """[M] positions in the batch. Rollouts without an edge (of one token) are left out."""
    edges: IntArray
    """[M] number of edges of each: its tokens minus one, or its tokens if last tokens run."""
    shared_edges: IntArray
    """[M] number of first edges that each shares with the rollout before it; entry 0 is 0."""

    def cut(self, where: NDArray[np.bool_]) -> "SortedRollouts":
        """The same order, in which entries i - 1 and i share nothing if `where[i]`."""
        return replace(self, shared_edges=np.where(where, 0, self.shared_edges))

    def take(self, entries: IntArray) -> "SortedRollouts":
        """Select entries. Neighbours share the edges that all entries between them share. An entry
        after one with a larger index shares nothing."""
        shared = self.shared_edges[entries]
        shared[:1] = 0
        after_gap = np.flatnonzero(np.diff(entries) != 1) + 1
        if len(after_gap):
            low, high = entries[after_gap - 1] + 1, entries[after_gap] + 1
            bounds = np.stack([low, high], axis=1).ravel()
            # The last bound may be the end, at which no run can begin.
            least = np.minimum.reduceat(np.append(self.shared_edges, 0), bounds)[::2]
            shared[after_gap] = np.where(low < high, least, 0)
        return SortedRollouts(self.rollouts[entries], self.edges[entries], shared)

    def grouped(self, classes: IntArray) -> "SortedRollouts":
        """The same rollouts sorted by class; only rollouts of one class share.

        classes: int64 [N], by position in the batch.
        """
        of_entry = classes[self.rollouts]
        entries = np.argsort(of_entry, kind="stable")
        found, of_entry = self.take(entries), of_entry[entries]
        return found.cut(np.append(True, of_entry[1:] != of_entry[:-1])[: len(entries)])

    def with_segments_of(self, least: int) -> "SortedRollouts":
        """The same order, with only roots and segments of at least `least` edges shared.

        From the roots on, a shorter segment is not shared, and segments below it begin earlier. So
        each rollout has fewer than `least` more new edges for each segment that it shares.
        """
        # Entries with equal numbers and no smaller one between them are one fork; fork 0 is above
        # all roots. The forks above the current entry are on the stack.
        depth, parent, stack, fork_of = [0], [0], [0], []
        for shared in self.shared_edges.tolist():
            below = 0
            while depth[stack[-1]] > shared:
                below = stack.pop()
            if depth[stack[-1]] < shared:
                depth.append(shared)
                parent.append(stack[-1])
                stack.append(len(depth) - 1)
            if below and depth[parent[below]] < shared:
                parent[below] = stack[-1]
            fork_of.append(stack[-1])
        kept = [0] * len(depth)
        for fork in sorted(range(1, len(depth)), key=depth.__getitem__):
            above, is_root = kept[parent[fork]], parent[fork] == 0
            kept[fork] = depth[fork] if is_root or depth[fork] - above >= least else above
        return replace(self, shared_edges=np.array(kept, np.int64)[fork_of])

    @property
    def new_edges(self) -> IntArray:
        """[M] number of edges that each does not share with the one before it. Their sum is the
        number of edges of the forest."""
        return self.edges - self.shared_edges


def sort_rollouts(
    token_ids: NDArray[np.integer],
    offsets: NDArray[np.integer],
    *,
    last_tokens: bool = False,
    routes: NDArray[np.integer] | None = None,
) -> SortedRollouts:
    """Sort the rollouts of a batch by tokens, and count the edges that neighbours share.

    Args:
        token_ids: [T] token ids of all rollouts, concatenated, none negative.
        offsets: [N + 1] position of the first token of each rollout, then T.
        last_tokens: whether each rollout has one more edge, which reads its last token and has the
            end of the rollout as its label. Only rollouts with equal tokens share this edge.
        routes: [T] a number below 2^32 for other inputs of a token, such as its experts or its
            medium. Rollouts share an edge if these numbers are equal for its token and all tokens
            before it.

    Time and memory are linear in the number of tokens, except for the comparisons of the sort.
    """
    offsets = np.asarray(offsets, np.int64)
    lengths = np.diff(offsets)
    # Big-endian bytes have the order of the tokens, and one memcmp compares them.
    width = 4 if token_ids.size == 0 or int(token_ids.max()) < 2**32 else 8
    if routes is not None:
        # A token comes before its route. Rollouts diverge at the first difference of either.
        assert width == 4, "token ids with routes are below 2^32"
        token_ids = (np.asarray(token_ids, np.uint64) << 32) | np.asarray(routes, np.uint64)
        width = 8
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
    return SortedRollouts(rollouts, lengths[rollouts] - left_out, shared)


@dataclass(frozen=True, eq=False)
class Forest:
    """The forest of a batch: segments in depth-first order, parents before children."""

    order: IntArray
    """[M] positions of rollouts in the batch, sorted by tokens. The owners of a segment are a slice
    of it."""
    parent: IntArray
    """[S] parent of each segment, -1 for a root."""
    start: IntArray
    """[S] position of the segment's first token in its rollouts."""
    length: IntArray
    """[S] number of edges of the segment, at least 1."""
    owner_begin: IntArray
    """[S] owners of the segment are `order[owner_begin : owner_end]`."""
    owner_end: IntArray
    """[S]"""
    leaf: IntArray
    """[N] segment of each rollout's last edge, -1 for a rollout of one token."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def edges(self) -> int:
        """Number of edges: the tokens that a plan of this forest computes."""
        return int(self.length.sum())

    @property
    def multiplicity(self) -> IntArray:
        """[S] number of rollouts of each segment."""
        return self.owner_end - self.owner_begin

    @property
    def edge_offsets(self) -> IntArray:
        """[S + 1] number of the first edge of each segment, if edges are numbered in the order of
        segments."""
        return np.concatenate([[0], np.cumsum(self.length)]).astype(np.int64)

    def path(self, segment: int) -> list[int]:
        """Segments from the root to this one, inclusive; [] for -1."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = int(self.parent[segment])
        return found[::-1]

    def children(self) -> list[list[int]]:
        """Children of each segment."""
        below: list[list[int]] = [[] for _ in range(len(self))]
        for segment, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                below[parent].append(segment)
        return below

    def subtree_edges(self) -> IntArray:
        """[S] number of edges of each segment and all its descendants."""
        total, parents = self.length.tolist(), self.parent.tolist()
        for segment in range(len(self) - 1, -1, -1):
            if parents[segment] >= 0:
                total[parents[segment]] += total[segment]
        return np.asarray(total, np.int64)

    def token_edges(self, offsets: IntArray) -> IntArray:
        """[T] the edge whose label is this token, for each token of the batch; -1 for first tokens.

        Edges of last tokens do not appear, because they have no label.
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
        """Pairs of rollouts and segments on their paths, level by level, from last segments to
        roots. Each pair appears once."""
        rollout = np.flatnonzero(self.leaf >= 0)
        segment = self.leaf[rollout]
        while len(segment):
            yield rollout, segment
            segment = self.parent[segment]
            here = segment >= 0
            rollout, segment = rollout[here], segment[here]

    def segment_tokens(self, offsets: IntArray) -> IntArray:
        """[S] position in the batch's flat tokens of the first token of each segment, in one of its
        rollouts."""
        return np.asarray(offsets, np.int64)[self.order[self.owner_begin]] + self.start

    def split(self, where: Mapping[int, int]) -> "Forest":
        """The same edges, with each of these segments cut in two after a number of edges.

        A cut at or after the end of its segment changes nothing.
        """
        cuts = {s: edges for s, edges in where.items() if 0 < edges < self.length[s]}
        pieces = np.ones(len(self), np.int64)
        pieces[list(cuts)] = 2
        begin = np.zeros(int(pieces.sum()), np.int64)
        begin[np.cumsum(pieces)[list(cuts)] - 1] = list(cuts.values())
        return self._cut(pieces, begin) if cuts else self

    def chained(self, max_tokens: int) -> "Forest":
        """The same edges, with each longer segment cut into a chain of segments of at most
        `max_tokens`.

        The lengths of pieces differ by at most one token, so that no microbatch is very short.
        """
        pieces = -(-self.length // max_tokens)
        if (pieces <= 1).all():
            return self
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        size, longer = (np.repeat(x, pieces) for x in np.divmod(self.length, pieces))
        return self._cut(pieces, piece * size + np.minimum(piece, longer))

    def _cut(self, pieces: IntArray, begin: IntArray) -> "Forest":
        """The same edges, with segments cut into chains.

        Args:
            pieces: [S] number of pieces of each segment.
            begin: [sum of pieces] first edge of each piece in its segment.
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
        order: the sorted rollouts, cut where neighbours may not share.
        rollouts: N, number of rollouts of the batch, including those of one token.
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
