"""Context parallelism by all-to-all of heads: ranks of one mesh dimension share the places of each
microbatch.

Places go to the ranks in turn, so that labels, MLP and experts balance in every microbatch. In
each layer, an all-to-all converts queries, keys and values from [a rank's places, all heads] to
[all places, a rank's heads], and another converts attention's output back. In between, attention,
prefix cache, tables, windows and sinks are as without context parallelism, with fewer heads. The
prefix cache of a head stays on the rank of that head.

Ranks exchange log-probs and no hidden states. All compute the same loss from them. Each rank's
backward starts from the gradients of its own entries. So each rank has a part of the parameters'
gradients. fully_shard or DistributedDataParallel sums the parts, so its ranks must include those of
the dimension.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.engine.distributed import Holder
from forkpoint.errors import UnsupportedError
from forkpoint.parallel.topology import Places, Relation
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import IntArray

Move = Callable[[Sequence[Tensor], int], tuple[Tensor, ...]]
NAMES = ("cp", "sp")
"""Names of the mesh dimension in torchtitan and accelerate ("cp"), and in verl for Ulysses
("sp")."""


class ContextSplit(Holder):
    """The holder of ranks that share the places of microbatches."""

    lockstep = True

    def __init__(self, group: dist.ProcessGroup, multiple: int = 1) -> None:
        """`multiple`: the number of a rank's places is padded to a multiple of this."""
        ranks = tuple(dist.get_process_group_ranks(group))
        self.relations: Mapping[Relation, tuple[int, ...]] = {"context": ranks}
        self.places: DealtPlaces = DealtPlaces(group, multiple)

    def factor(self, *, mean: bool) -> float:
        # Each rank has a part of the gradients, and the weights' holder averages over these ranks
        # too.
        return float(self.places.size) if mean else 1.0

    def all_reduce(self, tensor: Tensor) -> None:
        # The weights' holder has summed equal tensors of these ranks.
        tensor /= self.places.size


def context_split(mesh: DeviceMesh | None, holders: Sequence[Holder]) -> ContextSplit | None:
    """The holder for the mesh's dimension of context parallelism; None if there is none.

    Raises UnsupportedError if gradients would not be summed over its ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        return None
    found = [n for n in mesh.mesh_dim_names or () if n in NAMES and mesh[n].size() > 1]
    if not found:
        return None
    if len(found) > 1:
        raise UnsupportedError(
            f"the mesh has the dimensions {' and '.join(found)}, which both split sequences. Use "
            "one of them."
        )
    multiple = math.lcm(*(holder.length_multiple for holder in holders))
    split = ContextSplit(mesh[found[0]].get_group(), multiple)
    ranks = split.relations["context"]
    data = [holder.relations["data"] for holder in holders if "data" in holder.relations]
    if not data or not set(ranks) <= set(data[0]):
        held = f"over ranks {list(data[0])}" if data else "over no ranks"
        raise UnsupportedError(
            f"the mesh's dimension {found[0]!r} splits sequences over ranks {list(ranks)}, and "
            f"fully_shard or DistributedDataParallel holds the weights {held}. Include "
            f"{found[0]!r} in the mesh of fully_shard, as in mesh['dp', 'cp']._flatten()."
        )
    return split


def copies(heads: int, ranks: int) -> int:
    """The least number of copies of each head with which `ranks` divides the number of heads."""
    count = 1
    while heads * count % ranks:  # torch's compiler cannot trace math.lcm
        count += 1
    return count


def repeated(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Repeat heads along `dim` until their number is a multiple of `ranks`. With fewer key heads
    than ranks, several ranks get copies of one head."""
    times = copies(x.shape[dim], ranks)
    return x if times == 1 else x.repeat_interleave(times, dim)


def _copied(x: Tensor) -> Tensor:
    """Contiguous copy."""
    copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    _copy(copy, x)
    return copy


def _copy(to: Tensor, x: Tensor) -> None:
    """Copy in elements of 16 bytes where strides allow it. torch's kernel for strided copies moves
    one element a thread, and is several times slower in elements of 2 bytes."""
    wide = torch.complex128
    if all(_has_elements_of(each, wide.itemsize) for each in (to, x)):
        to, x = to.view(wide), x.view(wide)
    to.copy_(x)


def _has_elements_of(x: Tensor, nbytes: int) -> bool:
    count = max(1, nbytes // x.element_size())
    whole = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(size % count == 0 for size in whole)


class DealtPlaces(Places):
    """Deals place p of a microbatch to rank p mod w of w ranks."""

    whole = False

    def __init__(self, group: dist.ProcessGroup, multiple: int = 1) -> None:
        """`multiple`: the number of each rank's places is padded to a multiple of this."""
        self.group = group
        self.multiple: int = multiple
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    def of(self, microbatch: Microbatch) -> Places:
        return WholeSegments(self, microbatch) if microbatch.parts else self

    def own(self, tokens: int) -> IntArray:
        return np.arange(self.rank, self._padded(tokens), self.size).clip(max=tokens - 1)

    def padding(self, tokens: int) -> int:
        return self._padded(tokens) // self.size - len(range(self.rank, tokens, self.size))

    def _padded(self, tokens: int) -> int:
        return tokens + -tokens % (self.size * self.multiple)

    def own_entries(self, places: IntArray) -> tuple[IntArray, IntArray]:
        here = np.flatnonzero(places % self.size == self.rank)
        return here, places[here] // self.size

    def joined(
        self, per_token: Mapping[str, Tensor], entries: Tensor | None, count: int
    ) -> Mapping[str, Tensor]:
        assert entries is not None
        return {
            name: _Joined.apply(values, entries, count, self.group)
            for name, values in per_token.items()
        }

    def to_heads(self, tensors: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
        given = [repeated(x_THD, self.size, 1) for x_THD in tensors]
        return _Moved.apply(self.heads_of, self.places_of, tokens, *given)

    def to_places(self, o_THD: Tensor, tokens: int) -> Tensor:
        return _Moved.apply(self.places_of, self.heads_of, tokens, o_THD)[0]

    def all_heads(self, x_ThD: Tensor) -> Tensor:
        return torch.cat(self.all_of(x_ThD), 1)

    def sum_of_heads(self, x_THD: Tensor) -> Tensor:
        parts_wThD = x_THD.unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchange(parts_wThD).sum(0)

    def own_heads(self, x_H: Tensor) -> Tensor:
        return repeated(x_H, self.size, 0).chunk(self.size)[self.rank]

    def heads_here(self, heads: int) -> int:
        return heads * copies(heads, self.size) // self.size

    def summed(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def all_of(self, x: Tensor) -> list[Tensor]:
        sent = x.contiguous().view(torch.uint8)  # NCCL has no integers of 16 bits
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.group)
        return [each.view(x.dtype) for each in found]

    # Exchanges, without gradients
    # ------------------------------------------------------------

    def heads_of(self, tensors: Sequence[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """From [t, H, D] to [tokens, H / w, D]. Collective."""
        dealt = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in tensors]  # [w, t, h, D]
        return tuple(
            _copied(x_wthD.transpose(0, 1)).flatten(0, 1)[:tokens] for x_wthD in self._sent(dealt)
        )

    def places_of(self, tensors: Sequence[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """From [tokens, H / w, D] to [t, H, D]; 0 at padding. Collective."""
        padding = self._padded(tokens) - tokens
        if padding:
            tensors = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in tensors]
        dealt = [x.unflatten(0, (-1, self.size)).transpose(0, 1) for x in tensors]  # [w, t, h, D]
        return tuple(_copied(x_wthD.transpose(0, 1)).flatten(1, 2) for x_wthD in self._sent(dealt))

    def _sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors [w, t, h, D]: part r of each goes to rank r. One collective for all of them."""
        ranks, tokens = tensors[0].shape[:2]
        widths = [x.shape[2] * x.shape[3] for x in tensors]
        sent_wtF = tensors[0].new_empty(ranks, tokens, sum(widths))
        for x_wthD, part_wtF in zip(tensors, sent_wtF.split(widths, -1), strict=True):
            _copy(part_wtF.unflatten(-1, x_wthD.shape[2:]), x_wthD)
        parts = self._exchange(sent_wtF).split(widths, -1)
        return [part.unflatten(-1, x.shape[2:]) for x, part in zip(tensors, parts, strict=True)]

    def _exchange(self, sent_wtF: Tensor) -> Tensor:
        """All-to-all: send part r to rank r, and return the parts for this rank."""
        sent_wtF = sent_wtF.contiguous()
        got_wtF = torch.empty_like(sent_wtF)
        dist.all_to_all_single(got_wtF, sent_wtF, group=self.group)
        return got_wtF


class WholeSegments(Places):
    """Deals whole segments of a microbatch. A rank runs its segments with all heads, and exchanges
    nothing around attention.

    If there are fewer key heads than ranks, they are repeated as in a gathered prefix cache.
    """

    whole = False

    def __init__(self, ranks: DealtPlaces, microbatch: Microbatch) -> None:
        self._ranks: DealtPlaces = ranks
        self.size: int = ranks.size
        self.rank: int = ranks.rank
        self._begin: int = sum(part.tokens for part in microbatch.parts[: ranks.rank])
        self._end: int = self._begin + microbatch.parts[ranks.rank].tokens

    def own(self, tokens: int) -> IntArray:
        end = self._end + self.padding(tokens)
        return np.arange(self._begin, end).clip(max=self._end - 1)

    def padding(self, tokens: int) -> int:
        return (self._begin - self._end) % self._ranks.multiple

    def own_entries(self, places: IntArray) -> tuple[IntArray, IntArray]:
        here = np.flatnonzero((places >= self._begin) & (places < self._end))
        return here, places[here] - self._begin

    def joined(
        self, per_token: Mapping[str, Tensor], entries: Tensor | None, count: int
    ) -> Mapping[str, Tensor]:
        return self._ranks.joined(per_token, entries, count)

    def to_heads(self, tensors: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
        return [repeated(x, self.size, 1)[:tokens] for x in tensors]

    def to_places(self, o_THD: Tensor, tokens: int) -> Tensor:
        return self.places_of((o_THD,), tokens)[0]

    def heads_of(self, tensors: Sequence[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """Copies [at most tokens, H, D] of [t, H, D]."""
        return tuple(x[:tokens].clone() for x in tensors)

    def places_of(self, tensors: Sequence[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """Copies [t, H, D] of [tokens, H, D]; 0 at padding."""
        padding = (0, 0, 0, 0, 0, self.padding(tokens))
        return tuple(torch.nn.functional.pad(x, padding) for x in tensors)


class _Moved(torch.autograd.Function):
    """Applies `there` to tensors, and `back` to their gradients. Both are methods of places."""

    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, tokens: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.tokens = back, tokens
        return there(tensors, tokens)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(grad_outputs, ctx.tokens)


class _Joined(torch.autograd.Function):
    """Outputs for the entries of all ranks. The backward returns the gradient of this rank's
    entries, because all ranks compute the same loss."""

    @staticmethod
    def forward(
        ctx: Any, own_m: Tensor, entries_m: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(entries_m)
        all_n = own_m.new_zeros(count)
        all_n[entries_m] = own_m
        dist.all_reduce(all_n, group=group)
        return all_n

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (entries_m,) = ctx.saved_tensors
        return grad_outputs[0][entries_m], None, None, None
