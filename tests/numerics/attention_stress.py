"""The numerical bar of attention kernels, and a run of random configurations against it.

    python tests/numerics/attention_stress.py --configurations 2000 --seconds 240 --json PATH

The bar, for the output and every gradient: the error against float64 is at most twice that of
torch's own attention over whole paths in the same dtype, plus one rounding. Configuration i of a
run is a function of its seed alone, seed + i: `--seed` with it and `--configurations 1` repeats it.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from test_attention_forest import Forest, Inputs, gradients, make_forest, path_attention
from torch import Tensor

from forkpoint.ops.attention import (
    KERNELS,
    ArenaSlice,
    AttentionTable,
    accumulate_dtype,
    shared_attention,
)

RECORDS = {kernel.name: kernel for kernel in KERNELS}
BF16, FP16 = torch.bfloat16, torch.float16

PROFILES: tuple[tuple[torch.dtype, tuple[int, int], tuple[int, int]], ...] = (
    (BF16, (8, 2), (128, 128)),
    (FP16, (8, 2), (128, 128)),
    (BF16, (4, 4), (64, 64)),
    (BF16, (8, 1), (96, 96)),
    (BF16, (8, 2), (256, 256)),
    (BF16, (16, 1), (128, 128)),
    (BF16, (4, 4), (192, 128)),
)
"""dtype, (H, K) and (D, E): few, since kernels compile or plan for each. Every head dim and every
ratio of heads that matters is in one of them."""


@dataclass(frozen=True)
class Case:
    """One attention to be checked; `fused` makes q, k and v strided views of one tensor."""

    forest: Forest
    kernel: str
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = BF16
    device: str = "cpu"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    fused: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    @property
    def refusal(self) -> str | None:
        """Why the kernel's record refuses this attention, or None."""
        if self.kernel == "auto":
            return None
        asked = (torch.device(self.device), self.dtype, *self.dims, self.softcap, self.window)
        return RECORDS[self.kernel].refusal(*asked, deterministic=False)


@dataclass(frozen=True)
class Finding:
    """How one tensor compares: its error as a share of the bar (at most 1 passes), and over that of
    torch's own attention, or over one rounding where torch's is smaller."""

    share: float
    ratio: float
    where: str


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
    # From large to small, so that what is free inside of blocks in use is filled as well.
    sizes = [1 << 30, *[1 << 23] * 8, *[1 << 21] * 24]
    sizes += [1 << power for power in range(20, 8, -1) for _ in range(16)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF) for size in sizes]
    del blocks
    yield


def make_case_inputs(case: Case) -> Inputs:
    """Normal inputs on the case's device; slots of the arena that no segment owns hold NaN."""
    generator = torch.Generator(case.device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    (h, k), (d, e), forest = case.heads, case.dims, case.forest
    rows, slots = forest.row_tokens, forest.arena_tokens
    if case.fused and d == e:
        made = list(normal(rows, h + 2 * k, d).split([h, k, k], dim=1))
    else:
        made = [normal(rows, h, d), normal(rows, k, d), normal(rows, k, e)]
    arena = [normal(slots, k, d), normal(slots, k, e)] if slots else [None, None]
    free = torch.ones(slots, dtype=torch.bool)
    free[np.concatenate([[], *_arena_slots(forest)])] = False
    for x in arena:
        if x is not None:
            x[free.to(case.device)] = torch.nan
    leaves = [*made, *arena, normal(h) if case.sinks else None]
    return Inputs(*[x if x is None else x.requires_grad_() for x in leaves], normal(rows, h, e))


def attend(
    case: Case, x: Inputs, table: AttentionTable, *, deterministic: bool = False
) -> dict[str, Tensor]:
    """What the operator computes: o, lse and gradients by name. Waits for the device nowhere."""
    arena = None
    if x.arena_k is not None and x.arena_v is not None:
        wide = accumulate_dtype(case.dtype)
        # Of gradients that were there before: theirs are added.
        grads = [torch.ones_like(a.detach(), dtype=wide) for a in (x.arena_k, x.arena_v)]
        arena = ArenaSlice(x.arena_k.detach(), x.arena_v.detach(), *grads)
    o, lse = shared_attention(
        x.q,
        x.k,
        x.v,
        table=table,
        arena=arena,
        sinks=x.sinks,
        scale=case.scale,
        softcap=case.softcap,
        window=case.window,
        kernel=case.kernel,
        deterministic=deterministic,
    )
    leaves = {"q": x.q, "k": x.k, "v": x.v} | ({} if x.sinks is None else {"sinks": x.sinks})
    found = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), x.do), strict=True))
    if arena is not None:
        assert arena.grad_k is not None and arena.grad_v is not None
        found |= {"arena_k": arena.grad_k - 1, "arena_v": arena.grad_v - 1}
    return found | {"o": o.detach(), "lse": lse}


def torch_attention(case: Case, x: Inputs) -> Tensor:
    """o [T, H, E] by torch's own attention in the case's dtype, of inputs in float64.

    Paths from the roots to the leaves are sequences of one padded batch, with its default backend
    for it; a segment's outputs are taken from the first path through it. The gradients of a path
    are rounded as torch rounds them, and summed over paths exactly. With softcap, which it lacks,
    as written down in eager code.
    """
    forest, device = case.forest, case.device
    leaves = [s for s in forest.inside if s not in forest.parents]
    paths = [forest.path(leaf) for leaf in leaves]
    longest = max(map(len, paths))
    # On CUDA in few shapes: cuDNN plans for each.
    batch, length = (_bucket(len(leaves), 4), _bucket(longest, 512)) if device != "cpu" else (
        len(leaves), longest
    )  # fmt: skip
    rows, slots = forest.row_tokens, forest.arena_tokens
    index = np.full((batch, length), rows + slots)
    at = np.zeros((2, rows), dtype=np.int64)
    for b, path in reversed(list(enumerate(paths))):
        index[b, : len(path)] = path
        inside = path < rows
        at[:, path[inside]] = np.stack([np.full(len(path), b), np.arange(len(path))])[:, inside]
    index_BL = torch.from_numpy(index).to(device)

    def gather(own: Tensor, arena: Tensor | None, heads: int) -> Tensor:
        # Tokens of the arena have no queries, and padding has nothing: zeros, read by no one.
        arena = own.new_zeros(slots, *own.shape[1:]) if arena is None else arena
        pool = torch.cat([own, arena, own.new_zeros(1, *own.shape[1:])])
        x_BHLD = pool[index_BL].to(case.dtype).transpose(1, 2)
        return x_BHLD.repeat_interleave(heads // x_BHLD.shape[1], 1) if heads else x_BHLD

    masked = bool(case.window or x.sinks is not None)
    heads = case.heads[0] if masked or case.softcap else 0
    q = gather(x.q, None, 0)
    k, v = gather(x.k, x.arena_k, heads), gather(x.v, x.arena_v, heads)
    i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    seen = (j <= i) & (j > i - (case.window or length))
    if case.softcap:
        assert x.sinks is None, "there is no yardstick for sinks with softcap"
        scores = case.softcap * torch.tanh(q @ k.mT * case.scale / case.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        o = scores.softmax(-1, dtype=torch.float32).to(case.dtype) @ v
    elif masked:
        mask = seen
        if x.sinks is not None:
            # A key without a value whose score is the sink, and seven that no one sees: the backend
            # wants rows of a multiple of 8.
            k, v = F.pad(k, (0, 0, 0, 8)), F.pad(v, (0, 0, 0, 8))
            bias = torch.zeros(heads, length, length + 8, dtype=case.dtype, device=device)
            bias[:, :, :length].masked_fill_(~seen, -torch.inf)
            bias[:, :, length + 1 :] = -torch.inf
            column = F.one_hot(torch.tensor(length, device=device), length + 8).to(case.dtype)
            mask = (bias + x.sinks.to(case.dtype)[:, None, None] * column)[None]
        o = F.scaled_dot_product_attention(q, k, v, mask, scale=case.scale)
    else:
        gqa = case.heads[0] != case.heads[1]
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=case.scale, enable_gqa=gqa
        )
    b, t = torch.from_numpy(at).to(device)
    return o.transpose(1, 2)[b, t].double()


def _bucket(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


def check(case: Case) -> dict[str, Finding]:
    """Run a case and compare each tensor; a finding with a share above 1 is a failure."""
    x = make_case_inputs(case)
    table = case.forest.table(case.window, case.device)
    with poisoned(case.device):
        found = attend(case, x, table)

    exact = x.to(torch.float64)
    options = {"scale": case.scale, "softcap": case.softcap, "window": case.window}
    with torch.device(case.device):
        o, lse = path_attention(case.forest, exact, **options)
    truth = gradients(o, exact) | {"o": o.detach()}
    own = torch_attention(case, exact)
    usual = gradients(own, exact) | {"o": own.detach()}
    findings = {
        name: _compare(case, exact, name, found[name], truth[name], usual[name], o, lse)
        for name in truth
    }
    # A float32 sum; a GPU's fast tanh has a relative error of 2^-11, and softcap is what it scales.
    error = (found["lse"].double() - lse).abs().max().item()
    findings["lse"] = _finding(error, 1e-4 + case.softcap * 2**-11, error, "anywhere")
    return findings


def _compare(
    case: Case, x: Inputs, name: str, found: Tensor, truth: Tensor, usual: Tensor, o: Tensor, lse
) -> Finding:
    """The whole tensor by the bar, and no segment far outside of what the whole one has."""
    # Rounding to nearest errs uniformly by at most half an eps: this much in the root mean square.
    # A result is rounded once more than torch's may be, where torch's is exact (a single key).
    rounding = torch.finfo(case.dtype).eps / 2 / math.sqrt(3)
    error, normal, size = (
        x.double().square().flatten(1 if name != "sinks" else 0).sum(-1).cpu().numpy()
        for x in (found.double() - truth, usual - truth, truth)
    )
    if name == "sinks":
        # One number a head, a sum over queries of dO . O, whose terms carry the rounding of O: few
        # numbers that vary, so three standard deviations.
        assert x.sinks is not None
        terms = (x.sinks[:, None] - lse).exp() * (x.do * o).sum(-1).T
        atol = 3 * rounding * terms.norm().item()
        return _finding(math.sqrt(error), 2 * math.sqrt(normal) + atol, math.sqrt(normal), "sinks")
    arena = name.startswith("arena")
    spans = _arena_slots(case.forest) if arena else [
        case.forest.slots[s] for s in case.forest.inside
    ]  # fmt: skip
    owned = np.concatenate(spans)
    free = np.delete(np.arange(len(error)), owned)
    if error[free].any():
        return Finding(math.inf, math.inf, "slots that no segment owns")
    floor = 0.0
    if name not in ("o", "v", "arena_v"):
        # dP - dO . O, each a float32 sum, cancels: to zero where a query has a single key.
        peaks = [_longest(a) for a in (x.q, x.k, x.arena_k) if a is not None]
        values = max(_longest(a) for a in (x.v, x.arena_v) if a is not None)
        floor = 4 * torch.finfo(torch.float32).eps * case.scale * values * max(peaks)
        floor *= x.do.norm().item()
    whole_error, whole_usual, whole = (math.sqrt(a[owned].sum()) for a in (error, normal, size))
    bar = 2 * whole_usual + rounding * whole + floor
    least = max(whole_usual, rounding * whole, floor)
    findings = [_finding(whole_error, bar, least, "whole")]
    for span in spans:
        # Few numbers vary, and what cancels is small: a segment may have the error of an average
        # one of its length, several times over.
        part = math.sqrt(max(size[span].sum(), size[owned].mean() * len(span)))
        bar = SEGMENT_LENIENCE * ((whole_usual / whole + rounding) * part if whole else 0) + floor
        where = f"{len(span)} tokens at {span[0]}"
        findings.append(_finding(math.sqrt(error[span].sum()), bar, least, where))
    worst = max(findings, key=lambda finding: finding.share)
    return Finding(worst.share, findings[0].ratio, worst.where)


SEGMENT_LENIENCE = 4.0


def _finding(error: float, bar: float, least: float, where: str) -> Finding:
    if error == 0:
        return Finding(0.0, 0.0, where)
    if not math.isfinite(error) or bar == 0:
        return Finding(math.inf, math.inf, f"{where}: {error} where {bar} is allowed")
    return Finding(error / bar, error / least, where)


def _longest(x_TKD: Tensor) -> float:
    """The largest norm of a vector; NaN marks those that no one reads."""
    return x_TKD.detach().norm(dim=-1).nan_to_num(0).max().item()


def _arena_slots(forest: Forest) -> list[np.ndarray]:
    return [forest.slots[s] for s, external in enumerate(forest.external) if external]


def random_case(seed: int, device: str, kernels: list[str], longest: int) -> Case:
    """The configuration of a seed: a profile, a kernel that takes it, a forest, a mask."""
    rng = np.random.default_rng(seed)
    profile = int(rng.integers(len(PROFILES)))
    dtype, heads, dims = PROFILES[profile]
    # A window is one more thing to compile for, so not in all profiles.
    window = int(rng.choice([1, 5, 64, 1000])) if profile in (0, 2) and rng.random() < 0.3 else 0
    sinks, fused = bool(rng.random() < 0.25), bool(rng.random() < 0.5)

    def case(kernel: str, forest: Forest) -> Case:
        return Case(
            forest, kernel, heads, dims, dtype, device, window, sinks=sinks, fused=fused, seed=seed
        )

    able = [name for name in kernels if case(name, _SMALL).refusal is None]
    kernel = able[int(rng.integers(len(able)))]
    ragged = kernel == "auto" or RECORDS[kernel].ragged
    return case(kernel, _ragged_forest(rng, longest) if ragged else _equal_forest(rng, longest))


_SMALL = make_forest([-1], [1])


def _ragged_forest(rng: np.random.Generator, longest: int) -> Forest:
    segments = int(rng.integers(1, 13))
    parents = [-1] + [int(rng.integers(-1, s)) for s in range(1, segments)]
    lengths = [
        round(longest ** rng.random()) if rng.integers(2) else int(rng.integers(1, longest + 1))
        for _ in parents
    ]
    external: list[int] = []
    share = rng.choice([0.0, 0.4, 0.8])
    for s, parent in enumerate(parents[:-1]):
        if (parent < 0 or parent in external) and rng.random() < share:
            external.append(s)
    return make_forest(parents, lengths, external, by_level=bool(rng.integers(2)))


def _equal_forest(rng: np.random.Generator, longest: int) -> Forest:
    """A path in the arena and equal segments below it, in few shapes: each is planned for."""
    levels, count = int(rng.integers(0, 3)), int(rng.choice([1, 4]))
    lengths = [int(n) for n in rng.choice([1, 17, 64, 127, 256, 513, 640], size=levels + 1)]
    lengths = [min(n, longest) for n in lengths]
    parents = [*range(-1, levels - 1), *[levels - 1] * count]
    return make_forest(parents, [*lengths, *lengths[-1:] * (count - 1)], [*range(levels)])


def run_seeds(
    seeds: list[int], device: str, kernels: list[str], longest: int, deadline: float
) -> list[dict]:
    """A record for each configuration, as many as there is time for."""
    records = []
    for seed in seeds:
        if time.time() > deadline:
            break
        case = random_case(seed, device, kernels, longest)
        record: dict = {
            "seed": seed, "kernel": case.kernel, "dtype": str(case.dtype), "heads": case.heads,
            "dims": case.dims, "window": case.window, "sinks": case.sinks,
            "segments": len(case.forest.lengths), "row_tokens": case.forest.row_tokens,
        }  # fmt: skip
        try:
            found = check(case)
        except Exception as error:  # one that fails is a finding, and the others run on
            record |= {"error": f"{type(error).__name__}: {error}"[:2000], "share": math.inf}
        else:
            worst = max(found, key=lambda name: found[name].share)
            record |= {
                "share": found[worst].share,
                "tensor": worst,
                "where": found[worst].where,
                "ratios": {n: f.ratio for n, f in found.items() if n not in ("lse", "sinks")},
            }
        records.append(record)
    return records


def summarise(records: list[dict]) -> dict[str, dict]:
    """By kernel: how many ran and failed, the largest share of the bar, the largest ratios."""
    table = {}
    for kernel in sorted({record["kernel"] for record in records}):
        mine = [record for record in records if record["kernel"] == kernel]
        fine = [record for record in mine if "ratios" in record]
        names = sorted({name for record in fine for name in record["ratios"]})
        table[kernel] = {
            "ran": len(mine),
            "failed": sum(record["share"] > 1 for record in mine),
            "worst_share_of_bar": max(record["share"] for record in mine),
            "worst_ratio_to_torch": {
                name: max(record["ratios"].get(name, 0.0) for record in fine) for name in names
            },
        }
    return table


def _tasks(seeds: list[int], workers: int) -> list[list[int]]:
    """Seeds of one profile in one process, which compiles for them once."""
    if workers == 1:
        return [seeds]
    profiles: list[list[int]] = [[] for _ in PROFILES]
    for seed in seeds:
        profiles[int(np.random.default_rng(seed).integers(len(PROFILES)))].append(seed)
    return [found for found in profiles if found]


def _run(tasks: list[list[int]], workers: int, run: Callable) -> Iterator[list[dict]]:
    if workers == 1:
        # In pieces, so that there is progress to see.
        for seeds in tasks:
            yield from (run(seeds[i : i + 50]) for i in range(0, len(seeds), 50))
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, seeds) for seeds in tasks]):
            yield done.result()


class _Share:
    """`run_seeds` with all but the seeds bound, which processes can be sent."""

    def __init__(self, *rest) -> None:
        self.rest = rest

    def __call__(self, seeds: list[int]) -> list[dict]:
        return run_seeds(seeds, *self.rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--configurations", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=240.0, help="start none after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--kernels", nargs="+", default=[*RECORDS, "auto"])
    parser.add_argument("--longest", type=int, default=700, help="tokens of a segment at most")
    parser.add_argument("--workers", type=int, default=1, help="processes; each has some profiles")
    parser.add_argument("--json", type=Path, help="where to write the summary")
    args = parser.parse_args()

    began = time.time()
    kernels = []
    for name in args.kernels:
        why = unavailable(name, args.device)
        if why is None:
            kernels.append(name)
        else:
            print(f"without {name}: {why}")
    seeds = list(range(args.seed, args.seed + args.configurations))
    run = _Share(args.device, kernels, args.longest, began + args.seconds)
    records: list[dict] = []
    for more in _run(_tasks(seeds, args.workers), args.workers, run):
        records += more
        failed = sum(record["share"] > 1 for record in records)
        print(f"{len(records)} of {len(seeds)}, {failed} failed, {time.time() - began:.0f} s")

    table = summarise(records)
    print(f"\n{'kernel':<12}{'ran':>6}{'failed':>8}{'of bar':>8}  error over torch's, worst")
    for kernel, row in table.items():
        ratios = "  ".join(f"{n} {r:.2f}" for n, r in row["worst_ratio_to_torch"].items())
        line = f"{kernel:<12}{row['ran']:>6}{row['failed']:>8}{row['worst_share_of_bar']:>8.2f}"
        print(f"{line}  {ratios}")
    failures = [record for record in records if record["share"] > 1]
    for record in failures:
        print(f"FAILED: {json.dumps(record)}")
    if len(records) < len(seeds):
        print(f"time was up: {len(seeds) - len(records)} configurations were not run")
    if args.json:
        summary = {
            "configurations": len(seeds),
            "ran": len(records),
            "failed": len(failures),
            "seed": args.seed,
            "seconds": round(time.time() - began, 1),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "kernels": table,
            "failures": failures,
        }
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if failures or len(records) < len(seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
