"""Every kernel against the bar of rounding, on every shape that a microbatch can have.

What is marked gpu calls the same functions as what runs on the CPU. A kernel that cannot run where
it is wanted is skipped with its reason; what a kernel's record refuses has to be refused.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    RECORDS,
    Case,
    Forest,
    attend,
    check_rounding,
    make_forest,
    poisoned,
    random_forest,
)
from test_attention_kernels import only
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import (
    AttentionTable,
    CacheSlice,
    fa4,
    operator,
    shared_attention,
)
from forkpoint.tree import FROM_CACHE, FROM_OWN, LaunchLayout, Table

BF16, FP16 = torch.bfloat16, torch.float16
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PREFIXES = (1, 15, 16, 31, 63, 64, 127, 128, 129, 255, 256, 257, 513, 1024)
SUFFIXES = (1, 7, 8, 15, 16, 31, 64, 128, 256)


def kernels(*on_cuda: str, on_cpu: tuple[str, ...] = ("cpu_flash",), also: tuple = ()) -> list:
    """Parameters (device, kernel, *also)."""
    return [pytest.param("cpu", name, *also) for name in on_cpu] + [
        pytest.param("cuda", name, *also, marks=GPU) for name in on_cuda
    ]


def make_case(device: str, kernel: str, forest: Forest, **changes: Any) -> Case:
    """In bfloat16, with the heads that tests share, for kernels compile for each."""
    if kernel != "auto" and device not in (RECORDS[kernel].device_types or (device,)):
        pytest.skip(f"{kernel} runs on other devices")
    why = kernel != "auto" and RECORDS[kernel].refuses_device(torch.device(device))
    if why:
        pytest.skip(why)
    few = {"heads": (4, 2), "dims": (32, 32)}
    sizes = few if device == "cpu" else {"heads": (8, 2), "dims": (128, 128)}
    return Case(forest, kernel, device=device, **{"dtype": BF16, **sizes, **changes})


def check(case: Case) -> None:
    if case.refusal() is None:
        check_rounding(case)
    else:
        with pytest.raises(UnsupportedError, match=f"{case.kernel!r} cannot serve"):
            attend(case, case.inputs())


def grid_forest(prefix: int, place: str) -> Forest:
    """All suffixes over one length of prefix, in the microbatch or in the cache, or as siblings."""
    n = len(SUFFIXES)
    if place == "siblings":
        return make_forest([-1, *[0] * n], [prefix, *SUFFIXES], [0])
    external = [*range(n)] if place == "cache" else []
    return make_forest([*[-1] * n, *range(n)], [*[prefix] * n, *SUFFIXES], external, by_level=True)


GRID = kernels(on_cpu=("reference", "cpu_flash"), also=(63, BF16))
for prefix in PREFIXES:
    GRID += kernels("fa4", "fa2", on_cpu=(), also=(prefix, BF16))
    GRID += kernels("fa4", "fa2", on_cpu=(), also=(prefix, FP16)) if prefix % 3 == 0 else []


@pytest.mark.parametrize(("device", "kernel", "prefix", "dtype"), GRID)
def test_boundary_grid(device: str, kernel: str, prefix: int, dtype: torch.dtype) -> None:
    for place, counts in {"microbatch": [18, 9], "cache": [9, 9], "siblings": [9, 1]}.items():
        forest = grid_forest(prefix, place)
        assert [call.count for call in forest.table().calls] == counts
        check(make_case(device, kernel, forest, dtype=dtype))


@pytest.mark.parametrize(("device", "kernel"), kernels("cudnn", "fa4"))
def test_boundary_grid_of_equal_lengths(device: str, kernel: str) -> None:
    more = [(1024, 1), (513, 7), (257, 128), (64, 256), (129, 64), (16, 128), (1, 256)]
    pairs = [*zip(PREFIXES, itertools.cycle(SUFFIXES), strict=False), *more]
    for prefix, suffix in pairs if device == "cuda" else pairs[-3:]:
        case = make_case(device, kernel, make_forest([-1, 0, 0, 0], [prefix, *[suffix] * 3], [0]))
        if kernel == "cudnn" and suffix == 1:
            with pytest.raises(UnsupportedError, match="more than one query or more than one key"):
                attend(case, case.inputs())
        else:
            check(case)


@pytest.mark.parametrize(
    ("device", "kernel", "prefix", "dtype"),
    [
        param
        for p, d in ((1, BF16), (63, FP16), (128, BF16), (191, BF16), (513, BF16), (1024, FP16))
        for param in kernels("fa4", on_cpu=(), also=(p, d))
    ],
)
def test_boundary_grid_in_long_tiles(
    device: str, kernel: str, prefix: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As taken for long microbatches; here also where lengths fill a small part of one tile."""
    if not fa4._processors(torch.device("cuda")):
        pytest.skip(f"it needs flash-attn-4 {fa4.TUNED} and compute capability 9")
    # On one multiprocessor two tiles are two rounds already, and long ones are as good as free.
    monkeypatch.setattr(fa4, "_processors", lambda _: 1)
    monkeypatch.setattr(fa4, "LONG_TILE_TIME", 0.0)
    for heads in ((8, 2), (4, 4), (28, 4)):
        for place in ("microbatch", "cache", "siblings"):
            case = make_case(device, kernel, grid_forest(prefix, place), dtype=dtype, heads=heads)
            x, table = case.inputs(), case.forest.table(0, device)
            first = table.calls[0]
            assert fa4._tile(x.q, x.v, first, 0.0, 0) == fa4.LONG_TILE_OPTIONS
            check(case)


GROUPS = [-1, -1, -1, 0, 0, 0, 1, 1, 2, 2, 2, 2], [70, 300, 1, 5, 200, 64, 1, 129, 33, 90, 140, 2]
LEVELS = [-1, 0, 1, 1, 0, 4, 4, 4, -1, 8, 9], [150, 63, 40, 1, 130, 65, 165, 7, 3, 129, 50]
CACHED = make_forest(*LEVELS, [0, 1, 4, 8])
RAGGED = {
    "groups in one launch": make_forest(*GROUPS, by_level=True),
    "groups in many launches": make_forest(*GROUPS),
    "groups below the cache": make_forest(*GROUPS, [0, 1, 2], by_level=True),
    "three levels": make_forest(*LEVELS),
    "three levels by level": make_forest(*LEVELS, by_level=True),
    "three levels, the upper in the cache": CACHED,
    "no prefix": make_forest([-1] * 5, [200, 1, 64, 129, 17]),
    "groups of one": make_forest([-1, 0, -1, 2, -1, 4], [140, 9, 1, 150, 64, 64], [0]),
    "one token": make_forest([-1], [1]),
    "one token below one": make_forest([-1, 0], [1, 1], [0]),
}
FLAT = make_forest([-1, *[0] * 4], [300, *[150] * 4], [0])
EQUAL = {
    "flat": FLAT,
    "two levels in the cache": make_forest([-1, 0, 1, 1, 1], [65, 200, *[140] * 3], [0, 1]),
    "in the microbatch": make_forest([-1, -1, 0, 1], [150] * 4, by_level=True),
}
HEADS = {
    "grouped": ((4, 2), (32, 32)),
    "one key head": ((8, 1), (96, 96)),
    "256": ((8, 2), (256, 256)),
    "16 to 1": ((16, 1), (128, 128)),
    "latent": ((4, 4), (192, 128)),
    "as many": ((4, 4), (64, 64)),
}


def forests_for(kernel: str, *ragged: Forest) -> list[Forest]:
    """One whose sequences have one length, and these where the kernel takes them."""
    return [FLAT, *(ragged if kernel == "auto" or RECORDS[kernel].ragged else ())]


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn", "auto"))
def test_forests(device: str, kernel: str) -> None:
    for forest in {**EQUAL, **(RAGGED if kernel != "cudnn" else {})}.values():
        check(make_case(device, kernel, forest, fused=True))


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn"))
@pytest.mark.parametrize("name", ["as many", *(n for n in HEADS if n != "as many")])
def test_heads_and_head_dims(device: str, kernel: str, name: str) -> None:
    if device == "cpu" and name != "as many":
        pytest.skip("on CPUs sizes of heads change nothing")
    heads, dims = HEADS[name]
    ragged = make_forest([-1, 0, 0, -1, 3], [300, 150, 170, 200, 131], [0])
    for forest in forests_for(kernel, ragged):
        check(make_case(device, kernel, forest, heads=heads, dims=dims, fused=True))


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn", "reference"))
def test_windows_sinks_and_softcap(device: str, kernel: str) -> None:
    windows = [{"window": w, "sinks": w == 64} for w in (1, 5, 64, 1000)]
    for options in (
        *(windows if device == "cuda" else windows[2:3]),
        {"sinks": True},
        {"softcap": 1.5},
    ):
        for forest in forests_for(kernel, RAGGED["three levels"], CACHED):
            check(make_case(device, kernel, forest, **options))


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "auto", on_cpu=()))
@pytest.mark.parametrize("seed", range(40))
def test_random_forests(device: str, kernel: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, dims = list(HEADS.values())[int(rng.integers(len(HEADS)))]
    options = {
        "heads": heads,
        "dims": dims,
        "dtype": (BF16, FP16)[seed % 2],
        "sinks": seed % 4 == 0,
    }
    longest = int(700 ** rng.uniform(0.3, 1)) + 1
    forest = random_forest(seed, segments=int(rng.integers(2, 13)), longest=longest)
    check(make_case(device, kernel, forest, seed=seed, window=64 * (seed % 5 == 0), **options))


@pytest.mark.parametrize(("device", "kernel"), kernels("padded", on_cpu=()))
@pytest.mark.parametrize("lengths", [[2048], [70, 2049, 1, 5, 3001, 4608], [8700, 300], [17_000]])
def test_long_sequences(device: str, kernel: str, lengths: list[int]) -> None:
    for fused in (False, True):
        check(make_case(device, kernel, make_forest([-1] * len(lengths), lengths), fused=fused))


def below_a_prefix(lengths: list[int], keys: int) -> AttentionTable:
    """Causal sequences of these lengths that all read a prefix of `keys` tokens."""
    causal = LaunchLayout(FROM_OWN, True, 0, 0, tuple(lengths), tuple(lengths))
    rectangle = LaunchLayout(FROM_CACHE, False, 0, 0, (sum(lengths),), (keys,))
    return AttentionTable(Table((causal, rectangle)), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_groups_of_heads_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a causal launch with a long sequence and short ones, and a rectangle."""
    torch.manual_seed(0)
    lengths, keys, dim = [4096, 300, 7], 6000, 128
    total = sum(lengths)
    shapes = ((total, 16), (total, 4), (total, 4), (total, 16), (keys, 4), (keys, 4))
    q, k, v, do, *prefix = (torch.randn(*s, dim, dtype=BF16, device="cuda") for s in shapes)

    def gradients() -> list[Tensor]:
        grads = [torch.zeros(x.shape, device="cuda") for x in prefix]
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        table = below_a_prefix(lengths, keys)
        o, _ = shared_attention(
            *inputs, table=table, cache=CacheSlice(*prefix, *grads), scale=dim**-0.5
        )
        o.backward(do)
        return [*(x.grad for x in inputs), *grads]

    whole = gradients()
    monkeypatch.setattr(operator, "REPEATED_BYTES", 1)
    for found, expected in zip(gradients(), whole, strict=True):
        assert (found - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_more_elements_than_an_index_of_32_bits() -> None:
    """cuDNN's backward is wrong for them: the whole is beside its two halves."""
    count, length, keys, heads, dim = 132, 4096, 256, (16, 4), 256
    needed = 24 * count * length * heads[0] * dim
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"the device has less than {needed >> 30} GiB free")
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(count * length, h, dim, dtype=BF16, device="cuda") for h in (16, 4, 4, 16)
    )
    prefix = torch.randn(2, keys, heads[1], dim, dtype=BF16, device="cuda")

    def attended(begin: int, end: int) -> list[Tensor]:
        """Output, and gradients of queries, keys and the prefix's keys."""
        own, cache_grads = slice(begin * length, end * length), torch.zeros(prefix.shape).cuda()
        inputs = [x[own].detach().requires_grad_() for x in (q, k, v)]
        table = below_a_prefix([length] * (end - begin), keys)
        cache = CacheSlice(*prefix, *cache_grads)
        o, _ = shared_attention(*inputs, table=table, cache=cache, scale=dim**-0.5)
        o.backward(do[own])
        return [o.detach(), *(x.grad for x in inputs[:2]), cache_grads]

    half = count // 2
    whole = attended(0, count)
    for begin in (0, half):
        found = attended(begin, begin + half)
        for x, y in zip(whole[:3], found[:3], strict=True):
            part = x[begin * length : (begin + half) * length]
            for got, expected in zip(part.split(65_536), y.split(65_536), strict=True):
                assert (got.float() - expected).norm() < 1e-2 * expected.float().norm()
        whole[3] = whole[3] - found[3]
    assert whole[3].norm() < 1e-2 * found[3].norm()


@pytest.mark.parametrize(
    ("device", "first", "second"),
    [("cpu", "cpu_flash", "reference"), pytest.param("cuda", "cudnn", "fa2", marks=GPU)],
)
def test_kernels_may_differ_within_a_microbatch(
    device: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As "auto" has it without FA4: one kernel where lengths are equal, another elsewhere."""
    case, ran = make_case(device, "auto", grid_forest(257, "siblings")), []

    def forward(name: str) -> Callable:
        def counted(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return RECORDS[name].forward(*args, **options)

        return counted

    chosen = (
        dataclasses.replace(RECORDS[first], ragged=False, auto_pairs=0, forward=forward(first)),
        dataclasses.replace(RECORDS[second], forward=forward(second)),
    )
    with only(monkeypatch, *chosen):
        check(case)
    assert ran == [second, first]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn", "auto"))
def test_runs_repeat_bit_by_bit_and_wait_for_no_device(
    device: str, kernel: str, window: int
) -> None:
    ragged = random_forest(18, segments=40, longest=30 if device == "cpu" else 300)
    assert ragged.cache_tokens > 0
    for forest in forests_for(kernel, ragged):
        case = make_case(device, kernel, forest, window=window, sinks=True)
        if case.refusal(deterministic=True) is not None:
            with pytest.raises(UnsupportedError, match=f"{kernel!r} cannot serve"):
                attend(case, case.inputs(), deterministic=True)
            continue
        x, table = case.inputs(), forest.table(window, device)
        first = attend(case, x, table, deterministic=True)
        if device == "cuda":
            attend(case, x, table)  # compiles, or plans
            torch.cuda.set_sync_debug_mode("error")
        try:
            others = [attend(case, x, table, deterministic=True) for _ in range(4)]
            attend(case, x, table)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        for again in others:
            assert all(torch.equal(again[name], first[name]) for name in first)


SUMS = [
    *[(count, 2, 64, BF16, BF16) for count in (1, 2, 4, 5, 9)],
    *[(2, 3, dim, BF16, BF16) for dim in (8, 80, 96, 192, 256)],
    *[(5, 2, 64, FP16, FP16), (5, 2, 64, BF16, torch.float32), (3, 1, 64, torch.float32, BF16)],
    (6, 2, 64, torch.float32, torch.float32),
]


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("triton") is None
    or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="there is no CUDA device, nor Triton with its interpreter (TRITON_INTERPRET=1)",
)
@pytest.mark.parametrize("over", [False, True], ids=["into_new", "over_the_first"])
@pytest.mark.parametrize(("weighted", "sinks"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("count", "heads", "dim", "given", "wanted"), SUMS, ids=str)
def test_fused_sums(
    count: int,
    heads: int,
    dim: int,
    given: torch.dtype,
    wanted: torch.dtype,
    weighted: bool,
    sinks: bool,
    over: bool,
) -> None:
    """Within one rounding of the sum in float64, of parts that are ranges and may be strided."""
    from forkpoint.ops.attention.triton_sums import MOST_PARTS, sum_parts

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, tokens = np.random.default_rng(count), 83
    torch.manual_seed(count)
    parts: list[tuple[int, Tensor]] = []
    lses: list[Tensor] = []
    total = torch.full((heads, tokens), -torch.inf, device=device)
    for at in range(count):
        begin = int(rng.integers(tokens)) if at else 0
        length = int(rng.integers(1, tokens - begin + 1)) if at else tokens
        wide = torch.randn(length, heads + 1, dim + 8 * (at % 2)).to(given)
        part = wide.to(device)[:, 1:, :dim]
        parts.append((begin, part.contiguous() if over else part))
        lses.append(3 * torch.randn(heads, length).to(device))
        view = total[:, begin : begin + length]
        view.copy_(torch.logaddexp(view, lses[-1]))
    if sinks:
        total += 0.7
    expected = torch.zeros(tokens, heads, dim, dtype=torch.float64, device=device)
    magnitude = expected.clone()
    for (begin, part), lse in zip(parts, lses, strict=True):
        here, term = slice(begin, begin + len(part)), part.double()
        if weighted:
            term = term * (lse.double() - total[:, here].double()).exp().T[:, :, None]
        expected[here] += term
        magnitude[here] += term.abs()
    with poisoned(device):
        options = {"lses_HT": lses, "total_HT": total} if weighted else {}
        found = sum_parts(parts, wanted, alone_is_whole=not sinks, **options)
    # In float32 each turn goes over the one before.
    in_place = over and given == wanted and (count <= MOST_PARTS or wanted == torch.float32)
    assert (found.data_ptr() == parts[0][1].data_ptr()) == in_place
    assert found.dtype == wanted and found.is_contiguous()
    info, eps = torch.finfo(wanted), torch.finfo(torch.float32).eps
    # To nearest on a GPU; Triton's interpreter truncates to bfloat16.
    rounding = info.eps / 2 if device == "cuda" else info.eps
    bar = rounding * expected.abs().clamp(min=info.smallest_normal) + 16 * eps * magnitude
    assert ((found.double() - expected).abs() <= bar).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_poison_reaches_what_is_allocated(device: str) -> None:
    kept = [torch.zeros(n, device=device) for n in (5, 1_000, 700_000)]
    with poisoned(device):
        sizes = (1, 100, 10_000, 300_000, 5_000_000)
        found = [torch.empty(n, device=device) for n in sizes]
        found += [torch.ops.aten.empty_strided.default([n], [1], device=device) for n in sizes]
    # All of them first: what looks at one writes to memory of its own, which is free again after.
    assert all(x.isnan().all() for x in found)
    assert not any(x.any() for x in kept)
