"""Ranks that train one model, and their exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from forkpoint.errors import RankError
from forkpoint.parallel.process_groups import next_number, process_group
from forkpoint.parallel.watch import Watch, described, store_of

T = TypeVar("T")
Phase = Literal["apart", "exchanging", "joined", "alone", "told", "settled"]
"""State of a rank in a call.

apart: before the first exchange. Other ranks wait there.
exchanging: within an exchange. Other ranks may have left it.
joined: all ranks run the step, and exchange once more at its end.
alone: as joined, without collectives before that, because weights are gathered for the step.
told: all ranks know how the call ends, or it has ended.
settled: all ranks know that none has failed, and apply the step's gradients.
"""


@dataclass(eq=False)
class DataRanks:
    """Ranks that step together, with a CPU group for their exchanges.

    By default this process only, without exchanges.
    """

    index: int = 0
    """This rank's index among them, from 0."""
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    """Numbers in the default process group, by index. Messages use these."""
    cpu_group: dist.ProcessGroup | None = None
    number: int = 0
    """Number of the policy's model, the same on all of these ranks."""
    store: Store | None = None
    """Store of these ranks and this number, for messages of `Watch`."""
    batches: tuple[int, ...] = ()
    """Numbers of batches from 0, by index. Ranks with one batch hold one copy of the model
    together, as in tensor parallelism. By default all differ."""
    calls: int = 0
    """Number of calls that all ranks have joined."""
    phase: Phase = "told"
    broken: str | None = None
    """Reason why no further step is possible, because this rank has left collectives of a step."""
    watch: Watch | None = None
    """Watch of the running call."""
    device_group: dist.ProcessGroup | None = None
    """Group for tensors on a device; None before its first use."""

    def __post_init__(self) -> None:
        self.batches = self.batches or tuple(range(self.size))

    @property
    def is_alone(self) -> bool:
        """Whether this process has no other ranks."""
        return self.cpu_group is None

    def exchange(self, value: T) -> list[T]:
        """Exchange the values of all ranks. Returns them by index. Collective.

        The phase is "exchanging" until the caller sets the next one, because after an interrupt in
        between, other ranks may have values that this rank does not have.

        Raises RankError if this rank has failed within a step's collectives before, or if other
        ranks call the policy of another model.
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
        """Raise RankError unless all ranks call policies of one model. Models on the same ranks
        share a process group, so calls could be mixed up."""
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
        """The process group for tensors on a device, which `read_topology` has made. Collective
        the first time."""
        if device.type == "cpu":
            assert self.cpu_group is not None
            return self.cpu_group
        if self.device_group is None:
            group = process_group(self.global_ranks)
            assert group is not None
            # NCCL connects all ranks at the first collective of a group. Behaviour is undefined if
            # the first operation is between two ranks.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self.device_group = group
        return self.device_group

    def may_be_missed(self, error: BaseException) -> None:
        """Tell ranks that this one may not come to collectives in which they wait. They end unless
        their call ends first, because all ranks had the same error or there were no collectives."""
        if self.watch is not None:
            self.watch.stuck(f"{self.name}: {described(error)}")

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self.global_ranks[self.index]}"


def group_leaders(batches: Sequence[int]) -> tuple[int, ...]:
    """The index of the first rank of each batch, in the order of batches. Equal results of a
    batch's ranks are counted only for this rank. `batches`: number of the batch, by rank."""
    return tuple(list(batches).index(batch) for batch in sorted(set(batches)))


def ranks_of(members: tuple[int, ...], batches: tuple[int, ...] = ()) -> DataRanks:
    """Make the `DataRanks` of these ranks (numbers in the default group), which include this rank.

    Collective over the default group. Ranks of disjoint groups must call this at the same time.
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
