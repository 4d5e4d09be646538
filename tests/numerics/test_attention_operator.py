"""The operator inside autograd, checkpointing, autocast and compilation."""

import dataclasses
import shutil
from collections.abc import Callable
from itertools import product

import pytest
import torch
from test_attention_forest import (
    Forest,
    Inputs,
    gradients,
    make_forest,
    make_inputs,
    path_attention,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import (
    KERNELS,
    AttentionTable,
    CacheSlice,
    Kernel,
    registry,
    select_kernel,
    shared_attention,
)
from forkpoint.ops.attention.merge import Part, merge
from forkpoint.ops.attention.source import RowSum, Source
from forkpoint.ops.attention.table import read_launches
from forkpoint.ops.dtypes import accumulate_dtype
from lanes import slow_besides

FOREST = make_forest([-1, 0, 0, 2], [5, 7, 3, 6], external=[0])
SCALE = 0.3


def inputs(dtype: torch.dtype = torch.float64, sinks: bool = True) -> Inputs:
    return make_inputs(FOREST, (4, 2), (8, 8), dtype, sinks=sinks)


def cache_of(x: Inputs, grads: bool = True) -> CacheSlice:
    assert x.cache_k is not None and x.cache_v is not None
    k, v = x.cache_k.detach(), x.cache_v.detach()
    if not grads:
        return CacheSlice(k, v)
    wide = accumulate_dtype(k.dtype)
    return CacheSlice(k, v, torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))


def attend(x: Inputs, cache: CacheSlice, window: int = 0, **options) -> tuple[Tensor, Tensor]:
    table = FOREST.table(window)
    return shared_attention(
        x.q,
        x.k,
        x.v,
        table=table,
        cache=cache,
        sinks=x.sinks,
        scale=SCALE,
        window=window,
        **options,
    )


def expected_gradients(x: Inputs, window: int = 0) -> dict[str, Tensor]:
    return gradients(path_attention(FOREST, x, scale=SCALE, window=window)[0], x)


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch):
    """The sources of the launches whose kernel's backward ran."""
    calls: list[int] = []
    kernel = next(k for k in KERNELS if k.name == "cpu_flash")

    def counting(*args, **options):
        calls.append(args[6].source)
        assert all(x.stride(-1) == 1 for x in args[:5])
        return kernel.backward(*args, **options)

    counted: Kernel = dataclasses.replace(kernel, backward=counting)
    monkeypatch.setattr(registry, "KERNELS", (counted,))
    for cached in (select_kernel, registry._able):
        cached.cache_clear()
    yield calls
    for cached in (select_kernel, registry._able):
        cached.cache_clear()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sinks",), ("k", "sinks"), ("q", "v")])
def test_only_wanted_gradients_are_returned(wanted: tuple[str, ...], window: int) -> None:
    x = inputs()
    expected = expected_gradients(x, window)
    for name in x.NAMES:
        leaf = getattr(x, name)
        leaf.requires_grad_(name in wanted)
    attend(x, cache_of(x, grads=False), window)[0].backward(x.do)
    for name in ("q", "k", "v", "sinks"):
        found = getattr(x, name).grad
        if name in wanted:
            torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-12)
        else:
            assert found is None


def test_launches_without_wanted_gradients_are_not_run(backward_calls: list[int]) -> None:
    def calls(*wanted: str, arena_grads: bool) -> list[int]:
        x = inputs()
        for name in x.NAMES:
            getattr(x, name).requires_grad_(name in wanted)
        backward_calls.clear()
        attend(x, cache_of(x, arena_grads))[0].backward(x.do)
        return list(backward_calls)

    def calls_of_a_sum() -> list[int]:
        x = inputs()
        backward_calls.clear()
        attend(x, cache_of(x))[0].sum().backward()  # by a gradient that is expanded
        return list(backward_calls)

    assert calls_of_a_sum() == [0, 1, 0]
    # The causal launch, the one below the external root, and the one below a segment of the
    # microbatch.
    assert calls("q", arena_grads=False) == [0, 1, 0]
    assert calls("q", "k", "v", "sinks", arena_grads=True) == [0, 1, 0]
    assert calls("k", arena_grads=False) == [0, 0]
    assert calls("sinks", arena_grads=True) == [1]
    assert calls("sinks", arena_grads=False) == []


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("wanted", [("q",), ("sinks",), ("k",)])
def test_the_arena_gets_its_gradients_whatever_the_microbatch_wants(
    wanted: tuple[str, ...], window: int
) -> None:
    x = inputs()
    expected = expected_gradients(x, window)
    for name in x.NAMES:
        getattr(x, name).requires_grad_(name in wanted)
    cache = cache_of(x)
    attend(x, cache, window)[0].backward(x.do)
    torch.testing.assert_close(cache.grad_k, expected["cache_k"], rtol=0, atol=1e-12)
    torch.testing.assert_close(cache.grad_v, expected["cache_v"], rtol=0, atol=1e-12)


def test_a_microbatch_whose_launches_leave_keys_out_gets_zeros_for_them() -> None:
    """No planner makes such a microbatch, but a gradient is never uninitialised memory."""
    x = inputs(sinks=False)
    cache = cache_of(x)
    table = FOREST.table()
    table.launches = table.launches[1:2]  # the rectangle below the root alone
    o, _ = shared_attention(x.q, x.k, x.v, table=table, cache=cache, scale=SCALE)
    o.backward(x.do)
    assert x.k.grad is not None and not x.k.grad.any()


def test_parts_in_16_bit_are_summed_in_float32() -> None:
    like = torch.zeros(6, 1, 2, dtype=torch.bfloat16)
    total = RowSum(like)
    total.add(torch.full_like(like, 256), 0)
    for _ in range(4):
        total.add(torch.ones_like(like[:3]), 3)  # each would be lost beside 256 in bfloat16
    assert total.result().dtype == torch.bfloat16
    assert total.result()[:, 0, 0].tolist() == [256, 256, 256, 260, 260, 260]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gathered_parts_in_16_bit_are_summed_in_float32(deterministic: bool) -> None:
    """As windowed layers add them: a token of the microbatch is read by several segments."""
    like = torch.zeros(3, 1, 1, dtype=torch.bfloat16)
    total = RowSum(like)
    part = torch.tensor([256, 1, 1, 1, 1, 7], dtype=torch.bfloat16)[:, None, None]
    # One at a time: within a call, index_add_ on a CPU is in float32 anyhow.
    for place, one in zip((2, 2, 2, 2, 2, 0), part, strict=True):
        total.add_at(torch.tensor([place]), one[None], deterministic)
    assert total.result().dtype == torch.bfloat16
    assert total.result()[:, 0, 0].tolist() == [7, 0, 260]
    cache_grad = torch.full((2, 1, 1), 0.5)
    source = Source(like, like[:2], None, torch.tensor([[0, 1, 5], [1, 1, 0]]), cache_grad)
    table = FOREST.table(4)
    (launch,) = read_launches(table.launches, table.cu_cpu, table.cu_device)
    source.add_grad(launch, part, False, deterministic)
    assert cache_grad[:, 0, 0].tolist() == [7.5, 257.5]


def test_the_merge_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [(0, 90), (10, 70), (30, 40)]
    parts = [
        Part(
            begin,
            torch.randn(length, 2, 16, generator=generator).bfloat16(),
            3 * torch.randn(2, length, generator=generator),
        )
        for begin, length in lengths
    ]
    wide = [Part(begin, o.double(), lse.double()) for begin, o, lse in parts]
    expected, _ = merge(wide, None, torch.float64)
    found, _ = merge(parts, None, torch.bfloat16)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-5
    assert ((found.double() - expected).abs() <= rounding).all()


def test_the_gradient_of_sinks_is_summed_in_float32() -> None:
    """Products of 16 bits, and their sums, are not rounded on the way."""
    forest = make_forest([-1], [3])
    x = make_inputs(forest, (8, 1), (64, 64), torch.bfloat16)
    sinks = torch.linspace(-1, 1, 8).requires_grad_()
    o, lse = shared_attention(x.q, x.k, x.v, table=forest.table(), sinks=sinks, scale=SCALE)
    o.backward(x.do)
    share = (sinks.detach().double()[:, None] - lse.double()).exp()
    expected = -(share * (x.do.double() * o.detach().double()).sum(-1).T).sum(-1)
    assert sinks.grad is not None
    torch.testing.assert_close(sinks.grad.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrap", ["plain", "checkpoint"])
@pytest.mark.parametrize("window", [0, 4])
def test_later_captures_into_the_arena_do_not_disturb(window: int, wrap: str) -> None:
    """Microbatch B reads a slice; microbatch C is captured into the next slice; then B's backward
    runs."""
    x = inputs()
    expected = expected_gradients(x, window)
    assert x.cache_k is not None and x.cache_v is not None
    n = len(x.cache_k)
    buffers = [torch.zeros(n + 9, *a.shape[1:], dtype=a.dtype) for a in (x.cache_k, x.cache_v)]
    grads = [torch.zeros_like(b) for b in buffers]
    for buffer, a in zip(buffers, (x.cache_k, x.cache_v), strict=True):
        buffer[:n] = a.detach()
    cache = CacheSlice(buffers[0][:n], buffers[1][:n], grads[0][:n], grads[1][:n])
    leaves = (x.q, x.k, x.v, x.sinks)
    table = FOREST.table(window)

    def block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        o, _ = shared_attention(
            q * 1, k * 1, v * 1, table=table, cache=cache, sinks=sinks, scale=SCALE, window=window
        )
        return o * 1

    o = block(*leaves) if wrap == "plain" else checkpoint(block, *leaves, use_reentrant=False)
    assert isinstance(o, Tensor)
    for buffer in (*buffers, *grads):
        buffer[n:] = 7.0
    o.backward(x.do)
    for name in ("q", "k", "v", "sinks"):
        torch.testing.assert_close(getattr(x, name).grad, expected[name], rtol=0, atol=1e-12)
    for name, grad in zip(("cache_k", "cache_v"), grads, strict=True):
        torch.testing.assert_close(grad[:n], expected[name], rtol=0, atol=1e-12)
        assert (grad[n:] == 7).all()


def test_an_arena_that_requires_gradients_is_caught() -> None:
    x = inputs()
    assert x.cache_k is not None and x.cache_v is not None
    with pytest.raises(AssertionError, match="an cache is constant"):
        CacheSlice(x.cache_k, x.cache_v)


def test_lse_is_not_differentiable_and_there_is_no_second_derivative() -> None:
    x = inputs()
    o, lse = attend(x, cache_of(x))
    assert o.requires_grad and not lse.requires_grad
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(o, x.q, x.do, create_graph=True)


def test_runs_without_a_graph() -> None:
    x = inputs()
    with torch.no_grad():
        o, _ = attend(x, cache_of(x))
    assert not o.requires_grad
    torch.testing.assert_close(o, attend(x, cache_of(x))[0].detach(), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_strided_inputs_and_expanded_gradients(kernel: str) -> None:
    x = inputs(sinks=False)
    x.do = torch.ones(1, 1, 1, dtype=x.do.dtype).expand_as(x.do)
    expected = expected_gradients(x)
    fused = torch.cat([x.q, x.k, x.v], dim=1).detach()
    q, k, v = (a.requires_grad_() for a in fused.split([4, 2, 2], dim=1))
    turned = k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not q.is_contiguous() and turned.stride(-1) != 1
    cache = cache_of(x)
    o, lse = shared_attention(
        q, turned, v, table=FOREST.table(), cache=cache, scale=SCALE, kernel=kernel
    )
    assert o.is_contiguous() and lse.is_contiguous()
    o.sum().backward()
    for name, leaf in (("q", q), ("k", turned), ("v", v)):
        torch.testing.assert_close(leaf.grad, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_autocast_outside_changes_nothing_inside(kernel: str) -> None:
    results = []
    for enabled in (False, True):
        x = inputs(torch.float32)
        cache = cache_of(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, _ = attend(x, cache, kernel=kernel)
            o.backward(x.do)
        results.append([o.detach(), x.q.grad, x.k.grad, x.v.grad, cache.grad_k, x.sinks.grad])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def operator_arguments(
    window: int, grads: bool, dtype: torch.dtype = torch.float64
) -> tuple[Inputs, tuple]:
    x, table = inputs(dtype), FOREST.table(window)
    cache = cache_of(x, grads)
    tables = (table.launches, table.cu_cpu, table.cu_device, table.own_gather, table.cache_gather)
    caches = (cache.k, cache.v, cache.grad_k, cache.grad_v)
    options = (SCALE, 0.0, window, "auto", False)
    return x, (x.q, x.k, x.v, *caches, x.sinks, *tables, *options)


@pytest.mark.parametrize(
    ("window", "grads", "dtype"),
    slow_besides(
        [(4, True, torch.bfloat16)],
        product((0, 4), (False, True), (torch.float64, torch.bfloat16)),
    ),
    ids=str,
)
def test_opcheck(window: int, grads: bool, dtype: torch.dtype) -> None:
    x, arguments = operator_arguments(window, grads, dtype)
    forward = torch.ops.forkpoint.shared_attention.default
    torch.library.opcheck(forward, arguments, atol=1e-2, rtol=1e-2)
    q, k, v, *rest = (a.detach() if isinstance(a, Tensor) else a for a in arguments)
    o, lse = forward(q, k, v, *rest)
    backward = torch.ops.forkpoint.shared_attention_backward.default
    for wanted in ((True, True, True, True), (False, True, False, False)):
        torch.library.opcheck(backward, (x.do, q, k, v, o, lse, *rest, *wanted))


class Context:
    """Call arguments that an engine hands a layer."""

    def __init__(self, table: AttentionTable, cache: CacheSlice, window: int) -> None:
        self.table = table
        self.cache = cache
        self.window = window


def layer(x: Tensor, weight: Tensor, sinks: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    q, k, v = (x @ weight).view(len(x), 8, 8).split([4, 2, 2], dim=1)
    o, lse = shared_attention(
        q,
        k,
        v,
        table=context.table,
        cache=context.cache,
        sinks=sinks,
        scale=SCALE,
        window=context.window,
    )
    return o.flatten(1).sin(), lse


def layer_gradients(call: Callable, forest: Forest, window: int) -> list[Tensor | None]:
    """Of a layer whose cache is slices of one buffer, written elsewhere before the backward."""
    x = make_inputs(forest, (4, 2), (8, 8), torch.float32, sinks=True)
    assert x.cache_k is not None and x.cache_v is not None and x.sinks is not None
    n = len(x.cache_k)
    buffer = torch.zeros(4, n + 9, 2, 8)
    buffer[0, :n], buffer[1, :n] = x.cache_k.detach(), x.cache_v.detach()
    context = Context(forest.table(window), CacheSlice(*buffer[:, :n]), window)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(forest.microbatch_tokens, 6, generator=generator, requires_grad=True)
    weight = torch.randn(6, 64, generator=generator, requires_grad=True)
    out, lse = call(hidden, weight, x.sinks, context)
    assert not lse.requires_grad
    buffer[:, n:] = 7
    out.square().sum().backward()
    return [out.detach(), lse, hidden.grad, weight.grad, x.sinks.grad, buffer]


INDUCTOR = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_compiled_equals_eager(backend: str) -> None:
    """The second microbatch has other lengths, so that its sizes and offsets are symbols."""
    other = make_forest([-1, 0, 0, 2, 2], [9, 4, 8, 2, 1], external=[0])
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for window in (0, 4):
        for forest in (FOREST, other):
            found = layer_gradients(compiled, forest, window)
            expected = layer_gradients(layer, forest, window)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
