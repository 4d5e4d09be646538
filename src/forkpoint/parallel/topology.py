"""Ranks that hold one model: by which parallelism, who shares a batch, and who contributes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from forkpoint.tree import Microbatch
from forkpoint.tree.forest import IntArray

Relation = Literal["data", "tensor", "expert", "context", "stage"]
"""A kind of parallelism, by which ranks are connected."""
SHARING: tuple[Relation, ...] = ("tensor", "context", "stage")
"""Those of ranks with the same batch."""


class Places:
    """The places of a microbatch that this rank runs: all of them.

    Ranks that run parts of one (context parallelism) override the methods. Attention there sees
    all places, with a part of the heads.
    """

    whole: bool = True
    """Whether each rank runs all places, so that no method changes anything."""
    size: int = 1
    """Ranks that run parts of a microbatch."""
    rank: int = 0
    """This one among them."""

    def of(self, microbatch: Microbatch) -> "Places":
        """Those of one microbatch, whose segments may be dealt out whole (`Microbatch.parts`)."""
        return self

    def own(self, tokens: int) -> IntArray | None:
        """int64 [t]: the places that this rank runs of a microbatch of `tokens`; None if all."""
        return None

    def padding(self, tokens: int) -> int:
        """How many of these, the last ones, are padding, which repeats places of other ranks."""
        return 0

    def own_entries(self, places: IntArray) -> tuple[IntArray, IntArray] | None:
        """Which entries of the head this rank computes, and where their tokens are among its own;
        None if all, where they are.

        places: int64 [n], of the entries, in the microbatch.
        """
        return None

    def joined(
        self, per_token: Mapping[str, Tensor], entries: Tensor | None, count: int
    ) -> Mapping[str, Tensor]:
        """Outputs [count] for all of a microbatch's entries, from those for this rank's `entries`.
        Collective."""
        return per_token

    def to_heads(self, tensors: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
        """Of tensors [t, H, D] at this rank's places the part of the heads that attention runs
        here, at all places: [tokens, h, D]. Collective, and so is its backward."""
        return tensors

    def to_places(self, o_THD: Tensor, tokens: int) -> Tensor:
        """The reverse of `to_heads`, of attention's output."""
        return o_THD

    def all_heads(self, x_ThD: Tensor) -> Tensor:
        """A tensor of the heads of each rank, without a gradient, with those of all: [T, H, D].
        Collective."""
        return x_ThD

    def sum_of_heads(self, x_THD: Tensor) -> Tensor:
        """The sum over ranks of tensors of all heads, of the heads here: [T, h, D]. Collective."""
        return x_THD

    def own_heads(self, x_H: Tensor) -> Tensor:
        """The part of a parameter of each head, [H, ...], that belongs to the heads here."""
        return x_H

    def heads_here(self, heads: int) -> int:
        """How many heads attention runs here of so many."""
        return heads

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor, without a gradient, over the ranks that run parts of a microbatch.
        Collective."""
        return x

    def all_of(self, x: Tensor) -> list[Tensor]:
        """A tensor, without a gradient, of each of these ranks. Collective."""
        return [x]


ALL_PLACES = Places()


class PaddedPlaces(Places):
    """All places of a microbatch, and copies of its last one up to a multiple of some length.

    For modules that split sequences over ranks evenly, as sequence parallelism does.
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
    """The ranks of one model and what each does in a step, read once from the model and its mesh.

    Ranks are named by their numbers in the default process group. The defaults are of a rank that
    holds its model alone.
    """

    rank: int = 0
    """This rank."""
    relations: Mapping[Relation, tuple[int, ...]] = field(default_factory=dict)
    """By kind of parallelism, the ranks (this one among them) over which the model is held:
    "data" sums gradients over them, "tensor" splits modules over them, "expert" deals experts out,
    "context" deals out the places of each microbatch, "stage" gives
    each some of the blocks.
    """
    members: tuple[int, ...] = (0,)
    """All ranks that any of the relations connects: they step together."""
    batches: tuple[int, ...] = (0,)
    """By member, the number of its batch, from 0. Ranks of one tensor, context or stage relation
    have the same."""
    lockstep: bool = False
    """Whether forwards and backwards issue collectives, so that all ranks run the same program,
    unless weights are gathered for the step."""
    gathers: bool = False
    """Whether weights can be gathered for a whole step."""
    reduces: bool = False
    """Whether the last backward reduces gradients; otherwise a step reduces them after it."""
    listens: bool = False
    """Whether a wrapper takes any backward that reaches the parameters for that of its last stock
    forward, so that a step's backwards must reach others (`gradient_sums.twins`)."""

    length_multiple: int = 1
    """Stock forwards take sequences whose length is a multiple of it."""
    places: Places = ALL_PLACES
    """The places of each microbatch that this rank runs."""

    @property
    def splits_modules(self) -> bool:
        """Whether each rank computes a part of a module, with collectives inside its forward."""
        return "tensor" in self.relations

    @property
    def shares_batches(self) -> bool:
        """Whether any two ranks have the same batch."""
        return len(self.contributors) < len(self.members)

    @property
    def contributors(self) -> tuple[int, ...]:
        """By batch, the index among members of the rank whose loss, counts and per-token values
        count. Other ranks of the batch compute the same ones."""
        return tuple(self.batches.index(batch) for batch in sorted(set(self.batches)))


def connected(
    groups: Mapping[int, Mapping[Relation, tuple[int, ...]]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that relations connect with one rank, and by rank which batch it has.

    Args:
        groups: by rank, its relations.
        rank: the one to begin with.
    """
    ordered = _reached(groups, rank, ("data", "tensor", "expert", "context", "stage"))
    # Batches are in the order of the first rank that has each.
    first = {one: _reached(groups, one, SHARING)[0] for one in ordered}
    firsts = sorted(set(first.values()))
    return ordered, tuple(firsts.index(first[one]) for one in ordered)


def partition(groups: Mapping[int, Mapping[Relation, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """All ranks, in the groups that relations connect."""
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
