"""Prefix cache: captured once, read as a constant, its gradients injected in float32."""

import pytest
import torch
from torch import Tensor

from forkpoint.engine.prefix_cache import Capture, PrefixCache, capture_prefix
from forkpoint.ops.dtypes import accumulate_dtype

KEY = (0, "k")


def microbatch(*, dtype: torch.dtype = torch.float64, tokens: int = 6, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(tokens, 2, 3, generator=generator, dtype=dtype).requires_grad_(grad)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_gradients_are_summed_at_least_in_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert accumulate_dtype(dtype) == wide
    cache = PrefixCache(8, gradients=True)
    state, gradient = cache.buffers(KEY, microbatch(dtype=dtype))
    assert gradient is not None
    assert (state.dtype, gradient.dtype) == (dtype, wide)
    assert state.shape == gradient.shape == (8, 2, 3)


@pytest.mark.parametrize("runs", [[(0, 6, 0)], [(0, 3, 0), (3, 6, 3)]], ids=["whole", "parts"])
def test_the_sum_is_rounded_once(runs: list[tuple[int, int, int]]) -> None:
    cache, x = PrefixCache(6, gradients=True), microbatch(dtype=torch.bfloat16)
    kept = capture_prefix(x, KEY, Capture(cache, runs))
    _, gradient = cache.read(KEY)
    assert gradient is not None
    # bfloat16 has 8 bits: near 1 it steps by 2**-7, and this is just more than half a step. Rounded
    # before it is added, or added in parts, it would be half a step or less, and be lost.
    for part in (2.0**-9, 2.0**-9, 2.0**-16):
        gradient += part
    (found,) = torch.autograd.grad(kept, x, torch.ones_like(kept))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.full_like(found, 1 + 2.0**-7))


@pytest.mark.parametrize("gradients", [True, False])
def test_without_gradients_state_is_only_captured(gradients: bool) -> None:
    """Frozen layers below an adapter, and passes that only score."""
    cache, x = PrefixCache(6, gradients=gradients), microbatch(grad=not gradients)
    assert capture_prefix(x, KEY, Capture(cache, [(0, 6, 0)])) is x
    state, gradient = cache.read(KEY)
    assert torch.equal(state, x)
    assert (gradient is not None) == gradients


def test_writes_to_other_places_do_not_disturb_a_reader() -> None:
    cache = PrefixCache(4, gradients=True)
    first, second = microbatch(tokens=2), microbatch(tokens=2)
    capture_prefix(first, KEY, Capture(cache, [(0, 2, 0)]))
    state, _ = cache.read(KEY)
    q = microbatch(tokens=2)
    scores = (q * state[:2]).sum()
    capture_prefix(second, KEY, Capture(cache, [(0, 2, 2)]))
    scores.backward()  # would raise if autograd took the write for one into what it saved
    assert torch.equal(q.grad, first)  # type: ignore[arg-type]
    assert not state.requires_grad


def test_second_derivatives_are_refused() -> None:
    cache, x = PrefixCache(6, gradients=True), microbatch()
    kept = capture_prefix(x, KEY, Capture(cache, [(0, 6, 0)]))
    (first,) = torch.autograd.grad((kept**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
