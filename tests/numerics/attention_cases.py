"""Attention over forests of segments: a kernel's table, the definition, and the bar of rounding.

`path_attention` is written from the definition, one segment at a time over its whole path. It
shares nothing with the code under test.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forkpoint.ops.attention import (
    FROM_CACHE,
    FROM_GATHER,
    FROM_OWN,
    KERNELS,
    AttentionTable,
    CacheSlice,
    shared_attention,
)
from forkpoint.ops.choice import Asked
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.tree import LaunchLayout, Table

RECORDS = {kernel.name: kernel for kernel in KERNELS}


@dataclass
class Forest:
    """Segments with parents before children; external ones lie in the cache.

    places[s]: the segment's tokens, in the microbatch or in the cache, which has free places too.
    """

    parents: list[int]
    lengths: list[int]
    external: list[bool]
    places: list[np.ndarray]
    tokens: int
    cache_tokens: int

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
        """Tokens of the segment's path, indices into [microbatch, cache]."""
        every = [*self.ancestors(segment), segment]
        return np.concatenate(
            [self.places[s] + (self.tokens if self.external[s] else 0) for s in every]
        )

    def free(self) -> np.ndarray:
        """Places of the cache that no segment has."""
        used = [self.places[s] for s, external in enumerate(self.external) if external]
        return np.delete(np.arange(self.cache_tokens), np.concatenate([np.zeros(0, int), *used]))

    def table(self, window: int = 0, device: str = "cpu") -> AttentionTable:
        """The causal launch and one for each level of ancestors.

        For a window one launch, which gathers its keys where segments have ancestors.
        """
        order = sorted(self.inside, key=lambda s: self.places[s][0])
        index: np.ndarray | None = None
        if window and max(self.parents) >= 0:
            tails = [self.path(s)[-(self.lengths[s] + window - 1) :] for s in order]
            every = np.concatenate(tails)
            index = np.where(every < self.tokens, every, self.tokens - 1 - every)
            calls = [(self.lengths[s], len(tail)) for s, tail in zip(order, tails, strict=True)]
            launches: list = [(FROM_GATHER, True, 0, 0, calls)]
        else:
            launches = [(FROM_OWN, True, 0, 0, [(self.lengths[s],) * 2 for s in order])]
            for x, external in enumerate(self.external):
                source, k_begin = (FROM_CACHE if external else FROM_OWN), int(self.places[x][0])
                below = [self.places[s] for s in order if x in self.ancestors(s)]
                for q_begin, queries in _ranges(below):
                    last = launches[-1]
                    ends = tuple(last[i] + sum(n[i - 2] for n in last[4]) for i in (2, 3))
                    call = (queries, self.lengths[x])
                    if last[:2] == (source, False) and ends == (q_begin, k_begin):
                        last[4].append(call)
                    else:
                        launches.append((source, False, q_begin, k_begin, [call]))
        layouts = [LaunchLayout(*launch[:4], *zip(*launch[4], strict=True)) for launch in launches]
        return AttentionTable(Table(tuple(layouts), index), device=device)


def _ranges(places: list[np.ndarray]) -> list[tuple[int, int]]:
    """Maximal ranges of adjacent tokens as (begin, length)."""
    found: list[tuple[int, int]] = []
    for part in places:
        begin, length = int(part[0]), len(part)
        if found and sum(found[-1]) == begin:
            begin, before = found.pop()
            length += before
        found.append((begin, length))
    return found


def make_forest(
    parents: list[int], lengths: list[int], external: list[int] = (), by_level: bool = False
) -> Forest:
    """Segments depth first, or level by level; the cache has free places around its own."""
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    order, todo = [], [s for s, parent in enumerate(parents) if parent < 0][::-1]
    while todo:
        order.append(todo.pop())
        todo += [s for s, parent in enumerate(parents) if parent == order[-1]][::-1]
    if by_level:
        order = sorted(range(len(parents)), key=lambda s: depth[s])
    places: list[np.ndarray] = [np.empty(0)] * len(parents)
    ends = {False: 0, True: 3 if external else 0}
    for s in order:
        outside = s in external
        places[s] = np.arange(ends[outside], ends[outside] + lengths[s])
        ends[outside] += lengths[s]
    outside = [s in external for s in range(len(parents))]
    return Forest(parents, lengths, outside, places, ends[False], ends[True] + 2 * bool(external))


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

    def leaves(self) -> dict[str, Tensor]:
        return {name: x for name in self.NAMES if (x := getattr(self, name)) is not None}

    def cache(self, grads: float | None = 0.0) -> CacheSlice | None:
        """The cache, with gradients that were there before; None for a cache without any."""
        if self.cache_k is None or self.cache_v is None:
            return None
        k, v = self.cache_k.detach(), self.cache_v.detach()
        if grads is None:
            return CacheSlice(k, v)
        wide = accumulate_dtype(k.dtype)
        return CacheSlice(k, v, *(torch.full_like(x, grads, dtype=wide) for x in (k, v)))


@dataclass(frozen=True)
class Case:
    """One attention; `fused` makes q, k and v strided views of one tensor."""

    forest: Forest
    kernel: str = "auto"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    fused: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def refusal(self, deterministic: bool = False) -> str | None:
        """Why the kernel's record refuses this attention, or None."""
        if self.kernel == "auto":
            return None
        asked = Asked(
            *(torch.device(self.device), self.dtype, *self.dims, self.softcap, self.window),
            *(deterministic, *self.heads),
        )
        return RECORDS[self.kernel].refusal(asked)

    def inputs(self) -> Inputs:
        """Normal inputs; free places of the cache are NaN."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            made = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return made.to(self.device, self.dtype).requires_grad_()

        (h, k), (d, e), forest = self.heads, self.dims, self.forest
        own = [
            normal(forest.tokens, h, d),
            normal(forest.tokens, k, d),
            normal(forest.tokens, k, e),
        ]
        if self.fused and d == e:
            parts = torch.cat([x.detach() for x in own], 1).split([h, k, k], dim=1)
            own = [x.requires_grad_() for x in parts]
        cached: list[Tensor | None] = [None, None]
        if forest.cache_tokens:
            cached = [normal(forest.cache_tokens, k, dim) for dim in (d, e)]
            for x in cached:
                assert x is not None
                x.data[forest.free()] = torch.nan
        do = normal(forest.tokens, h, e).detach()
        return Inputs(*own, *cached, normal(h) if self.sinks else None, do)


def attend(
    case: Case, x: Inputs, table: AttentionTable | None = None, *, deterministic: bool = False
) -> dict[str, Tensor]:
    """The operator's o, lse and gradients by name. It waits for no device itself."""
    cache = x.cache(grads=1.0)  # to gradients that were there before it adds its own
    o, lse = shared_attention(
        x.q,
        x.k,
        x.v,
        table=case.forest.table(case.window, case.device) if table is None else table,
        cache=cache,
        sinks=x.sinks,
        scale=case.scale,
        softcap=case.softcap,
        window=case.window,
        kernel=case.kernel,
        deterministic=deterministic,
    )
    leaves = {name: leaf for name, leaf in x.leaves().items() if not name.startswith("cache")}
    found = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), x.do), strict=True))
    if cache is not None:
        assert cache.grad_k is not None and cache.grad_v is not None
        found |= {"cache_k": cache.grad_k - 1, "cache_v": cache.grad_v - 1}
    return found | {"o": o.detach(), "lse": lse}


def path_attention(case: Case, x: Inputs, *, by_torch: bool = False) -> dict[str, Tensor]:
    """o, lse and gradients in float64: each segment's softmax attention over its whole path.

    by_torch: in the case's dtype, by torch's own attention, which has the usual rounding. Gradients
        of paths are rounded as torch rounds them and summed exactly; lse is left out.
    """
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in x.leaves().items()}
    dtype = case.dtype if by_torch else torch.float64
    k, v = (
        torch.cat([leaves[n], leaves[f"cache_{n}"]]) if f"cache_{n}" in leaves else leaves[n]
        for n in "kv"
    )
    group, sinks = case.heads[0] // case.heads[1], leaves.get("sinks")
    o, lse = torch.zeros_like(x.do, dtype=torch.float64), []
    for s in case.forest.inside:
        own, path = (
            torch.from_numpy(a).to(case.device)
            for a in (case.forest.places[s], case.forest.path(s))
        )
        at = torch.arange(len(path), device=case.device)
        i = at[len(path) - len(own) :, None]
        seen = (at <= i) & (at > i - (case.window or len(path)))
        q_HTD = leaves["q"][own].to(dtype).transpose(0, 1)
        k_HTD, v_HTE = (
            a[path].to(dtype).transpose(0, 1).repeat_interleave(group, 0) for a in (k, v)
        )
        if by_torch and not case.softcap:
            out = _torch_attention(q_HTD, k_HTD, v_HTE, seen, sinks, case.scale)
        else:
            scores = q_HTD @ k_HTD.mT * case.scale
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                column = sinks.to(dtype)[:, None, None].expand(-1, len(own), 1)
                scores = torch.cat([scores, column], -1)
            wide = torch.promote_types(dtype, torch.float32)
            share = scores.softmax(-1, dtype=wide)[:, :, : len(path)]
            out = share.to(dtype) @ v_HTE
            lse.append((own, scores.detach().logsumexp(-1)))
        o = o.index_put((own,), out.transpose(0, 1).double())
    found = torch.autograd.grad(o, list(leaves.values()), x.do.double(), materialize_grads=True)
    results = dict(zip(leaves, found, strict=True)) | {"o": o.detach()}
    if not by_torch:
        results["lse"] = torch.empty(case.heads[0], len(o), dtype=torch.float64, device=case.device)
        for own, values in lse:
            results["lse"][:, own] = values
    return results


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, scale: float
) -> Tensor:
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    mask = mask.expand(len(q), *mask.shape)
    if sinks is not None:
        # One more key, without a value, whose score is the sink.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        column = sinks.to(q.dtype)[:, None, None].expand(-1, mask.shape[1], -1)
        mask = torch.cat([mask, column], dim=2)
    # Other backends differentiate no mask, or plan for every shape.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], mask[None], scale=scale)[0]


def check_exact(case: Case) -> None:
    """Within 1e-12 of the definition, relative to each tensor's largest entry or 1."""
    x = case.inputs()
    with poisoned(case.device):
        found = attend(case, x)
    expected = path_attention(case, x)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bar = 1e-12 * max(1.0, tensor.abs().max().item())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bar, msg=name)


def check_rounding(case: Case) -> None:
    """Errors against float64 are at most twice those of torch's own attention, plus a rounding."""
    x = case.inputs()
    with poisoned(case.device):
        found = attend(case, x)
    truth, usual = path_attention(case, x), path_attention(case, x, by_torch=True)
    assert found.keys() == truth.keys()
    # Rounding to nearest errs by eps / 2 / sqrt(3) in the root mean square. A norm of n errors, one
    # a token and head, varies by 1 / sqrt(2n) of itself, ours and torch's.
    one = torch.finfo(case.dtype).eps / 2 / math.sqrt(3)
    do, o = x.do.double(), truth["o"]
    keys, values = (
        max(_longest(leaf) for name, leaf in x.leaves().items() if name.endswith(side))
        for side in "kv"
    )
    keys = max(keys, _longest(x.q))
    # dP - dO . O cancels: to zero where a query has a single key.
    floor = 4 * torch.finfo(torch.float32).eps * case.scale * keys * values * do.norm().item()
    if x.sinks is not None:
        # A flash backward takes O as it was rounded; torch's for masks may have it in float32.
        floor += one * case.scale * keys * (do * o).norm().item()
    for name in truth.keys() - {"sinks", "lse"}:
        error_THD = found[name].double() - truth[name]
        if name.startswith("cache"):
            assert not error_THD[case.forest.free()].any(), f"{name}: places that no segment has"
        error, normal, size = (
            a.norm().item() for a in (error_THD, usual[name] - truth[name], truth[name])
        )
        varies = 1 + 4 / math.sqrt(truth[name].shape[0] * truth[name].shape[1])
        bar = 2 * normal + one * varies * size + (floor if name in ("q", "k", "cache_k") else 0.0)
        assert normal <= 50 * one * size + floor, f"{name}: torch errs by {normal}: no yardstick"
        assert error <= bar, f"{name}: {error} where {bar} is allowed"
    if x.sinks is not None:
        # A sum over queries, of terms that carry the rounding of their output.
        terms = (x.sinks.detach().double()[:, None] - truth["lse"]).exp() * (do * o).sum(-1).T
        error, normal = ((a["sinks"] - truth["sinks"]).norm().item() for a in (found, usual))
        few, size = 1 / math.sqrt(len(terms)), terms.norm().item()
        bar = 2 * (1 + 6 * few / math.sqrt(2)) * normal + one * (1 + 6 * few) * size
        assert error <= bar, f"sinks: {error} where {bar} is allowed"
    # A float32 sum of fast exponentials; a GPU's fast tanh errs by 2^-11, which softcap multiplies.
    error = (found["lse"].double() - truth["lse"]).abs().max().item()
    assert error <= 2e-4 + case.softcap * 2**-11, f"lse: {error}"


def _longest(x_THD: Tensor) -> float:
    return x_THD.detach().double().norm(dim=-1).nan_to_num(0).max().item()


@contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Memory that is allocated inside and not written is NaN, that of torch's own kernels too.

    On the CPU by torch's deterministic mode. On CUDA that would change what kernels do, so the
    caching allocator is left with nothing but NaN to hand out.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
    else:
        torch.cuda.empty_cache()
        sizes = [1 << 30, *(1 << bits for bits in range(23, 8, -1) for _ in range(24))]
        blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
        del blocks
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
