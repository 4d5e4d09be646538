"""Where a launch's keys or values lie, and where their gradients go."""

import torch
from torch import Tensor

from forkpoint.ops.attention.kernel import accumulate_dtype
from forkpoint.ops.attention.table import FROM_ARENA, FROM_ROW, Launch


class RowSum:
    """The gradient of a row's q, k or v: a sum of parts that each cover some of its tokens.

    Summed in float32 (float64 for float64) and cast once; a part that is alone is kept as it is.
    """

    def __init__(self, like_TKD: Tensor) -> None:
        self._like = like_TKD
        self._parts: list[tuple[int, Tensor]] = []
        self._wide: Tensor | None = None

    def add(self, part_TKD: Tensor, begin: int) -> None:
        """Add to the tokens from `begin` on. Owns the part from here on."""
        self._parts.append((begin, part_TKD))

    def add_at(self, slots: Tensor, part_TKD: Tensor, deterministic: bool) -> None:
        if self._wide is None:
            dtype = accumulate_dtype(self._like.dtype)
            self._wide = self._like.new_zeros(self._like.shape, dtype=dtype)
        _add_at(self._wide, slots, part_TKD, deterministic)

    def result(self) -> Tensor:
        """The sum, contiguous and in the dtype of what it is the gradient of."""
        like, parts = self._like, self._parts
        if self._wide is None:
            if not parts:
                return torch.zeros_like(like, memory_format=torch.contiguous_format)
            begin, first = parts[0]
            assert begin == 0 and len(first) == len(like), "the first launch covers every token"
            if len(parts) == 1:
                return first.to(like.dtype).contiguous()
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
        return total.to(like.dtype).contiguous()


class Source:
    """The keys, or the values, of a row and of its ancestors in the arena.

    row [T, K, D]; arena [A, K, D] or None; arena_grad as the arena in float32 (float64), added to
    in place, or None; row_gather and arena_gather as in AttentionTable.
    """

    def __init__(
        self,
        row_TKD: Tensor,
        arena_AKD: Tensor | None,
        row_gather: Tensor | None,
        arena_gather: Tensor | None,
        arena_grad_AKD: Tensor | None = None,
    ) -> None:
        self._row = row_TKD
        self._arena = arena_AKD
        self._row_gather = row_gather
        self._arena_gather = arena_gather
        self._arena_grad = arena_grad_AKD
        self.grad: RowSum = RowSum(row_TKD)

    def read(self, launch: Launch) -> Tensor:
        """What the launch reads: a view, or, if it gathers, a copy."""
        if launch.source == FROM_ROW:
            return self._row[launch.k_begin : launch.k_end]
        if launch.source == FROM_ARENA:
            assert self._arena is not None, "a launch reads the arena, but none was given"
            return self._arena[launch.k_begin : launch.k_end]
        assert self._row_gather is not None, "a launch gathers its keys, but nothing says which"
        gathered_GKD = self._row.new_empty(launch.k_end, *self._row.shape[1:])
        to, slots = self._row_gather
        gathered_GKD.index_copy_(0, to, self._row.index_select(0, slots))
        if self._arena_gather is not None:
            assert self._arena is not None, "keys are gathered from the arena, but none was given"
            to, slots = self._arena_gather
            gathered_GKD.index_copy_(0, to, self._arena.index_select(0, slots))
        return gathered_GKD

    def add_grad(self, launch: Launch, part_TKD: Tensor, wanted: bool, deterministic: bool) -> None:
        """Add the gradient of what the launch read: the row's if wanted, the arena's if it has
        somewhere to go."""
        if launch.source == FROM_ROW:
            if wanted:
                self.grad.add(part_TKD, launch.k_begin)
        elif launch.source == FROM_ARENA:
            if self._arena_grad is not None:
                self._arena_grad[launch.k_begin : launch.k_end] += part_TKD
        else:
            if wanted and self._row_gather is not None:
                at, slots = self._row_gather
                self.grad.add_at(slots, part_TKD.index_select(0, at), deterministic)
            if self._arena_grad is not None and self._arena_gather is not None:
                at, slots = self._arena_gather
                _add_at(self._arena_grad, slots, part_TKD.index_select(0, at), deterministic)


def _add_at(total_TKD: Tensor, slots: Tensor, part_TKD: Tensor, deterministic: bool) -> None:
    """Add rows at slots that may repeat, in place."""
    part_TKD = part_TKD.to(total_TKD.dtype)
    if deterministic and total_TKD.is_cuda:
        # There index_add_ is atomic and in any order, while index_put_ sorts.
        total_TKD.index_put_((slots,), part_TKD, accumulate=True)
    else:
        total_TKD.index_add_(0, slots, part_TKD)
