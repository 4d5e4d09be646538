"""Ranks and the process group of commands that torchrun starts on several ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from forkpoint.apps.cli.options import DeviceName
from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forkpoint.plan.pricing.calibration import Link

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_on_ranks() -> bool:
    """Whether torchrun, or a launcher with the same variables, has started this process."""
    return all(name in os.environ for name in VARIABLES)


def _variable(name: str, alone: int) -> int:
    return int(os.environ[name]) if is_on_ranks() else alone


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return _variable("RANK", 0)


def local_rank() -> int:
    """Rank of this process on its host; 0 without torchrun."""
    return _variable("LOCAL_RANK", 0)


def size() -> int:
    """Number of processes."""
    return _variable("WORLD_SIZE", 1)


def from_the_first(work: Callable[[], T]) -> T:
    """Run `work` on the first rank, and return its result on all ranks. Collective.

    Raises the error of `work` on the first rank, and RankError with its text on the others.
    """
    from forkpoint.parallel.call import RankGroup
    from forkpoint.parallel.ranks import DataRanks, ranks_of

    ranks = ranks_of(tuple(range(size()))) if size() > 1 else DataRanks()
    return RankGroup(ranks).first(work)


def measured_link(device: DeviceName) -> "Link":
    """Measure the link between the ranks. Collective."""
    from forkpoint.step.calibrate.link import measure_link

    return measure_link(_own_device(device))


def _own_device(device: DeviceName) -> "torch.device":
    """The device of this rank. Raises ConfigError if there are fewer GPUs than ranks."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank() >= count:
        raise ConfigError(
            f"this machine has {count} GPUs, and the rank is number {local_rank()} on it; ranks "
            f"cannot share a GPU. Start torchrun with --nproc-per-node {count}, or add "
            "--device cpu."
        )
    return torch.device("cuda", local_rank())


@contextmanager
def process_group(device: DeviceName) -> Iterator[None]:
    """Open torch's default process group for the block. Without torchrun, do nothing.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    if not is_on_ranks():
        yield
        return
    import torch
    import torch.distributed as dist

    own = _own_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo")
    yield
    # After an error the other ranks may not reach the end of the block.
    dist.destroy_process_group()
