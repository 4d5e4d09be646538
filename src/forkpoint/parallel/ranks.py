"""The ranks that train one model on rollouts of their own."""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.errors import RankError

T = TypeVar("T")


@dataclass(eq=False)
class DataRanks:
    """Ranks whose rollouts together are one batch, and a group over which they agree on CPUs."""

    index: int
    """This rank's number among them, from 0."""
    size: int
    global_ranks: tuple[int, ...]
    """By index, the number in the default process group, which messages name."""
    cpu_group: dist.ProcessGroup
    steps: int = 0
    """How many steps have begun."""
    broken: str | None = None
    """Why no further step is possible: this rank has left the collectives of one."""

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, by index. Collective.

        Raises RankError where this rank has failed within a step's collectives before.
        """
        if self.broken is not None:
            raise RankError(
                f"{self.name} failed within a step's collectives ({self.broken}), in which the "
                "other ranks have ended. Start all processes again, from the last checkpoint."
            )
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value, group=self.cpu_group)
        return found  # pyright: ignore[reportReturnType]

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self.global_ranks[self.index]}"


def ranks_of_group(group: dist.ProcessGroup) -> DataRanks:
    """The ranks of a process group. Collective over the default group, once for each group.

    Groups of the default group's ranks that are disjoint may do this at the same time.
    """
    return _ranks(tuple(dist.get_process_group_ranks(group)))


def ranks_of_mesh(mesh: DeviceMesh) -> DataRanks:
    """The ranks of all dimensions of a mesh. Collective as `ranks_of_group`."""
    return _ranks(tuple(int(rank) for rank in mesh.mesh.flatten()))


def _ranks(members: tuple[int, ...]) -> DataRanks:
    # Every rank of the default group has to take part in making each group of it.
    world = dist.new_group(backend="gloo")
    every: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, members, group=world)
    own = None
    for each in sorted({each for each in every if each is not None}):
        group = dist.new_group(list(each), backend="gloo")
        if each == members:
            own = group
    assert isinstance(own, dist.ProcessGroup)
    here = dist.get_rank()
    return DataRanks(members.index(here), len(members), members, own)
