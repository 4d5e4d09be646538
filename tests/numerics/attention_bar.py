"""The numerical bar of attention kernels, on any device: what a test and the stress run share.

The error against float64 of the output and of every gradient is at most twice that of torch's own
attention over whole paths in the same dtype, plus one rounding, in the L2 norm of each tensor.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from test_attention_forest import Forest, Inputs, gradients, path_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forkpoint.ops.attention import KERNELS, AttentionTable, CacheSlice, shared_attention
from forkpoint.ops.dtypes import accumulate_dtype

RECORDS = {kernel.name: kernel for kernel in KERNELS}
SEGMENT_LENIENCE = 4.0
"""How many times over a single segment may have the relative error that a whole tensor may have:
few numbers vary. Seen are 1.7 times."""


@dataclass(frozen=True)
class Case:
    """One attention to be checked; `fused` makes q, k and v strided views of one tensor."""

    forest: Forest
    kernel: str
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
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
        return RECORDS[self.kernel].refusal(
            torch.device(self.device),
            self.dtype,
            *self.dims,
            softcap=self.softcap,
            window=self.window,
            deterministic=deterministic,
            grouped=self.heads[0] != self.heads[1],
        )


@dataclass(frozen=True)
class Finding:
    """How one tensor compares: `share` is its error over the bar, which passes up to 1; `ratio` is
    its error over that of torch's own attention, or over one rounding where that is more, and None
    where less than 100 independent errors went into it."""

    share: float
    ratio: float | None
    where: str = "whole"


def unavailable(kernel: str, device: str) -> str | None:
    """Why a kernel cannot run here at all, whatever is asked of it; None if it can."""
    if kernel == "auto":
        return None
    types = RECORDS[kernel].device_types
    if types is not None and device not in types:
        return f"{kernel} runs on {', '.join(types)}, not on {device}"
    return RECORDS[kernel].refuses_device(torch.device(device))


@contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Memory that is allocated inside and not written is NaN, that of torch's own kernels too.

    On the CPU by torch's deterministic mode. That would change what CUDA kernels do, so there the
    caching allocator is left with nothing but NaN to hand out.
    """
    if device == "cpu":
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
        return
    torch.cuda.empty_cache()
    # Every hole between blocks in use, exactly, the larger first; then what is new.
    holes = []
    for segment in torch.cuda.memory_snapshot():
        # Segments of small blocks serve no request of more than a MiB.
        most = 1 << 20 if segment["segment_type"] == "small" else 1 << 62
        for block in segment["blocks"]:
            size = block["size"] if block["state"] == "inactive" else 0
            while size > 0:
                holes.append(min(size, most))
                size -= most
    sizes = [*sorted(holes, reverse=True), 1 << 30, *[1 << 23] * 8, *[1 << 21] * 24]
    sizes += [1 << 20] * 16
    blocks = [torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF) for size in sizes]
    del blocks
    yield


def make_case_inputs(case: Case) -> Inputs:
    """Normal inputs on the case's device; places of the cache that no segment owns hold NaN."""
    generator = torch.Generator(case.device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, device=case.device)
        return made.to(case.dtype).requires_grad_()

    (h, k), (d, e), forest = case.heads, case.dims, case.forest
    microbatches, places = forest.microbatch_tokens, forest.cache_tokens_
    if case.fused and d == e:
        fused = normal(microbatches, h + 2 * k, d).detach()
        microbatch = [x.requires_grad_() for x in fused.split([h, k, k], dim=1)]
    else:
        microbatch = [
            normal(microbatches, h, d),
            normal(microbatches, k, d),
            normal(microbatches, k, e),
        ]
    cache_k = cache_v = None
    if places:
        cache_k, cache_v = normal(places, k, d), normal(places, k, e)
        free = np.delete(np.arange(places), np.concatenate(_arena_places(forest)))
        cache_k.data[free] = cache_v.data[free] = torch.nan
    sinks = normal(h) if case.sinks else None
    q, own_k, own_v = microbatch
    return Inputs(q, own_k, own_v, cache_k, cache_v, sinks, normal(microbatches, h, e).detach())


def attend(
    case: Case, x: Inputs, table: AttentionTable, *, deterministic: bool = False
) -> dict[str, Tensor]:
    """Results of the operator: o, lse and gradients by name. It waits for no device itself."""
    cache = None
    if x.cache_k is not None and x.cache_v is not None:
        wide = accumulate_dtype(case.dtype)
        # To gradients that were there before it adds its own.
        grads = [torch.ones_like(a.detach(), dtype=wide) for a in (x.cache_k, x.cache_v)]
        cache = CacheSlice(x.cache_k.detach(), x.cache_v.detach(), *grads)
    o, lse = shared_attention(
        x.q,
        x.k,
        x.v,
        table=table,
        cache=cache,
        sinks=x.sinks,
        scale=case.scale,
        softcap=case.softcap,
        window=case.window,
        kernel=case.kernel,
        deterministic=deterministic,
    )
    leaves = {"q": x.q, "k": x.k, "v": x.v} | ({} if x.sinks is None else {"sinks": x.sinks})
    found = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), x.do), strict=True))
    if cache is not None:
        assert cache.grad_k is not None and cache.grad_v is not None
        found |= {"cache_k": cache.grad_k - 1, "cache_v": cache.grad_v - 1}
    return found | {"o": o.detach(), "lse": lse}


def torch_attention(case: Case, x: Inputs) -> Tensor:
    """o [T, H, E] by torch's own attention in the case's dtype, of inputs in float64.

    The paths from roots to leaves are one padded batch, for torch's default backend; the outputs of
    a segment are taken from the first path through it. The gradients of each path are rounded as
    torch rounds them, and summed over paths exactly. Softcap, which it lacks, is eager code.
    """
    forest, device = case.forest, case.device
    paths = [forest.path(s) for s in forest.inside if s not in forest.parents]
    batch, length = len(paths), max(map(len, paths))
    if device != "cpu" and x.sinks is None:
        # In few shapes: cuDNN plans for each.
        batch, length = max(4, _power_of_2(batch)), max(512, _power_of_2(length))
    microbatches, places = forest.microbatch_tokens, forest.cache_tokens_
    index = np.full((batch, length), microbatches + places)
    path_of, at = np.zeros((2, microbatches), dtype=np.int64)
    for b, path in reversed(list(enumerate(paths))):
        index[b, : len(path)] = path
        own = path[path < microbatches]
        path_of[own], at[own] = b, np.flatnonzero(path < microbatches)
    index_BL = torch.from_numpy(index).to(device)

    def gather(own: Tensor, cache: Tensor | None) -> Tensor:
        # Tokens of the cache have no queries, and padding has nothing: zeros, which no one reads.
        cache = own.new_zeros(places, *own.shape[1:]) if cache is None else cache
        pool = torch.cat([own, cache, own.new_zeros(1, *own.shape[1:])])
        return pool[index_BL].to(case.dtype).transpose(1, 2)

    q, k, v = gather(x.q, None), gather(x.k, x.cache_k), gather(x.v, x.cache_v)
    (heads, groups), scale = case.heads, case.scale
    if not (case.window or case.softcap or x.sinks is not None):
        gqa = heads != groups
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        k, v = (a.repeat_interleave(heads // groups, 1) for a in (k, v))
        o = _masked_attention(case, q, k, v, x.sinks)
    return o.transpose(1, 2)[torch.from_numpy(path_of), torch.from_numpy(at)].double()


def _masked_attention(
    case: Case, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """[B, H, L, E] of as many heads each, with a window, sinks or softcap."""
    heads, length = q.shape[1:3]
    i, j = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)
    mask = (j <= i) & (j > i - (case.window or length))
    if case.softcap:
        assert sinks_H is None, "there is no yardstick for sinks with softcap"
        scores = case.softcap * torch.tanh(q @ k.mT * case.scale / case.softcap)
        share = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
        return share.to(case.dtype) @ v
    if sinks_H is not None:
        # One more key, without a value, whose score is the sink.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = torch.zeros_like(mask, dtype=case.dtype).masked_fill_(~mask, -torch.inf)
        column = sinks_H.to(case.dtype)[:, None, None].expand(-1, length, -1)
        mask = torch.cat([bias.expand(heads, -1, -1), column], dim=2)[None]
    # Of the backends these differentiate a mask.
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with nullcontext() if sinks_H is None else sdpa_kernel(backends):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=case.scale)


def check(case: Case) -> dict[str, Finding]:
    """Run a case and compare every tensor; one whose share is above 1 is a failure."""
    x = make_case_inputs(case)
    table = case.forest.table(case.window, case.device)
    with poisoned(case.device):
        found = attend(case, x, table)
    return compare(case, x, found)


def compare(case: Case, x: Inputs, found: dict[str, Tensor]) -> dict[str, Finding]:
    """Findings by tensor, for what `attend` returned."""
    exact = x.to(torch.float64)
    options = {"scale": case.scale, "softcap": case.softcap, "window": case.window}
    with torch.device(case.device):
        o, lse = path_attention(case.forest, exact, **options)
    truth = gradients(o, exact) | {"o": o.detach()}
    torchs = torch_attention(case, exact)
    usual = gradients(torchs, exact) | {"o": torchs.detach()}
    # dP - dO . O, each a float32 sum, cancels: to zero where a query has a single key.
    keys = max(_longest(a) for a in (x.q, x.k, x.cache_k) if a is not None)
    values = max(_longest(a) for a in (x.v, x.cache_v) if a is not None)
    cancelling = case.scale * keys * values * x.do.double().norm().item()
    floor = 4 * torch.finfo(torch.float32).eps * cancelling
    if exact.sinks is not None:
        # A flash backward takes O as it was rounded; torch's for masks may have it in float32.
        one, _ = _roundings(case.dtype, 1)
        floor += one * case.scale * keys * (exact.do * o.detach()).norm().item()

    findings = {}
    for name in truth.keys() - {"sinks"}:
        spans = (
            _arena_places(case.forest)
            if name.startswith("cache")
            else _microbatch_places(case.forest)
        )
        findings[name] = _compare(
            _squares(found[name] - truth[name]),
            _squares(usual[name] - truth[name]),
            _squares(truth[name]),
            spans,
            case.dtype,
            truth[name].shape[1] * sum(map(len, spans)),
            floor if name in ("q", "k", "cache_k") else 0.0,
        )
    if exact.sinks is not None:
        # The gradient is a sum over queries, of terms that carry the rounding of their output.
        terms = (exact.sinks.detach()[:, None] - lse).exp() * (exact.do * o.detach()).sum(-1).T
        error, normal = ((a["sinks"] - truth["sinks"]).norm().item() for a in (found, usual))
        (one, allowed), size = _roundings(case.dtype, len(terms)), terms.norm().item()
        assert normal <= 50 * one * size, f"torch errs by {normal} of {size}: no yardstick"
        # Torch's error too is the norm of few numbers, which varies as _roundings says.
        varies = 1 + 4 / math.sqrt(2 * len(terms))
        findings["sinks"] = _finding(error, 2 * varies * normal + allowed * size, "whole")
    # A float32 sum of fast exponentials; a GPU's fast tanh errs by 2^-11, which softcap multiplies.
    error = (found["lse"].double() - lse).abs().max().item()
    findings["lse"] = _finding(error, 2e-4 + case.softcap * 2**-11, "whole")
    return findings


def _roundings(dtype: torch.dtype, independent: int) -> tuple[float, float]:
    """The error of one rounding, relative to a norm, and what is allowed for it.

    Rounding to nearest errs uniformly by at most eps/2: by eps/2/sqrt(3) in the root mean square. A
    result may be rounded once more than torch's, whose is exact where there is a single key. And a
    norm of n independent errors, one a token and head, varies by 1/sqrt(2n) of itself, ours and
    torch's, which matters below a hundred: two tokens of four heads.
    """
    one = torch.finfo(dtype).eps / 2 / math.sqrt(3)
    return one, one * (1 + 4 / math.sqrt(independent))


def _compare(
    error_T: np.ndarray,
    usual_T: np.ndarray,
    size_T: np.ndarray,
    spans: list[np.ndarray],
    dtype: torch.dtype,
    independent: int,
    floor: float,
) -> Finding:
    """The whole tensor by the bar, and no segment far outside of what the whole may have."""
    owned = np.concatenate(spans)
    if np.delete(error_T, owned).any():
        return Finding(math.inf, None, "places that no segment owns")
    one, allowed = _roundings(dtype, independent)
    error, usual, size = (math.sqrt(a[owned].sum()) for a in (error_T, usual_T, size_T))
    assert usual <= 50 * one * size + floor, f"torch errs by {usual} of {size}: no yardstick"
    findings = [_finding(error, 2 * usual + allowed * size + floor, "whole")]
    for span in spans:
        # Relative to an average segment of its length where it is less, for what cancels is small.
        part = math.sqrt(max(size_T[span].sum(), size_T[owned].mean() * len(span)))
        bar = SEGMENT_LENIENCE * (usual / size + allowed) * part + floor if size else floor
        where = f"{len(span)} tokens from {span[0]}"
        findings.append(_finding(math.sqrt(error_T[span].sum()), bar, where))
    worst = max(findings, key=lambda finding: finding.share)
    told = independent >= 100 and size > 0 and math.isfinite(error)
    return replace(worst, ratio=error / max(usual, one * size) if told else None)


def _finding(error: float, bar: float, where: str) -> Finding:
    if error == 0:
        return Finding(0.0, None, where)
    if not math.isfinite(error) or bar == 0:
        return Finding(math.inf, None, f"{where}: {error} where {bar} is allowed")
    return Finding(error / bar, None, where)


def _squares(x_THD: Tensor) -> np.ndarray:
    return x_THD.double().square().sum((1, 2)).cpu().numpy()


def _longest(x_THD: Tensor) -> float:
    """The largest norm of a vector; places that no one reads are NaN."""
    return x_THD.detach().double().norm(dim=-1).nan_to_num(0).max().item()


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _microbatch_places(forest: Forest) -> list[np.ndarray]:
    return [forest.places[s] for s in forest.inside]


def _arena_places(forest: Forest) -> list[np.ndarray]:
    return [forest.places[s] for s, external in enumerate(forest.external) if external]
