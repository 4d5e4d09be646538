"""Capabilities of hosts, so that plans ask them for nothing else."""

from dataclasses import dataclass

from forkpoint.errors import PlanError


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a host with a microbatch."""

    leaves_early: bool = True
    """Whether a forward can end in the last block, once this has computed what later tokens read
    of it. Not where activation checkpointing of the model's own repeats forwards."""
    checkpoints: tuple[str, ...] = ("none", "selective", "full")
    """Policies of checkpointing that its blocks can run with."""
    length_multiple: int = 1
    """Lengths of microbatches must be multiples of this many tokens; 1 is any length. A host that
    splits sequences over ranks, or whose kernels take whole tiles alone, needs more: plans then pad
    each microbatch."""

    def __post_init__(self) -> None:
        if type(self.length_multiple) is not int or self.length_multiple < 1:
            raise PlanError(
                f"length_multiple is {self.length_multiple!r}; it takes a whole number of at least "
                "1, where 1 is any length."
            )
