"""A command that torchrun started on several ranks: the process group, and the model's shards."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from forkpoint.plan.pricing.calibration import Link

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_on_ranks() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """The number of this process; 0 where it is alone."""
    return int(os.environ["RANK"]) if is_on_ranks() else 0


def local_rank() -> int:
    """The number of this process on its host; 0 where it is alone."""
    return int(os.environ["LOCAL_RANK"]) if is_on_ranks() else 0


def size() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if is_on_ranks() else 1


def from_the_first(work: Callable[[], T]) -> T:
    """Result of `work` in the first process, in all of them. Collective.

    Raises its error there; ConfigError, with its text, in the others.
    """
    if size() == 1:
        return work()
    import torch.distributed as dist

    given: list[tuple[T | None, str]] = [(None, "")]
    error = None
    if rank() == 0:
        try:
            given = [(work(), "")]
        except Exception as raised:  # any, since the others wait
            error = raised
            given = [(None, f"{type(raised).__name__}: {raised}")]
    dist.broadcast_object_list(given, src=0, device=torch_cpu())
    if error is not None:
        raise error
    found, text = given[0]
    if text:
        raise ConfigError(f"rank 0 cannot measure, so no rank does: {text}")
    return found  # pyright: ignore[reportReturnType]


def torch_cpu() -> "torch.device":
    """The device of objects that processes exchange."""
    import torch

    return torch.device("cpu")


def measured_link(device: Literal["auto", "cpu", "cuda"]) -> "Link":
    """The link between the processes. Collective."""
    import torch

    from forkpoint.apps.calibrate.link import measure_link

    cuda = device != "cpu" and torch.cuda.is_available()
    return measure_link(torch.device("cuda", local_rank()) if cuda else torch_cpu())


@contextmanager
def process_group(device: Literal["auto", "cpu", "cuda"]) -> Iterator[None]:
    """Within it torch's default process group is there; without torchrun nothing is done.

    Raises ConfigError where a rank has no GPU of its own.
    """
    if not is_on_ranks():
        yield
        return
    import torch
    import torch.distributed as dist

    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        local = int(os.environ["LOCAL_RANK"])
        count = torch.cuda.device_count()
        if local >= count:
            raise ConfigError(
                f"this machine has {count} GPUs, and the rank is number {local} on it; each rank "
                f"needs one of its own. Start torchrun with --nproc-per-node {count}, or add "
                "--device cpu."
            )
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    yield
    # After an error the others may not come to its end.
    dist.destroy_process_group()


def sharded(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model, sharded by torch's fully_shard over all ranks: each block, then the rest."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for block in cast(nn.ModuleList, model.base_model.layers):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
