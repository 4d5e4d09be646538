"""A forest of segments for attention tests, its table, and attention over whole paths.

The paths' attention is written from the definition, one segment at a time, over a pool of all
tokens; it shares nothing with the code under test. The tests here are of these helpers.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.attention import FROM_CACHE, FROM_GATHER, FROM_OWN, AttentionTable


@dataclass
class Forest:
    """Segments with parents before children; those marked external lie in the cache.

    places[s] are the segment's tokens: in the microbatch, or in the cache, whose free places (if
    any) are owned by no segment.
    """

    parents: list[int]
    lengths: list[int]
    external: list[bool]
    places: list[np.ndarray]
    microbatch_tokens: int
    cache_tokens_: int

    @property
    def inside(self) -> list[int]:
        return [s for s, external in enumerate(self.external) if not external]

    def ancestors(self, segment: int) -> list[int]:
        """From the root down, without the segment."""
        found = []
        while (segment := self.parents[segment]) >= 0:
            found.append(segment)
        return found[::-1]

    def path(self, segment: int) -> np.ndarray:
        """The tokens of the segment's path as indices into [microbatch, cache]."""
        return np.concatenate(
            [
                self.places[s] + (self.microbatch_tokens if self.external[s] else 0)
                for s in [*self.ancestors(segment), segment]
            ]
        )

    def table(self, window: int = 0, device: str = "cpu") -> AttentionTable:
        return AttentionTable.from_numpy(*self.arrays(window), device=device)

    def arrays(self, window: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Launches, cumulative lengths and, for a window, the key index."""
        order = sorted(self.inside, key=lambda s: self.places[s][0])
        if window:
            index, calls = [], []
            for s in order:
                path = self.path(s)[-(self.lengths[s] + window - 1) :]
                index.append(
                    np.where(path < self.microbatch_tokens, path, self.microbatch_tokens - 1 - path)
                )
                calls.append((self.lengths[s], len(path)))
            launches, cu = _write([(FROM_GATHER, 1, 0, 0, calls)])
            return launches, cu, np.concatenate(index)
        own = [(self.lengths[s], self.lengths[s]) for s in order]
        launches = [(FROM_OWN, 1, 0, 0, own)]
        for x in range(len(self.parents)):
            below = [s for s in order if x in self.ancestors(s)]
            source = FROM_CACHE if self.external[x] else FROM_OWN
            for q_begin, queries in _ranges([self.places[s] for s in below]):
                k_begin = int(self.places[x][0])
                last = launches[-1]
                follows = (
                    last[:2] == (source, 0)
                    and last[2] + sum(q for q, _ in last[4]) == q_begin
                    and last[3] + sum(k for _, k in last[4]) == k_begin
                )
                if follows:
                    last[4].append((queries, self.lengths[x]))
                else:
                    launches.append((source, 0, q_begin, k_begin, [(queries, self.lengths[x])]))
        return *_write(launches), None


def _ranges(places: list[np.ndarray]) -> list[tuple[int, int]]:
    """Maximal ranges of adjacent tokens as (begin, length)."""
    found: list[tuple[int, int]] = []
    for part in places:
        begin = int(part[0])
        if found and sum(found[-1]) == begin:
            begin, length = found.pop()
            found.append((begin, length + len(part)))
        else:
            found.append((begin, len(part)))
    return found


def _write(launches: list) -> tuple[np.ndarray, np.ndarray]:
    microbatches, cu = [], []
    for source, causal, q_begin, k_begin, calls in launches:
        q, k = (np.array(x) for x in zip(*calls, strict=True))
        q_at = len(cu)
        cu += [0, *np.cumsum(q)]
        k_at = len(cu)
        cu += [0, *np.cumsum(k)]
        q_end, k_end = q_begin + q.sum(), k_begin + k.sum()
        ranges = [q_begin, q_end, k_begin, k_end, q.max(), k.max(), q_at, k_at, len(calls)]
        microbatches.append([source, causal, *ranges])
    return np.array(microbatches, dtype=np.int64), np.array(cu, dtype=np.int32)


def make_forest(
    parents: list[int], lengths: list[int], external: list[int] = (), by_level: bool = False
) -> Forest:
    """Lay a forest out: depth first, or level by level. The cache gets unowned places around it."""
    outside = [s in external for s in range(len(parents))]
    depth = [0] * len(parents)
    for s, parent in enumerate(parents):
        assert parent < s and (parent < 0 or outside[parent] or not outside[s])
        depth[s] = depth[parent] + 1 if parent >= 0 else 0
    if by_level:
        order = sorted(range(len(parents)), key=lambda s: depth[s])
    else:
        order = []
        todo = [s for s, parent in enumerate(parents) if parent < 0][::-1]
        while todo:
            order.append(todo.pop())
            todo += [s for s, parent in enumerate(parents) if parent == order[-1]][::-1]
    places: list[np.ndarray] = [np.empty(0)] * len(parents)
    microbatch = 0
    cache = 3 if external else 0
    for s in order:
        if outside[s]:
            places[s] = np.arange(cache, cache + lengths[s])
            cache += lengths[s]
        else:
            places[s] = np.arange(microbatch, microbatch + lengths[s])
            microbatch += lengths[s]
    return Forest(parents, lengths, outside, places, microbatch, cache + 2 if external else 0)


def random_forest(seed: int, segments: int = 9, longest: int = 40) -> Forest:
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(-1, s)) for s in range(1, segments)]
    lengths = [int(n) for n in rng.integers(1, longest, size=segments)]
    external: list[int] = []
    for s, parent in enumerate(parents[:-1]):
        if (parent < 0 or parent in external) and rng.random() < 0.4:
            external.append(s)
    return make_forest(parents, lengths, external, by_level=bool(rng.integers(2)))


@dataclass
class Inputs:
    """Leaves of one attention; cache_k, cache_v and sinks may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache_k: Tensor | None
    cache_v: Tensor | None
    sinks: Tensor | None
    do: Tensor

    NAMES = ("q", "k", "v", "cache_k", "cache_v", "sinks")

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Copies in another dtype, requiring gradients."""
        leaves = [getattr(self, name) for name in self.NAMES]
        made = [None if x is None else x.detach().to(dtype).requires_grad_() for x in leaves]
        return Inputs(*made, self.do.detach().to(dtype))


def make_inputs(
    forest: Forest,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    sinks: bool = False,
    seed: int = 0,
) -> Inputs:
    """Random normal inputs with `heads` = (H, K) and `dims` = (D, E)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(dtype).requires_grad_()

    (h, k), (d, e), microbatches, cache = (
        heads,
        dims,
        forest.microbatch_tokens,
        forest.cache_tokens_,
    )
    return Inputs(
        normal(microbatches, h, d),
        normal(microbatches, k, d),
        normal(microbatches, k, e),
        normal(cache, k, d) if cache else None,
        normal(cache, k, e) if cache else None,
        normal(h) if sinks else None,
        normal(microbatches, h, e).detach(),
    )


def path_attention(
    forest: Forest,
    x: Inputs,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sdpa: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [T, H, E] and lse [H, T]: each segment over its whole path, in the inputs' dtype.

    With sdpa, by torch's own attention, for the rounding that is usual in a dtype; lse is NaN.
    """
    group = x.q.shape[1] // x.k.shape[1]
    k, v = x.k, x.v
    if x.cache_k is not None and x.cache_v is not None:
        k, v = torch.cat([k, x.cache_k]), torch.cat([v, x.cache_v])
    o = torch.zeros_like(x.do)
    lse = torch.full((x.q.shape[1], len(x.q)), torch.nan, dtype=x.q.dtype)
    for s in forest.inside:
        own, path = torch.from_numpy(forest.places[s]), torch.from_numpy(forest.path(s))
        i = torch.arange(len(path) - len(own), len(path))[:, None]
        j = torch.arange(len(path))[None]
        seen = (j <= i) & (j > i - window) if window else j <= i
        q_HTD = x.q[own].transpose(0, 1)
        k_HTD = k[path].transpose(0, 1).repeat_interleave(group, 0)
        v_HTE = v[path].transpose(0, 1).repeat_interleave(group, 0)
        if sdpa:
            batch = (a[None] for a in (q_HTD, k_HTD, v_HTE))
            out = F.scaled_dot_product_attention(*batch, seen, scale=scale)[0]
        else:
            scores = q_HTD @ k_HTD.mT * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if x.sinks is not None:
                column = x.sinks[:, None, None].expand(-1, len(own), 1)
                scores = torch.cat([scores, column], -1)
            share = scores.softmax(-1)[:, :, : len(path)]
            out = share @ v_HTE
            lse[:, own] = scores.detach().logsumexp(-1)
        o = o.index_put((own,), out.transpose(0, 1))
    return o, lse


def gradients(o: Tensor, x: Inputs) -> dict[str, Tensor]:
    """Those of (o * do).sum() with respect to what is there, zero for what has no part in it."""
    leaves = {name: getattr(x, name) for name in x.NAMES if getattr(x, name) is not None}
    found = torch.autograd.grad(o, list(leaves.values()), x.do, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def test_path_attention_is_torch_attention_on_paths() -> None:
    forest = random_forest(1)
    x = make_inputs(forest, (4, 2), (8, 8), torch.float64)
    for window in (0, 5):
        ours, _ = path_attention(forest, x, scale=0.3, window=window)
        torchs, _ = path_attention(forest, x, scale=0.3, window=window, sdpa=True)
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-13)


def test_layouts_make_launches_of_several_sequences_and_several_launches() -> None:
    two_groups = make_forest([-1, -1, 0, 0, 1, 1], [5, 7, 2, 3, 4, 1], by_level=True)
    launches, cu, _ = two_groups.arrays()
    assert launches.tolist() == [
        [0, 1, 0, 22, 0, 22, 7, 7, 0, 7, 6],
        [0, 0, 12, 22, 0, 12, 5, 7, 14, 17, 2],
    ]
    assert cu[14:].tolist() == [0, 5, 10, 0, 5, 12]
    assert len(make_forest([-1, 0, 1, 2], [3, 2, 1, 1]).arrays()[0]) == 4


@pytest.mark.parametrize("seed", range(5))
def test_each_query_meets_each_token_of_its_path_once(seed: int) -> None:
    forest = random_forest(seed)
    launches, cu, _ = forest.arrays()
    met = np.zeros(
        (forest.microbatch_tokens, forest.microbatch_tokens + forest.cache_tokens_), dtype=int
    )
    for source, causal, q_begin, _, k_begin, _, _, _, q_at, k_at, count in launches.tolist():
        k_begin += forest.microbatch_tokens if source == FROM_CACHE else 0
        q, k = cu[q_at : q_at + count + 1] + q_begin, cu[k_at : k_at + count + 1] + k_begin
        for i in range(count):
            block = np.ones((q[i + 1] - q[i], k[i + 1] - k[i]), dtype=int)
            met[q[i] : q[i + 1], k[i] : k[i + 1]] += np.tril(block) if causal else block
    expected = np.zeros_like(met)
    for s in forest.inside:
        path = forest.path(s)
        for at, place in enumerate(forest.places[s]):
            expected[place, path[: len(path) - forest.lengths[s] + at + 1]] = 1
    assert (met == expected).all()
