"""A command that torchrun started on several ranks: the process group, and the model's shards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_on_ranks() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """The number of this process; 0 where it is alone."""
    return int(os.environ["RANK"]) if is_on_ranks() else 0


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
