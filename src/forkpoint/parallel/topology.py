"""The topology of a model's ranks: kinds of parallelism, shared batches, and parts of
microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from forkpoint.parallel.ranks import group_leaders
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import IntArray

Relation = Literal["data", "tensor", "expert", "context", "stage"]
"""A kind of parallelism that connects ranks."""
SHARING: tuple[Relation, ...] = ("tensor", "context", "stage")
"""Relations of ranks with the same batch."""


class Places:
    """The places of a microbatch that this rank runs. This class: all places.

    Subclasses are for ranks that run parts of a microbatch (context parallelism). There, attention
    runs all places with a part of the heads.
    """

    whole: bool = True
    """Whether each rank runs all places. Then no method changes anything."""
    size: int = 1
    """Number of ranks that share a microbatch."""
    rank: int = 0
    """Index of this rank among them."""

    def of(self, microbatch: Microbatch) -> "Places":
        """The places of one microbatch. It may be split by responses (`Microbatch.parts`)."""
        return self

    def own(self, tokens: int) -> IntArray | None:
        """int64 [t]: the places that this rank runs, of `tokens` places; None for all."""
        return None

    def padding(self, tokens: int) -> int:
        """Number of places at the end of `own` that are padding, which repeats other places."""
        return 0

    def own_entries(self, places: IntArray) -> tuple[IntArray, IntArray] | None:
        """Indices of the head's entries that this rank computes, and of their tokens among this
        rank's places; None for all, without change.

        places: int64 [n], places of the entries in the microbatch.
        """
        return None

    def joined(
        self, per_token: Mapping[str, Tensor], entries: Tensor | None, count: int
    ) -> Mapping[str, Tensor]:
        """Exchange outputs of the head. Takes those of this rank's `entries`, and returns those of
        all `count` entries. Collective."""
        return per_token

    def to_heads(self, tensors: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
        """Convert tensors [t, H, D] of this rank's places to [tokens, h, D]: all places, with the
        heads whose attention this rank runs. Collective, also in the backward."""
        return tensors

    def to_places(self, o_THD: Tensor, tokens: int) -> Tensor:
        """Convert attention's output back: the reverse of `to_heads`."""
        return o_THD

    def all_heads(self, x_ThD: Tensor) -> Tensor:
        """Gather the heads of all ranks, without a gradient: [T, H, D]. Collective."""
        return x_ThD

    def sum_of_heads(self, x_THD: Tensor) -> Tensor:
        """Sum tensors of all heads over ranks. Returns this rank's heads: [T, h, D]. Collective."""
        return x_THD

    def own_heads(self, x_H: Tensor) -> Tensor:
        """This rank's heads of a parameter [H, ...]."""
        return x_H

    def heads_here(self, heads: int) -> int:
        """Number of heads whose attention this rank runs, of `heads`."""
        return heads

    def summed(self, x: Tensor) -> Tensor:
        """Sum a tensor, without a gradient, over the ranks that share a microbatch. Collective."""
        return x

    def all_of(self, x: Tensor) -> list[Tensor]:
        """Gather a tensor, without a gradient, from each of these ranks. Collective."""
        return [x]


ALL_PLACES = Places()


class PaddedPlaces(Places):
    """All places of a microbatch, padded by copies of its last place to a multiple of a length.

    For modules that split sequences evenly over ranks (sequence parallelism).
    """

    whole = False

    def __init__(self, multiple: int) -> None:
        self.multiple: int = multiple

    def own(self, tokens: int) -> IntArray:
        return np.arange(tokens + self.padding(tokens)).clip(max=tokens - 1)

    def padding(self, tokens: int) -> int:
        return -tokens % self.multiple

    def to_heads(self, tensors: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
        return [x[:tokens] for x in tensors]

    def to_places(self, o_THD: Tensor, tokens: int) -> Tensor:
        return torch.nn.functional.pad(o_THD, (0, 0, 0, 0, 0, self.padding(tokens)))


@dataclass(frozen=True)
class Topology:
    """The ranks of one model and their parts in a step, read once from the model and its mesh.

    Ranks are numbers in the default process group. Defaults are for a model on one rank.
    """

    relations: Mapping[Relation, tuple[int, ...]] = field(default_factory=dict)
    """The ranks, this one included, that hold the model by each kind of parallelism. "data" sums
    gradients over them, "tensor" splits modules, "expert" distributes experts, "context" deals out
    the places of each microbatch, "stage" distributes blocks.
    """
    members: tuple[int, ...] = (0,)
    """All ranks that any relation connects. They step together."""
    batches: tuple[int, ...] = (0,)
    """The number of the batch of each member, from 0. Ranks of one tensor, context or stage
    relation have the same batch."""
    lockstep: bool = False
    """Whether forwards and backwards issue collectives, so that all ranks run the same program,
    unless weights are gathered for the step."""
    gathers: bool = False
    """Whether weights can be gathered for a whole step."""
    reduces: bool = False
    """Whether the last backward reduces gradients; otherwise a step reduces them after it."""
    listens: bool = False
    """Whether a wrapper mistakes any backward that reaches its parameters for that of its last
    stock forward. Then a step's backwards must reach other parameters
    (`engine.gradients.twins`)."""

    length_multiple: int = 1
    """Lengths of sequences in stock forwards must be multiples of this."""
    places: Places = ALL_PLACES
    """The places of each microbatch that this rank runs."""

    @property
    def shares_batches(self) -> bool:
        """Whether any two ranks have the same batch."""
        return len(self.contributors) < len(self.members)

    @property
    def contributors(self) -> tuple[int, ...]:
        """For each batch, the index among members of the rank whose loss, counts and per-token
        values count. Other ranks of the batch compute the same values."""
        return group_leaders(self.batches)


def connected(
    groups: Mapping[int, Mapping[Relation, tuple[int, ...]]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that relations connect with one rank, and the number of each rank's batch.

    Args:
        groups: relations of each rank.
        rank: the rank to begin with.
    """
    ordered = _reached(groups, rank, ("data", "tensor", "expert", "context", "stage"))
    # Batches are in the order of the first rank that has each.
    first = {one: _reached(groups, one, SHARING)[0] for one in ordered}
    firsts = sorted(set(first.values()))
    return ordered, tuple(firsts.index(first[one]) for one in ordered)


def partition(groups: Mapping[int, Mapping[Relation, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Partition all ranks into groups that relations connect."""
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in groups:
        if rank not in seen:
            found.append(connected(groups, rank)[0])
            seen.update(found[-1])
    return found


def _reached(
    groups: Mapping[int, Mapping[Relation, tuple[int, ...]]], rank: int, kinds: tuple[Relation, ...]
) -> tuple[int, ...]:
    """The ranks that relations of these kinds connect with one rank, in order."""
    found: set[int] = set()
    todo = [rank]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += [other for kind in kinds for other in groups[one].get(kind, ())]
    return tuple(sorted(found))
