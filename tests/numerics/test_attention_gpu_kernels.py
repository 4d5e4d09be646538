"""Every kernel against the bar of attention_bar.py, on every shape that a microbatch can have.

What is marked gpu calls the same functions as what runs on the CPU, where they are proven with the
kernels that there are. A kernel that cannot run where it is wanted is skipped with its reason; what
a kernel's record refuses has to be refused.
"""

import dataclasses
import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch
from attention_bar import (
    RECORDS,
    Case,
    attend,
    check,
    make_case_inputs,
    poisoned,
    unavailable,
)
from attention_stress import BF16, FP16, PROFILES
from test_attention_forest import Forest, make_forest, random_forest
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import (
    AttentionTable,
    CacheSlice,
    Kernel,
    fa4,
    registry,
    select_kernel,
    shared_attention,
)
from forkpoint.ops.attention.table import read_launches
from lanes import slow_besides

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ON_CPU = ("reference", "cpu_flash")
PREFIXES = (1, 15, 16, 31, 63, 64, 127, 128, 129, 255, 256, 257, 513, 1024)
SUFFIXES = (1, 7, 8, 15, 16, 31, 64, 128, 256)


def kernels(*on_cuda: str, on_cpu: tuple[str, ...] = ON_CPU, also: tuple = ()) -> list:
    """Parameters (device, kernel, *also)."""
    plain = [
        pytest.param("cpu", name, *also, id="-".join([name, *map(str, also)])) for name in on_cpu
    ]
    return plain + [
        pytest.param("cuda", name, *also, id="-".join([f"{name}_cuda", *map(str, also)]), marks=GPU)
        for name in on_cuda
    ]


def make_case(device: str, kernel: str, forest: Forest, **changes) -> Case:
    """With the heads that tests share, for kernels compile for each: few on the CPU."""
    why = unavailable(kernel, device)
    if why is not None:
        pytest.skip(why)
    case = Case(forest, kernel, device=device)
    if device == "cpu":
        case = dataclasses.replace(case, heads=(4, 2), dims=(32, 32))
    return dataclasses.replace(case, **changes)


def assert_passes(case: Case) -> None:
    if case.refusal() is not None:
        with pytest.raises(UnsupportedError, match=f"{case.kernel!r} cannot serve"):
            check(case)
        return
    found = check(case)
    assert {"o", "q", "k", "v", "lse"} <= found.keys()
    assert ("cache_k" in found) == bool(case.forest.cache_tokens_)
    assert ("sinks" in found) == case.sinks
    failed = {name: one for name, one in found.items() if one.share > 1}
    assert not failed, failed


def grid_forest(prefix: int, place: str) -> Forest:
    """All suffixes over one length of prefix: each with a prefix of its own, in the microbatch or
    in the cache, which is one ragged launch; or as siblings below one."""
    n = len(SUFFIXES)
    if place == "siblings":
        return make_forest([-1, *[0] * n], [prefix, *SUFFIXES], [0])
    external = [*range(n)] if place == "cache" else []
    return make_forest([*[-1] * n, *range(n)], [*[prefix] * n, *SUFFIXES], external, by_level=True)


GRID = [
    *[param for p in (1, 16, 63) for param in kernels(also=(p, BF16))],
    *[param for p in PREFIXES for param in kernels("fa4", "fa2", on_cpu=(), also=(p, BF16))],
    *[
        param
        for p in (1, 63, 128, 513)
        for param in kernels("fa4", "fa2", on_cpu=(), also=(p, FP16))
    ],
    *kernels(also=(31, FP16)),
]


@pytest.mark.parametrize("place", ["microbatch", "cache", "siblings"])
@pytest.mark.parametrize(("device", "kernel", "prefix", "dtype"), GRID)
def test_boundary_grid(
    device: str, kernel: str, prefix: int, dtype: torch.dtype, place: str
) -> None:
    forest = grid_forest(prefix, place)
    launches, _, _ = forest.arrays()
    assert [microbatch[-1] for microbatch in launches] == {
        "microbatch": [18, 9],
        "cache": [9, 9],
        "siblings": [9, 1],
    }[place], "the grid is to be two launches of this many sequences"
    assert_passes(make_case(device, kernel, forest, dtype=dtype))


EQUAL_PAIRS = [
    *zip(PREFIXES, cycle(SUFFIXES), strict=False),
    *[(1024, 1), (513, 7), (257, 128), (64, 256), (129, 64), (16, 128), (1, 256)],
]


@pytest.mark.parametrize(("prefix", "suffix"), EQUAL_PAIRS)
@pytest.mark.parametrize(("device", "kernel"), kernels("cudnn", "fa4", on_cpu=("cpu_flash",)))
def test_boundary_grid_of_equal_lengths(device: str, kernel: str, prefix: int, suffix: int) -> None:
    case = make_case(device, kernel, make_forest([-1, 0, 0, 0], [prefix, *[suffix] * 3], [0]))
    if kernel == "cudnn" and suffix == 1:
        with pytest.raises(UnsupportedError, match="more than one query or more than one key"):
            check(case)
        return
    assert_passes(case)


def needs_measured_tiles() -> None:
    if not fa4._processors(torch.device("cuda")):
        pytest.skip(f"it needs flash-attn-4 {fa4.TUNED} and compute capability 9")


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (28, 4)], ids=str)
@pytest.mark.parametrize("place", ["microbatch", "cache", "siblings"])
@pytest.mark.parametrize(
    ("device", "kernel", "prefix", "dtype"),
    [
        param
        for p, d in ((1, BF16), (63, FP16), (128, BF16), (191, BF16), (513, BF16), (1024, FP16))
        for param in kernels("fa4", on_cpu=(), also=(p, d))
    ],
)
def test_boundary_grid_in_long_tiles(
    device: str,
    kernel: str,
    prefix: int,
    dtype: torch.dtype,
    place: str,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As taken for long microbatches; here also where lengths fill a small part of one tile."""
    needs_measured_tiles()
    # On one multiprocessor two tiles are two rounds already, and long ones are as good as free.
    monkeypatch.setattr(fa4, "_processors", lambda _: 1)
    monkeypatch.setattr(fa4, "LONG_TILE_TIME", 0.0)
    case = make_case(device, kernel, grid_forest(prefix, place), dtype=dtype, heads=heads)
    x, table = make_case_inputs(case), case.forest.table(0, device)
    first = read_launches(table.launches, table.cu_cpu, table.cu_device)[0]
    assert fa4._tile(x.q, x.v, first, 0.0, 0) == fa4.LONG_TILE_OPTIONS
    assert_passes(case)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", on_cpu=()))
def test_microbatches_of_three_thousand_tokens_take_long_tiles(
    device: str, kernel: str, count: int
) -> None:
    needs_measured_tiles()
    forest = make_forest([-1, *[0] * count], [700, *[3000 // count] * count], [0])
    case = make_case(device, kernel, forest)
    x, table = make_case_inputs(case), case.forest.table(0, device)
    launches = read_launches(table.launches, table.cu_cpu, table.cu_device)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        found = [fa4._tile(x.q, x.v, launch, 0.0, 0) for launch in launches]
        assert found == [fa4.LONG_TILE_OPTIONS] * len(launches)
    assert_passes(case)


GROUPS = [-1, -1, -1, 0, 0, 0, 1, 1, 2, 2, 2, 2], [70, 300, 1, 5, 200, 64, 1, 129, 33, 90, 140, 2]
LEVELS = [-1, 0, 1, 1, 0, 4, 4, 4, -1, 8, 9], [150, 63, 40, 1, 130, 65, 165, 7, 3, 129, 50]
FORESTS = {
    "ragged_groups_in_one_launch": make_forest(*GROUPS, by_level=True),
    "ragged_groups_in_many_launches": make_forest(*GROUPS),
    "ragged_groups_below_the_arena": make_forest(*GROUPS, [0, 1, 2], by_level=True),
    "three_levels": make_forest(*LEVELS),
    "three_levels_by_level": make_forest(*LEVELS, by_level=True),
    "three_levels_the_upper_in_the_arena": make_forest(*LEVELS, [0, 1, 4, 8]),
    "no_prefix": make_forest([-1] * 5, [200, 1, 64, 129, 17]),
    "groups_of_one": make_forest([-1, 0, -1, 2, -1, 4], [140, 9, 1, 150, 64, 64], [0]),
    "one_token": make_forest([-1], [1]),
    "one_token_below_one": make_forest([-1, 0], [1, 1], [0]),
}
EQUAL_FORESTS = {
    "flat": make_forest([-1, *[0] * 4], [300, *[150] * 4], [0]),
    "two_levels_in_the_arena": make_forest([-1, 0, 1, 1, 1], [65, 200, *[140] * 3], [0, 1]),
    "in_the_microbatch": make_forest([-1, -1, 0, 1], [150] * 4, by_level=True),
}


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "auto"))
def test_forests(device: str, kernel: str, name: str) -> None:
    assert_passes(make_case(device, kernel, FORESTS[name], fused=True))


@pytest.mark.parametrize("name", EQUAL_FORESTS)
@pytest.mark.parametrize(("device", "kernel"), kernels("cudnn", "fa4", on_cpu=("cpu_flash",)))
def test_forests_of_equal_lengths(device: str, kernel: str, name: str) -> None:
    assert_passes(make_case(device, kernel, EQUAL_FORESTS[name], fused=True))


@pytest.mark.parametrize(("device", "kernel"), kernels("cudnn", on_cpu=()))
def test_cudnn_refuses_ragged_launches(device: str, kernel: str) -> None:
    case = make_case(device, kernel, FORESTS["no_prefix"])
    with pytest.raises(UnsupportedError, match="equal length"):
        check(case)


def forests_for(kernel: str, *ragged: Forest) -> list[Forest]:
    """One whose sequences have one length, and these where the kernel takes them."""
    return [EQUAL_FORESTS["flat"], *(ragged if RECORDS[kernel].ragged else ())]


@pytest.mark.parametrize(
    ("heads", "dims"),
    slow_besides([((4, 4), (64, 64))], sorted({(h, d) for _, h, d in PROFILES})),
    ids=str,
)
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn"))
def test_heads_and_head_dims(
    device: str, kernel: str, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    ragged = make_forest([-1, 0, 0, -1, 3], [300, 150, 170, 200, 131], [0])
    for forest in forests_for(kernel, ragged):
        assert_passes(make_case(device, kernel, forest, heads=heads, dims=dims, fused=True))


@pytest.mark.parametrize("window", [1, 5, 64, 1000])
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "reference"))
def test_windows(device: str, kernel: str, window: int) -> None:
    names = ("three_levels", "three_levels_the_upper_in_the_arena")
    for forest in forests_for(kernel, *(FORESTS[name] for name in names)):
        sinks = window == 64
        assert_passes(make_case(device, kernel, forest, window=window, sinks=sinks))


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn"))
def test_sinks(device: str, kernel: str) -> None:
    for forest in forests_for(kernel, FORESTS["three_levels"]):
        assert_passes(make_case(device, kernel, forest, sinks=True))


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "reference", "fa2", on_cpu=ON_CPU))
def test_softcap(device: str, kernel: str) -> None:
    for forest in forests_for(kernel, FORESTS["three_levels_the_upper_in_the_arena"]):
        assert_passes(make_case(device, kernel, forest, softcap=1.5))


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch):
    """Sets what "auto" chooses from; returns the names of the kernels that ran forward, in turn."""

    def clear() -> None:
        select_kernel.cache_clear()
        registry._able.cache_clear()

    def use(*chosen: Kernel) -> list[str]:
        ran: list[str] = []

        def counted(kernel: Kernel) -> Kernel:
            def forward(*args, **options):
                ran.append(kernel.name)
                return kernel.forward(*args, **options)

            return dataclasses.replace(kernel, forward=forward)

        monkeypatch.setattr(registry, "KERNELS", tuple(map(counted, chosen)))
        clear()
        return ran

    yield use
    clear()


@pytest.mark.parametrize(
    ("device", "first", "second"),
    [("cpu", "cpu_flash", "reference"), pytest.param("cuda", "cudnn", "fa2", marks=GPU)],
)
def test_kernels_may_differ_within_a_microbatch(
    device: str, first: str, second: str, use_kernels: Callable
) -> None:
    """As "auto" has it without FA4: one kernel where lengths are equal, another elsewhere."""
    case = make_case(device, "auto", grid_forest(257, "siblings"))
    equal_only = dataclasses.replace(RECORDS[first], ragged=False, auto_pairs=0)
    ran = use_kernels(equal_only, RECORDS[second])
    assert_passes(case)
    assert ran == [second, first]


@pytest.mark.parametrize("lengths", ["ragged", "equal"])
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn"))
def test_deterministic_repeats_bit_by_bit(
    device: str, kernel: str, window: int, lengths: str
) -> None:
    forest = random_forest(18, segments=40, longest=30 if device == "cpu" else 300)
    if lengths == "equal":
        forest = EQUAL_FORESTS["flat"]
    case = make_case(device, kernel, forest, window=window, sinks=True)
    x, table = make_case_inputs(case), forest.table(window, device)
    assert forest.cache_tokens_ > 0
    if case.refusal(deterministic=True) is not None:
        with pytest.raises(UnsupportedError, match=f"{kernel!r} cannot serve"):
            attend(case, x, table, deterministic=True)
        return
    first, *others = (attend(case, x, table, deterministic=True) for _ in range(5))
    for again in others:
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("device", "kernel"), kernels("fa4", "fa2", "cudnn", "auto", "reference", on_cpu=())
)
def test_nothing_waits_for_the_device(
    device: str, kernel: str, deterministic: bool, window: int
) -> None:
    forest = (EQUAL_FORESTS if kernel == "cudnn" else FORESTS)[
        "flat" if kernel == "cudnn" else "three_levels_the_upper_in_the_arena"
    ]
    case = make_case(device, kernel, forest, window=window, sinks=True)
    if case.refusal(deterministic) is not None:
        pytest.skip(f"{kernel}: {case.refusal(deterministic)}")
    x, table = make_case_inputs(case), forest.table(window, device)
    attend(case, x, table, deterministic=deterministic)  # compiles, or plans
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(case, x, table, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("device", "kernel"), kernels("fa4", "fa2", "cudnn", on_cpu=()))
def test_opcheck(device: str, kernel: str) -> None:
    forest = EQUAL_FORESTS["flat"]
    case = make_case(device, kernel, forest, sinks=True)
    x, table = make_case_inputs(case), forest.table(0, device)
    assert x.cache_k is not None and x.cache_v is not None and x.sinks is not None
    cache = [a.detach().nan_to_num(0) for a in (x.cache_k, x.cache_v)]
    grads = [torch.zeros_like(a, dtype=torch.float32) for a in cache]
    tables = (table.launches, table.cu_cpu, table.cu_device, None, None)
    rest = (*cache, *grads, x.sinks, *tables, case.scale, 0.0, 0, kernel, False)
    forward = torch.ops.forkpoint.shared_attention.default
    # What is compared is a compiled run with an eager one, both in 16 bit.
    torch.library.opcheck(forward, (x.q, x.k, x.v, *rest), atol=0.05, rtol=0.05)
    q, k, v, sinks = (a.detach() for a in (x.q, x.k, x.v, x.sinks))
    rest = (*cache, *grads, sinks, *rest[5:])
    saved = (x.do, q, k, v, *forward(q, k, v, *rest))
    backward = torch.ops.forkpoint.shared_attention_backward.default
    torch.library.opcheck(backward, (*saved, *rest, *[True] * 4), atol=0.05, rtol=0.05)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=GPU)]
)
def test_changing_lengths_do_not_recompile(device: str, backend: str) -> None:
    case = make_case(device, "auto", FORESTS["one_token"])
    (heads, groups), dim = case.heads, case.dims[0]

    def block(qkv: Tensor, gain: Tensor, table: AttentionTable, cache: CacheSlice) -> Tensor:
        q, k, v = (qkv * gain).split([heads, groups, groups], dim=1)
        o, _ = shared_attention(q, k, v, table=table, cache=cache, scale=case.scale)
        return o.flatten(1).sin()

    def run(call: Callable, forest: Forest) -> list[Tensor | None]:
        x = make_case_inputs(dataclasses.replace(case, forest=forest))
        assert x.cache_k is not None and x.cache_v is not None
        grads = (torch.zeros_like(a.detach(), dtype=torch.float32) for a in (x.cache_k, x.cache_v))
        cache = CacheSlice(x.cache_k.detach(), x.cache_v.detach(), *grads)
        qkv = torch.cat([x.q, x.k, x.v], dim=1).detach().requires_grad_()
        gain = torch.ones(dim, dtype=BF16, device=device, requires_grad=True)
        out = call(qkv, gain, forest.table(0, device), cache)
        out.sum().backward()
        return [out.detach(), qkv.grad, gain.grad, cache.grad_k, cache.grad_v]

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    forests = [
        make_forest([-1, 0, 0], [9, 4, 8], [0]),
        make_forest([-1, 0, 0, 2, 2], [150, 33, 70, 200, 1], [0]),
        FORESTS["three_levels_the_upper_in_the_arena"],
        FORESTS["ragged_groups_below_the_arena"],
        FORESTS["groups_of_one"],
        grid_forest(63, "siblings"),
    ]
    for at, forest in enumerate(forests):
        with torch._dynamo.config.patch(error_on_recompile=at >= 2):
            found = run(compiled, forest)
        for ours, expected in zip(found, run(block, forest), strict=True):
            assert ours is not None and expected is not None
            error = (ours.double() - expected.double()).norm()
            assert error <= 4 * torch.finfo(BF16).eps * expected.double().norm()


SUMS = [
    *[(count, 2, 64, BF16, BF16) for count in range(1, 10)],
    *[(2, 3, dim, BF16, BF16) for dim in (8, 80, 96, 128, 192, 256)],
    *[(5, 2, 64, FP16, FP16), (5, 2, 64, BF16, torch.float32), (3, 1, 64, torch.float32, BF16)],
    *[(count, 2, 64, torch.float32, torch.float32) for count in (2, 6)],
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
    generator = torch.Generator().manual_seed(count)
    tokens, parts, lses = 83, [], []
    for at in range(count):
        begin = int(torch.randint(tokens, (), generator=generator)) if at else 0
        length = (
            int(torch.randint(1, tokens - begin + 1, (), generator=generator)) if at else tokens
        )
        wide = torch.randn(length, heads + 1, dim + 8 * (at % 2), generator=generator).to(given)
        part = wide.to(device)[:, 1:, :dim]
        parts.append((begin, part.contiguous() if over else part))
        lses.append(3 * torch.randn(heads, length, generator=generator).to(device))
    total = torch.full((heads, tokens), -torch.inf, device=device)
    for (begin, part), lse in zip(parts, lses, strict=True):
        view = total[:, begin : begin + len(part)]
        view.copy_(torch.logaddexp(view, lse))
    if sinks:
        total += 0.7

    expected = torch.zeros(tokens, heads, dim, dtype=torch.float64, device=device)
    magnitude = expected.clone()
    for (begin, part), lse in zip(parts, lses, strict=True):
        here = slice(begin, begin + len(part))
        term = part.double()
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
