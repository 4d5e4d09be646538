"""The operator inside autograd, checkpointing, autocast and compilation."""

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import RECORDS, Case, Inputs, make_forest, path_attention
from test_attention_kernels import only
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import CacheSlice, Launch, operator, shared_attention
from forkpoint.ops.attention.kernel import BackwardInputs, Gradients, Options
from forkpoint.ops.attention.merge import Part, merge
from forkpoint.ops.attention.source import RowSum, Source

FOREST = make_forest([-1, 0, 0, 2], [5, 7, 3, 6], external=[0])
CASE = Case(FOREST, sinks=True)


def attend(x: Inputs, cache: CacheSlice | None, window: int = 0, **options: Any) -> Tensor:
    more: dict[str, Any] = {"scale": CASE.scale, "window": window, **options}
    table = FOREST.table(window)
    return shared_attention(x.q, x.k, x.v, table=table, cache=cache, sinks=x.sinks, **more)[0]


def wanting(x: Inputs, *wanted: str) -> None:
    for name, leaf in x.leaves().items():
        leaf.requires_grad_(name in wanted)


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wanted", "window", "cached"),
    [
        *((("q",), 0, True), (("q",), 4, False), (("k",), 0, False), (("k",), 4, True)),
        *((("sinks",), 0, True), (("sinks",), 4, False)),
        *((("q", "v"), 0, False), (("q", "v"), 4, True)),
    ],
)
def test_wanted_gradients_alone_are_returned(
    wanted: tuple[str, ...], window: int, cached: bool
) -> None:
    """The cache gets its own in any case, where there is somewhere to put them."""
    case = dataclasses.replace(CASE, window=window)
    x = case.inputs()
    expected = path_attention(case, x)
    wanting(x, *wanted)
    cache = x.cache(0.0 if cached else None)
    attend(x, cache, window).backward(x.do)
    assert cache is not None
    for name in ("q", "k", "v", "sinks"):
        found = getattr(x, name).grad
        assert (found is not None) == (name in wanted)
        if found is not None:
            equal(found, expected[name])
    if cached:
        equal((cache.grad_k, cache.grad_v), (expected["cache_k"], expected["cache_v"]))


def test_launches_without_wanted_gradients_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def counting(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
        ran.append(launch.source)
        assert all(x.stride(-1) == 1 for x in inputs[:5])
        return RECORDS["cpu_flash"].backward(inputs, launch, options)

    def calls(*wanted: str, grads: bool = True, expanded: bool = False) -> list[int]:
        x = CASE.inputs()
        wanting(x, *wanted)
        ran.clear()
        o = attend(x, x.cache(0.0 if grads else None))
        o.sum().backward() if expanded else o.backward(x.do)
        return list(ran)

    with only(monkeypatch, dataclasses.replace(RECORDS["cpu_flash"], backward=counting)):
        # The causal launch, the one below the cache, the one below a segment of the microbatch.
        assert calls("q", "k", "v", "sinks", expanded=True) == [0, 1, 0]
        assert calls("q", grads=False) == [0, 1, 0]
        assert calls("k", grads=False) == [0, 0]
        assert calls("sinks") == [1]
        assert calls("sinks", grads=False) == []


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize(("limit", "groups"), [(1, 4), (2, 2), (4, 1)])
def test_heads_run_in_groups_where_repeated_keys_take_much_memory(
    limit: int, groups: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limit`: the key heads of the longest launch whose repeated keys fit."""
    case = dataclasses.replace(CASE, heads=(8, 4), window=window)
    x = case.inputs()
    expected = path_attention(case, x)
    wanting(x, "q", "k", "v", "sinks")
    heads: list[int] = []

    def counting(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
        heads.append(inputs.k.shape[1])
        return RECORDS["cpu_flash"].backward(inputs, launch, options)

    kernel = dataclasses.replace(RECORDS["cpu_flash"], backward=counting, repeats_keys=True)
    keys = max(launch.k_end - launch.k_begin for launch in FOREST.table(window).calls)
    each = keys * 2 * sum(case.dims) * 8
    monkeypatch.setattr(operator, "REPEATED_BYTES", limit * each)
    cache = x.cache(0.0)
    assert cache is not None
    with only(monkeypatch, kernel):
        attend(x, cache, window, scale=case.scale).backward(x.do)
    assert min(heads) == 4 // groups
    for name in ("q", "k", "v", "sinks"):
        equal(getattr(x, name).grad, expected[name])
    equal((cache.grad_k, cache.grad_v), (expected["cache_k"], expected["cache_v"]))


def test_the_gradients_of_one_key_head_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    k = torch.zeros(4, 1, 2)
    q, lse = k.expand(4, 8, 2), torch.zeros(8, 4)
    found = q.clone(), k.clone(), k.clone()
    kernel = dataclasses.replace(RECORDS["cpu_flash"], backward=lambda *_: found, repeats_keys=True)
    monkeypatch.setattr(operator, "REPEATED_BYTES", 1)
    inputs, launch = BackwardInputs(q, q, k, k, q, lse), FOREST.table().calls[0]
    assert operator._launch_backward(kernel, inputs, launch, Options(1.0)) is found


def test_a_microbatch_whose_launches_leave_keys_out_gets_zeros_for_them() -> None:
    """No planner makes such a microbatch, but a gradient is never uninitialised memory."""
    x = dataclasses.replace(CASE, sinks=False).inputs()
    table = FOREST.table()
    table.calls = table.calls[1:2]  # the rectangle below the root alone
    o, _ = shared_attention(x.q, x.k, x.v, table=table, cache=x.cache(), scale=CASE.scale)
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
    (launch,) = FOREST.table(4).calls
    source.add_grad(launch, part, False, deterministic)
    assert cache_grad[:, 0, 0].tolist() == [7.5, 257.5]


def test_the_merge_rounds_once() -> None:
    torch.manual_seed(0)
    parts = [
        Part(begin, torch.randn(n, 2, 16).bfloat16(), 3 * torch.randn(2, n))
        for begin, n in [(0, 90), (10, 70), (30, 40)]
    ]
    wide = [Part(begin, o.double(), lse.double()) for begin, o, lse in parts]
    expected, _ = merge(wide, None, torch.float64)
    found, _ = merge(parts, None, torch.bfloat16)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-5
    assert ((found.double() - expected).abs() <= rounding).all()


def test_the_gradient_of_sinks_is_summed_in_float32() -> None:
    """Products of 16 bits, and their sums, are not rounded on the way."""
    case = Case(make_forest([-1], [3]), heads=(8, 1), dims=(64, 64), dtype=torch.bfloat16)
    x, table = case.inputs(), case.forest.table()
    sinks = torch.linspace(-1, 1, 8).requires_grad_()
    o, lse = shared_attention(x.q, x.k, x.v, table=table, sinks=sinks, scale=0.3)
    o.backward(x.do)
    share = (sinks.detach().double()[:, None] - lse.double()).exp()
    expected = -(share * (x.do.double() * o.detach().double()).sum(-1).T).sum(-1)
    assert sinks.grad is not None
    torch.testing.assert_close(sinks.grad.double(), expected, rtol=0, atol=1e-5)


def test_later_captures_into_the_cache_do_not_disturb() -> None:
    """A microbatch reads a slice, and another is captured into the next before its backward."""
    x = CASE.inputs()
    expected = path_attention(CASE, x)
    given = [a.detach() for a in (x.cache_k, x.cache_v) if a is not None]
    buffers = [torch.cat([a, torch.zeros_like(a)]) for a in given]
    k, v = (b[: len(a)] for a, b in zip(given, buffers, strict=True))
    o = attend(x, CacheSlice(k, v))
    for buffer in buffers:
        buffer[len(k) :] = 7.0
    o.backward(x.do)
    equal([x.q.grad, x.k.grad, x.v.grad], [expected[name] for name in "qkv"])


def test_what_is_not_differentiable_says_so() -> None:
    x = CASE.inputs()
    assert x.cache_k is not None and x.cache_v is not None
    with pytest.raises(AssertionError, match="cache is constant"):
        CacheSlice(x.cache_k, x.cache_v)
    o = attend(x, x.cache())
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(o, x.q, x.do, create_graph=True)
    with torch.no_grad():
        plain = attend(x, x.cache())
    assert not plain.requires_grad
    assert torch.equal(plain, o)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_strided_inputs_and_expanded_gradients(kernel: str) -> None:
    case = dataclasses.replace(CASE, sinks=False)
    x = case.inputs()
    x.do = torch.ones(1, 1, 1, dtype=x.do.dtype).expand_as(x.do)
    expected = path_attention(case, x)
    fused = torch.cat([x.q, x.k, x.v], dim=1).detach()
    q, k, v = (a.requires_grad_() for a in fused.split([4, 2, 2], dim=1))
    turned = k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not q.is_contiguous() and turned.stride(-1) != 1
    options: dict[str, Any] = {"scale": CASE.scale, "kernel": kernel}
    o, lse = shared_attention(q, turned, v, table=FOREST.table(), cache=x.cache(), **options)
    assert o.is_contiguous() and lse.is_contiguous() and not lse.requires_grad
    o.sum().backward()
    for name, leaf in (("q", q), ("k", turned), ("v", v)):
        equal(leaf.grad, expected[name])


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_autocast_outside_changes_nothing_inside(kernel: str) -> None:
    results = []
    for enabled in (False, True):
        x = dataclasses.replace(CASE, dtype=torch.float32).inputs()
        cache = x.cache()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o = attend(x, cache, kernel=kernel)
            o.backward(x.do)
        assert cache is not None and x.sinks is not None
        results.append([o.detach(), x.q.grad, x.k.grad, x.v.grad, cache.grad_k, x.sinks.grad])
    torch.testing.assert_close(*results, rtol=0, atol=0)
