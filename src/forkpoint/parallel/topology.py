"""Ranks that hold one model: by which parallelism, who shares a batch, and who contributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

T = TypeVar("T")
Relation = Literal["data", "tensor", "expert"]
"""A kind of parallelism, by which ranks are connected."""


@dataclass(frozen=True)
class Whole:
    """All places of a microbatch, which a rank runs that shares no microbatch with another.

    Ranks that run parts of one (context parallelism) have another value with these methods.
    """

    def part(self, inputs: T) -> T:
        """The inputs of a microbatch as far as this rank runs it: tokens, positions, entries of
        the head."""
        return inputs

    def joined(self, per_token: T) -> T:
        """Outputs for all of a microbatch's entries, from those for this rank's."""
        return per_token


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
    "data" sums gradients over them, "tensor" splits modules over them, "expert" deals experts out.
    """
    members: tuple[int, ...] = (0,)
    """All ranks that any of the relations connects: they step together."""
    batches: tuple[int, ...] = (0,)
    """By member, the number of its batch, from 0. Ranks of one tensor relation have the same."""
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

    places: Whole = Whole()
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
    members: set[int] = set()
    todo = [rank]
    while todo:
        one = todo.pop()
        if one not in members:
            members.add(one)
            todo += [other for related in groups[one].values() for other in related]
    ordered = tuple(sorted(members))
    # Batches are in the order of the first rank that has each.
    first = {one: min(groups[one].get("tensor", (one,))) for one in ordered}
    firsts = sorted(set(first.values()))
    return ordered, tuple(firsts.index(first[one]) for one in ordered)
