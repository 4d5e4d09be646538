"""Reads the keys or values of a launch, and adds up their gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.ops.attention.table import Launch
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.tree import FROM_CACHE, FROM_OWN


def rows(x_TKD: Tensor, begin: int, end: int) -> Tensor:
    """Rows begin:end of a tensor; the tensor itself for all rows, because a view takes host
    time."""
    return x_TKD if begin == 0 and end == x_TKD.shape[0] else x_TKD[begin:end]


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a tensor contiguous, in this dtype."""
    return (x if x.dtype == dtype else x.to(dtype)).contiguous()


class RowSum:
    """The gradient of a microbatch's q, k or v: a sum of parts that each cover some of its tokens.

    Summed in float32 (float64 for float64) and cast once. A single part is not copied.
    """

    def __init__(self, like_TKD: Tensor) -> None:
        self._like = like_TKD
        self._parts: list[tuple[int, Tensor]] = []
        self._wide: Tensor | None = None

    def add(self, part_TKD: Tensor, begin: int) -> None:
        """Add a part that begins at the token `begin`. The caller must not use the part
        afterwards."""
        self._parts.append((begin, part_TKD))

    def add_at(self, places: Tensor, part_TKD: Tensor, deterministic: bool) -> None:
        if self._wide is None:
            dtype = accumulate_dtype(self._like.dtype)
            self._wide = self._like.new_zeros(self._like.shape, dtype=dtype)
        _add_at(self._wide, places, part_TKD, deterministic)

    def result(self) -> Tensor:
        """The sum, contiguous, in the dtype of q, k or v."""
        like, parts = self._like, self._parts
        if self._wide is None:
            if not parts:
                return torch.zeros_like(like, memory_format=torch.contiguous_format)
            begin, first = parts[0]
            assert begin == 0 and len(first) == len(like), "the first launch covers every token"
            if len(parts) == 1:
                return dense(first, like.dtype)
            if like.is_cuda and accumulate_dtype(like.dtype) == torch.float32:
                from forkpoint.ops.attention.triton_sums import sum_parts

                return sum_parts(parts, like.dtype)
        total = self._wide
        for begin, part in parts:
            if total is None:
                total = part.to(accumulate_dtype(like.dtype))
            else:
                total[begin : begin + len(part)] += part
        assert total is not None
        return dense(total, like.dtype)


@dataclass(eq=False)
class Source:
    """The keys, or the values, of a microbatch and of its ancestors in the cache.

    microbatch [T, K, D]; cache [A, K, D] or None; cache_grad as the cache in float32 (float64),
    added to in place, or None; own_gather and cache_gather as in AttentionTable.
    """

    _microbatch: Tensor
    _cache: Tensor | None
    _own_gather: Tensor | None
    _cache_gather: Tensor | None
    _cache_grad: Tensor | None = None

    def __post_init__(self) -> None:
        self.grad: RowSum = RowSum(self._microbatch)

    def read(self, launch: Launch) -> Tensor:
        """Keys or values of the launch: a view, or a copy if the launch gathers them."""
        if launch.source == FROM_OWN:
            return rows(self._microbatch, launch.k_begin, launch.k_end)
        if launch.source == FROM_CACHE:
            assert self._cache is not None, "a launch reads the cache, but none was given"
            return rows(self._cache, launch.k_begin, launch.k_end)
        assert self._own_gather is not None, "a launch gathers its keys, but nothing says which"
        gathered_GKD = self._microbatch.new_empty(launch.k_end, *self._microbatch.shape[1:])
        to, places = self._own_gather
        gathered_GKD.index_copy_(0, to, self._microbatch.index_select(0, places))
        if self._cache_gather is not None:
            assert self._cache is not None, "keys are gathered from the cache, but none was given"
            to, places = self._cache_gather
            gathered_GKD.index_copy_(0, to, self._cache.index_select(0, places))
        return gathered_GKD

    def add_grad(self, launch: Launch, part_TKD: Tensor, wanted: bool, deterministic: bool) -> None:
        """Add the gradient of the keys or values of a launch: to the microbatch's sum if `wanted`,
        and to `cache_grad` if given."""
        if launch.source == FROM_OWN:
            if wanted:
                self.grad.add(part_TKD, launch.k_begin)
        elif launch.source == FROM_CACHE:
            if self._cache_grad is not None:
                self._cache_grad[launch.k_begin : launch.k_end] += part_TKD
        else:
            if wanted and self._own_gather is not None:
                at, places = self._own_gather
                self.grad.add_at(places, part_TKD.index_select(0, at), deterministic)
            if self._cache_grad is not None and self._cache_gather is not None:
                at, places = self._cache_gather
                _add_at(self._cache_grad, places, part_TKD.index_select(0, at), deterministic)


def _add_at(total_TKD: Tensor, places: Tensor, part_TKD: Tensor, deterministic: bool) -> None:
    """Add rows to a tensor in place, at indices that may repeat."""
    part_TKD = part_TKD.to(total_TKD.dtype)
    if deterministic and total_TKD.is_cuda:
        # On CUDA, index_add_ adds by atomics in any order, and index_put_ sorts.
        total_TKD.index_put_((places,), part_TKD, accumulate=True)
    else:
        total_TKD.index_add_(0, places, part_TKD)
