"""Assertions of the operator on its inputs: shapes and numbers on the host only, never a sync."""

from torch import Tensor

from forkpoint.ops.attention.table import Launch
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.tree import FROM_CACHE, FROM_GATHER, FROM_OWN


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor | None,
    cache_v: Tensor | None,
    cache_grad_k: Tensor | None,
    cache_grad_v: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise AssertionError where tensors contradict one another."""
    assert q.ndim == k.ndim == v.ndim == 3, "q, k and v are [tokens, heads, head dim]"
    assert len(q) == len(k) == len(v), (
        f"{len(q)} queries, {len(k)} keys, {len(v)} values in a microbatch"
    )
    assert k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0, (
        f"{q.shape[1]} query heads, {k.shape[1]} key heads, {v.shape[1]} value heads"
    )
    assert q.shape[2] == k.shape[2], f"head dim {q.shape[2]} of queries, {k.shape[2]} of keys"
    assert sinks is None or sinks.shape == q.shape[1:2], "sinks are one logit per query head"
    assert (cache_k is None) == (cache_v is None), "the cache has keys and values or neither"
    assert (cache_grad_k is None) == (cache_grad_v is None), "cache gradients: both or neither"
    for own, other, grad in ((k, cache_k, cache_grad_k), (v, cache_v, cache_grad_v)):
        assert q.dtype == own.dtype and q.device == own.device, (
            f"q is {q.dtype} on {q.device}, k or v {own.dtype} on {own.device}"
        )
        if other is None:
            assert grad is None, "gradients of an cache that was not given"
            continue
        assert other.dtype == own.dtype and other.shape[1:] == own.shape[1:], (
            f"the cache holds {other.dtype} {tuple(other.shape)}, the microbatch {own.dtype} "
            f"{tuple(own.shape)}"
        )
        if grad is not None:
            assert grad.dtype == accumulate_dtype(own.dtype) and grad.shape == other.shape, (
                f"the cache's gradient is {grad.dtype} {tuple(grad.shape)} for {own.dtype} "
                f"{tuple(other.shape)}"
            )


def check_launches(
    launches: list[Launch], microbatch_tokens: int, cache_tokens_: int, gathers: bool, window: int
) -> None:
    """Raise AssertionError where launches leave the tensors or do not express the window."""
    assert launches[0].q_end == microbatch_tokens, (
        f"the first launch covers {launches[0].q_end} queries of {microbatch_tokens}"
    )
    keys = {FROM_OWN: microbatch_tokens, FROM_CACHE: cache_tokens_}
    for launch in launches:
        assert launch.q_end <= microbatch_tokens, launch
        assert launch.source == FROM_GATHER or launch.k_end <= keys[launch.source], launch
        assert launch.source != FROM_GATHER or (gathers and window), (
            "a gathering launch holds only the tails of its paths: it needs key_index and a window"
        )
    assert not window or (len(launches) == 1 and launches[0].causal), (
        "a window is one causal launch; an unmasked rectangle cannot express it"
    )
