"""The composition against attention over whole paths: outputs and every gradient, every kernel."""

import pytest
import torch
from test_attention_forest import (
    Forest,
    Inputs,
    gradients,
    make_forest,
    make_inputs,
    path_attention,
    random_forest,
)
from torch import Tensor

from forkpoint.ops.attention import CacheSlice, shared_attention
from forkpoint.ops.dtypes import accumulate_dtype

KERNELS = ("reference", "cpu_flash")
SCALE = 0.3
pytestmark = pytest.mark.usefixtures("poisoned_memory", "checked_shapes")


def run(
    forest: Forest, x: Inputs, *, window: int = 0, **options
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ours: o, lse and gradients by name, the cache's on top of ones that were there before."""
    cache = None
    if x.cache_k is not None and x.cache_v is not None:
        wide = accumulate_dtype(x.q.dtype)
        grads = (torch.ones_like(a.detach(), dtype=wide) for a in (x.cache_k, x.cache_v))
        cache = CacheSlice(x.cache_k.detach(), x.cache_v.detach(), *grads)
    o, lse = shared_attention(
        x.q,
        x.k,
        x.v,
        table=forest.table(window),
        cache=cache,
        sinks=x.sinks,
        scale=SCALE,
        window=window,
        **options,
    )
    o.backward(x.do)
    found = {name: getattr(x, name).grad for name in ("q", "k", "v")}
    if cache is not None:
        assert cache.grad_k is not None and cache.grad_v is not None
        found |= {"cache_k": cache.grad_k - 1, "cache_v": cache.grad_v - 1}
    if x.sinks is not None:
        found["sinks"] = x.sinks.grad
    return o.detach(), lse, found


def check_float64(
    forest: Forest,
    kernel: str,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    sinks: bool = False,
    **options,
) -> None:
    """Within 1e-12 of the paths' attention, relative to each tensor's largest entry or 1."""
    x = make_inputs(forest, heads, dims, torch.float64, sinks=sinks)
    o, lse, found = run(forest, x, kernel=kernel, **options)
    expected_o, expected_lse = path_attention(forest, x, scale=SCALE, **options)
    expected = gradients(expected_o, x) | {"o": expected_o.detach(), "lse": expected_lse}
    found |= {"o": o, "lse": lse}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bar = 1e-12 * max(1.0, tensor.abs().max().item())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bar, msg=name)


def test_poison_reaches_the_allocations_of_torch() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert torch.ops.aten.empty_strided.default([3], [1]).isnan().all()
    assert torch.ones(3).new_empty(3).isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_forests(seed: int, heads: tuple[int, int], kernel: str) -> None:
    check_float64(random_forest(seed), kernel, heads)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_windows(seed: int, window: int, kernel: str) -> None:
    check_float64(random_forest(seed), kernel, window=window, sinks=seed == 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [3, 300])
def test_a_window_over_several_blocks_of_a_long_segment(window: int, kernel: str) -> None:
    check_float64(make_forest([-1, 0, 0], [9, 600, 530]), kernel, (2, 1), window=window)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [7, 29, 30, 31, 40])
def test_a_windowed_microbatch_without_ancestors_needs_no_gathering(
    window: int, kernel: str
) -> None:
    forest = make_forest([-1, -1], [30, 41])
    x = make_inputs(forest, (4, 2), (8, 8), torch.float64)
    found, _ = shared_attention(
        x.q, x.k, x.v, table=forest.table(), scale=SCALE, window=window, kernel=kernel
    )
    expected, _ = path_attention(forest, x, scale=SCALE, window=window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_sinks(seed: int, kernel: str) -> None:
    check_float64(random_forest(seed), kernel, sinks=True)


def test_sinks_of_a_single_launch() -> None:
    check_float64(make_forest([-1], [20]), "reference", sinks=True)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap(sinks: bool, window: int) -> None:
    check_float64(random_forest(2), "auto", sinks=sinks, window=window, softcap=1.5)


@pytest.mark.parametrize("dims", [(12, 8), (5, 7), (1, 1)], ids=str)
def test_head_dims_of_keys_and_values_may_differ(dims: tuple[int, int]) -> None:
    check_float64(random_forest(3), "auto", dims=dims, sinks=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("by_level", [False, True])
@pytest.mark.parametrize("length", [1, 63, 65, 127])
def test_odd_sizes(length: int, by_level: bool, kernel: str) -> None:
    lengths = [length, 1, 127, length, 63, 1, length]
    parents = [-1, 0, 0, 1, -1, 4, 5]
    check_float64(make_forest(parents, lengths, by_level=by_level), kernel, (2, 1), (17, 17))
    check_float64(make_forest(parents, lengths, [0, 4, 5], by_level), kernel, (2, 1), (17, 17))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences_of_equal_length_side_by_side(kernel: str) -> None:
    parents = [-1, -1, *[0] * 3, *[1] * 3]
    check_float64(make_forest(parents, [20, 20, *[13] * 6], by_level=True), kernel)
    check_float64(make_forest(parents, [20, 20, *[13] * 6], [0, 1], by_level=True), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["plain", "window", "sinks", "softcap"])
def test_rounding(case: str, dtype: torch.dtype, kernel: str) -> None:
    """At most twice the error of torch's own attention in the same dtype, against float64."""
    if case == "softcap" and kernel == "cpu_flash":
        pytest.skip("cpu_flash has no softcap")
    options: dict = {"window": {"window": 9}, "softcap": {"softcap": 1.5}}.get(case, {})
    forest = make_forest([-1, 0, 1, 1, 0, 4, 4, 4], [127, 63, 40, 1, 130, 65, 65, 7], [0, 1])
    x = make_inputs(forest, (4, 2), (32, 32), dtype, sinks=case == "sinks")
    o, lse, found = run(forest, x, kernel=kernel, **options)
    assert o.dtype == found["q"].dtype == found["k"].dtype == dtype
    assert lse.dtype == torch.float32

    exact, torchs = x.to(torch.float64), x.to(dtype)
    exact_o, exact_lse = path_attention(forest, exact, scale=SCALE, **options)
    plain = case in ("plain", "window")
    torchs_o, _ = path_attention(forest, torchs, scale=SCALE, sdpa=plain, **options)
    expected = gradients(exact_o, exact) | {"o": exact_o.detach()}
    usual = gradients(torchs_o, torchs) | {"o": torchs_o.detach()}
    found["o"] = o
    for name, tensor in expected.items():
        error = (found[name].double() - tensor).norm()
        bar = 2 * (usual[name].double() - tensor).norm()
        # Beyond that one rounding of the float32 log-sum-exp, from which a flash backward starts.
        assert error <= bar + torch.finfo(torch.float32).eps * tensor.norm(), (name, error, bar)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
