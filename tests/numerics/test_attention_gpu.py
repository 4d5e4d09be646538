"""The composition on a CUDA device: the same numbers, no syncs, the same bits when asked for."""

import pytest
import torch
from test_attention_forest import (
    Forest,
    Inputs,
    gradients,
    make_inputs,
    path_attention,
    random_forest,
)
from torch import Tensor

from forkpoint.ops.attention import AttentionTable, CacheSlice, shared_attention
from forkpoint.ops.dtypes import accumulate_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def run_on_gpu(
    forest: Forest, x: Inputs, table: AttentionTable, window: int, deterministic: bool = False
) -> dict[str, Tensor]:
    """o, lse and gradients by name, on the CPU; no step of it may wait for the device."""
    leaves = {
        name: getattr(x, name).detach().cuda().requires_grad_()
        for name in x.NAMES
        if getattr(x, name) is not None
    }
    cache = None
    if "cache_k" in leaves:
        k, v = leaves.pop("cache_k").detach(), leaves.pop("cache_v").detach()
        grads = (torch.zeros_like(a, dtype=accumulate_dtype(a.dtype)) for a in (k, v))
        cache = CacheSlice(k, v, *grads)
    do = x.do.cuda()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, lse = shared_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            table=table,
            cache=cache,
            sinks=leaves.get("sinks"),
            scale=0.3,
            window=window,
            deterministic=deterministic,
        )
        found = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), do), strict=True))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    if cache is not None:
        assert cache.grad_k is not None and cache.grad_v is not None
        found |= {"cache_k": cache.grad_k, "cache_v": cache.grad_v}
    return {name: a.detach().cpu() for name, a in (found | {"o": o, "lse": lse}).items()}


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("seed", range(3))
def test_equals_attention_over_paths(seed: int, window: int) -> None:
    forest = random_forest(seed)
    x = make_inputs(forest, (4, 2), (8, 8), torch.float64, sinks=seed > 0)
    found = run_on_gpu(forest, x, forest.table(window, "cuda"), window)
    o, lse = path_attention(forest, x, scale=0.3, window=window)
    expected = gradients(o, x) | {"o": o.detach(), "lse": lse}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 33])
def test_deterministic_repeats_bit_by_bit(window: int, dtype: torch.dtype) -> None:
    forest = random_forest(4, segments=40, longest=60)
    x = make_inputs(forest, (8, 2), (64, 64), dtype, sinks=True)
    table = forest.table(window, "cuda")
    runs = [run_on_gpu(forest, x, table, window, deterministic=True) for _ in range(4)]
    for again in runs[1:]:
        assert all(torch.equal(again[name], runs[0][name]) for name in again)
