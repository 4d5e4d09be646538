"""Models that torch's DistributedDataParallel holds, and the reduction of their gradients.

The wrapper is not changed. A step reduces gradients once, with this module's own code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.nn.parallel import DistributedDataParallel

from forkpoint.engine.distributed import Holder
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_parameter
from forkpoint.parallel.process_groups import process_group
from forkpoint.parallel.topology import Relation

MOST_BUCKET_BYTES = 32 << 20


def check_held(model: nn.Module, wrapper: str, holds: Callable[[str, nn.Parameter], bool]) -> None:
    """Check that the wrapper reduces the gradient of every trainable parameter."""
    for name, parameter in every_parameter(model):
        if parameter.requires_grad and not holds(name, parameter):
            raise UnsupportedError(
                f"parameter {name} trains, and {wrapper} does not reduce its gradient: it ignores "
                f"the parameter, or the parameter was added after {wrapper} was called. Freeze it "
                "(requires_grad_(False)), or include it in the wrapper."
            )


class Replicated(Holder):
    """torch's DistributedDataParallel. Its reducer is not used, because it expects one forward and
    one backward a step. Gradients are reduced once, after the last backward."""

    # It has no mesh here: with a mesh that is a part of another, it sets hooks that are refused.
    listens = True

    def __init__(self, model: DistributedDataParallel) -> None:
        wrapper = cast(Any, model)
        if getattr(wrapper, "mixed_precision", None) is not None:
            raise UnsupportedError(
                "DistributedDataParallel has mixed_precision, which has not been shown exact. "
                "Leave it out, and use torch.autocast."
            )
        self._wrapper = wrapper
        self.group: dist.ProcessGroup = wrapper.process_group
        self.relations: Mapping[Relation, tuple[int, ...]] = {
            "data": tuple(dist.get_process_group_ranks(self.group))
        }

    def check(self, model: nn.Module, *, training: bool) -> None:
        if not training:
            return
        ignored = self._wrapper.parameters_to_ignore
        check_held(model, "DistributedDataParallel", lambda name, _: name not in ignored)
        hook = self._wrapper._get_ddp_logging_data().get("comm_hook")
        if hook:
            raise UnsupportedError(
                f"DistributedDataParallel has a communication hook ({hook}), which forkpoint would "
                "not call. Leave register_comm_hook out."
            )

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        device = parameters[0].device
        there = torch.tensor([g is not None for g in gradients], dtype=torch.int32, device=device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        found: list[Tensor | None] = [
            (torch.zeros_like(parameter) if gradient is None else gradient) if is_there else None
            for gradient, parameter, is_there in zip(
                gradients, parameters, there.tolist(), strict=True
            )
        ]
        divisor = self.group.size() if mean else 1
        all_reduce_in_buckets([g for g in found if g is not None], self.group, divisor=divisor)
        return found

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


class FrozenReplicas(Holder):
    """Ranks that have the same stage of a pipeline, which trains nothing. DistributedDataParallel
    refuses to hold it."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.relations: Mapping[Relation, tuple[int, ...]] = {"data": ranks}
        self.process_groups: Sequence[tuple[int, ...]] = (ranks,)

    def check(self, model: nn.Module, *, training: bool) -> None:
        for name, parameter in every_parameter(model):
            if training and parameter.requires_grad:
                raise UnsupportedError(
                    f"parameter {name} trains, and no parameter of this rank's stage trained when "
                    "the policy was made, so no DistributedDataParallel reduces its gradient over "
                    "data ranks. Freeze it (requires_grad_(False)), or put "
                    "DistributedDataParallel around the stage and call forkpoint.wrap again."
                )

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=process_group(self.relations["data"]))


def all_reduce_in_buckets(
    gradients: list[Tensor], group: dist.ProcessGroup, *, divisor: int = 1
) -> None:
    """Replace gradients by their sums over ranks, divided by `divisor`. Collective."""
    for bucket in _take_tensors(gradients, MOST_BUCKET_BYTES):  # of one dtype each, in order
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
