"""The ranks that train one model on rollouts of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from forkpoint.errors import RankError
from forkpoint.parallel.process_groups import next_number, process_group
from forkpoint.parallel.watch import Watch, store_of

T = TypeVar("T")
Phase = Literal["apart", "exchanging", "joined", "alone", "told", "settled"]
"""Where a rank is in a call.

apart: before the first exchange; the others wait for it.
exchanging: within an exchange, which others may have left.
joined: all run the step, and will exchange once more at its end.
alone: as joined, and no collective lies before that: weights are gathered for the step.
told: all know how the call ends, or it has ended.
settled: all know that no rank has failed, and take the step's gradients.
"""


@dataclass(eq=False)
class DataRanks:
    """Ranks whose rollouts together are one batch, and a group over which they agree on CPUs.

    By default this process alone, which exchanges nothing.
    """

    index: int = 0
    """This rank's number among them, from 0."""
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    """By index, the number in the default process group, which messages name."""
    cpu_group: dist.ProcessGroup | None = None
    number: int = 0
    """Number of the policy's model, the same on all of these ranks."""
    store: Store | None = None
    """Of these ranks and this number, for ranks that fail or wait."""
    batches: tuple[int, ...] = ()
    """By index, which batch a rank has, from 0: ranks of one hold one copy of the model together
    (tensor parallelism). By default each has its own."""
    calls: int = 0
    """How many calls all ranks have come to."""
    phase: Phase = "told"
    broken: str | None = None
    """Why no further step is possible: this rank has left the collectives of one."""
    watch: Watch | None = None
    """Of the call under way."""
    device_group: dist.ProcessGroup | None = None
    """For tensors on a device, once some were sent."""

    def __post_init__(self) -> None:
        self.batches = self.batches or tuple(range(self.size))

    @property
    def is_alone(self) -> bool:
        """Whether no process group connects this process with others."""
        return self.cpu_group is None

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, by index. Collective.

        The phase is "exchanging" until the caller sets what follows from the values: an interrupt
        between the two leaves others with values of which this rank knows nothing.

        Raises RankError where this rank has failed within a step's collectives before, or where
        other ranks exchange values of another model's policy.
        """
        if self.cpu_group is None:
            return [value]
        if self.broken is not None:
            raise RankError(
                f"{self.name} failed within a step's collectives ({self.broken}), in which the "
                "other ranks have ended. Start all processes again, from the last checkpoint."
            )
        first, self.phase = self.phase == "apart", "exchanging"
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.number, value), group=self.cpu_group)
        self._check_model([number for number, _ in found])
        self.calls += first
        return [each for _, each in found]

    def _check_model(self, numbers: Sequence[int]) -> None:
        """Raise RankError unless all ranks exchange values of one model. Models that the same
        ranks hold share a process group."""
        other = next((n for n, number in enumerate(numbers) if number != numbers[0]), None)
        if other is None:
            return
        self.phase = "told"  # all ranks raise
        names = self.global_ranks
        raise RankError(
            f"the ranks call policies of different models: rank {names[0]} of model {numbers[0]}, "
            f"rank {names[other]} of model {numbers[other]} (numbered by calls of forkpoint.wrap). "
            "Every rank must make the same calls in the same order."
        )

    def group_of(self, device: torch.device) -> dist.ProcessGroup:
        """The group to send tensors of a device over. Collective the first time."""
        if device.type == "cpu":
            assert self.cpu_group is not None
            return self.cpu_group
        if self.device_group is None:
            group = process_group(self.global_ranks, members_only=True)
            assert group is not None
            # NCCL connects all ranks at the first collective of a group; a first exchange between
            # two of them alone is undefined.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self.device_group = group
        return self.device_group

    def may_be_missed(self, error: BaseException) -> None:
        """Say that this rank may not come to collectives in which others wait. They end, unless
        the call does meanwhile: then it was the same on all ranks, or there were none."""
        if self.watch is not None:
            text = " ".join(str(error).split())
            self.watch.stuck(f"{self.name}: {type(error).__name__}: {text}")

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self.global_ranks[self.index]}"


def group_leaders(batches: Sequence[int]) -> tuple[int, ...]:
    """By batch, in order, the index of the first rank that has it: what all ranks of a batch
    compute alike is counted once. `batches`: by rank, which batch it has."""
    return tuple(list(batches).index(batch) for batch in sorted(set(batches)))


def ranks_of(members: tuple[int, ...], batches: tuple[int, ...] = ()) -> DataRanks:
    """The group of these ranks (numbers in the default group), which include this one.

    Collective over the default group: ranks whose groups are disjoint do this at the same time.
    """
    group = process_group(members, "gloo")
    assert group is not None
    number = next_number()
    return DataRanks(
        members.index(dist.get_rank()),
        len(members),
        members,
        group,
        number,
        store_of(f"{number}/{members[0]}"),
        batches,
    )
