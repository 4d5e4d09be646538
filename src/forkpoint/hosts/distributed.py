"""Models that several ranks train together: by torch's fully_shard, or DistributedDataParallel.

Both are used as they are. What a step tells them is when to reduce gradients, which is once, in its
last backward.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from forkpoint.config import Gather
from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Distributed
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.fsdp_versions import (
    divisor,
    end_backwards_themselves,
    groups_of,
    is_within_backward,
    policies_of,
    present_in,
    reduce_nothing,
    reduces_by,
    shard_after_forward,
    takes_any_gradient,
    trained_of,
)
from forkpoint.hosts.modules import every_parameter
from forkpoint.hosts.sharded_weights import ShardedWeights
from forkpoint.parallel.ranks import DataRanks, ranks_of_group, ranks_of_mesh

REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "it flattens parameters, so that gradients have no names of their own. Use torch's "
        "fully_shard (FSDP2), in accelerate fsdp_version: 2"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "it reduces and partitions gradients in hooks of its own. Use torch's fully_shard (FSDP2)"
    ),
}
"""By class, why it is refused and what to use."""
MOST_BUCKET_BYTES = 32 << 20


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel; any other as it is.

    Raises UnsupportedError for wrappers that have not been shown exact.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for base in type(model).__mro__:
        why = REFUSED.get(f"{base.__module__}.{base.__qualname__}")
        if why is not None:
            raise UnsupportedError(f"{kind} has not been shown exact: {why}.")
    return model.module if type(model) is DistributedDataParallel else model


def distributed(model: nn.Module, experts: Collection[nn.Module] = ()) -> Distributed | None:
    """The wrapper that holds the model on several ranks; None where this rank alone does.

    `experts` are modules sharded over a mesh of their own. Collective where there is one. Raises
    UnsupportedError for what has not been shown exact.
    """
    if type(model) is DistributedDataParallel:
        return Replicated(model)
    sharded = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        return None
    if not isinstance(model, FSDPModule):
        raise UnsupportedError(
            f"{sharded[0][0]} is sharded by fully_shard and the model around it is not, so that "
            "gradients of the rest would stay this rank's own. Call fully_shard(model) as well, "
            "after its blocks."
        )
    return FullySharded(model, experts)


class FullySharded:
    """torch's fully_shard (FSDP2), of one or two mesh dimensions (HSDP)."""

    lockstep: bool = True
    gathers: bool = True
    reduces: bool = True
    listens: bool = False

    def __init__(self, model: FSDPModule, experts: Collection[nn.Module] = ()) -> None:
        """`experts`: modules that transformers shards over a mesh of their own (expert
        parallelism)."""
        self.model = model
        # torch has no public way to ask a module for its mesh and policies.
        modules = [m for m in cast(nn.Module, model).modules() if isinstance(m, FSDPModule)]
        groups = [g for m in modules for g in groups_of(m)]
        meshes = {
            id(g.mesh_info.mesh): g.mesh_info.mesh
            for m in modules
            for g in groups_of(m)
            if m not in experts
        }
        if not meshes:
            raise UnsupportedError("the model is sharded by fully_shard and has no parameters.")
        if len({tuple(m.mesh.flatten().tolist()) for m in meshes.values()}) > 1:
            raise UnsupportedError(
                "parts of the model are sharded over different meshes, which has not been shown "
                "exact. Give one mesh to every fully_shard."
            )
        mesh = next(iter(meshes.values()))
        self._mesh = mesh
        self.ranks: DataRanks = ranks_of_mesh(mesh)
        self.gather: Gather = "microbatch"
        self._weights = ShardedWeights(model, self.ranks)
        self._entered = False
        """Whether a step runs, so that what lies on the ranks is its own."""
        self.param_dtypes: frozenset[torch.dtype] = frozenset(
            policy.param_dtype
            for group in groups
            for policy in policies_of(group)
            if policy.param_dtype is not None
        )

    @property
    def gathered(self) -> bool:
        return self._weights.gathered

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        return (self._mesh,)

    def use(self, gather: Gather, changes: Changes) -> None:
        changes.set(vars(self), "gather", gather)

    def held_bytes(self, gather: Gather) -> int:
        sizes = self._weights.group_bytes()
        if gather == "step":
            return sum(sizes) + max(sizes)
        # The root's, a block's, and those of the next, in the buffer that they are gathered in too.
        return min(sum(sizes), sizes[0] + 3 * max(sizes[1:], default=0))

    def missing_bytes(self) -> int:
        return self._weights.missing_bytes()

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        return self._weights.whole()

    def factor(self, *, mean: bool) -> float:
        return 1.0 if mean else max(self._divisors(), default=1.0)

    def _divisors(self) -> set[float]:
        """The numbers by which parts of the model divide summed gradients."""
        trained = (g for g in self._weights.groups() if trained_of(g))
        return {divisor(group, self.ranks.size) for group in trained}

    def check(self, model: nn.Module, *, training: bool) -> None:
        if is_within_backward(self.model):
            raise UnsupportedError(
                "a stock backward of the model is under way or has failed, so that fully_shard "
                "would not end those of a step. After a failure start the processes again from the "
                "last checkpoint: torch keeps parts of its gradients, even reset_iter_state() does."
            )
        for group in self._weights.groups():
            _check_group(group)
        if not training:
            return
        for group in self._weights.groups():
            if (by := reduces_by(group)) is not None:
                raise UnsupportedError(
                    f"the model is sharded by fully_shard, and {by}, which has not been shown "
                    "exact. Leave it out; with a mesh of two dimensions fully_shard reduces over "
                    "replicas itself."
                )
        if len(divisors := self._divisors()) > 1:
            raise UnsupportedError(
                f"parts of the model divide gradients by different factors ({sorted(divisors)}); "
                "forkpoint's losses need one. Call set_gradient_divide_factor with one number on "
                "every sharded module."
            )
        held = {p for group in self._weights.groups() for p in present_in(group)}
        _check_held(model, "fully_shard", lambda _, parameter: parameter in held)

    def apart(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return []

    def unshared(self) -> list[tuple[nn.Module, float]]:
        """Modules sharded over one rank alone that divide gradients, and by what.

        Of experts which no other rank has. In 64 and in 16 bits torch 2.13 divides these twice.
        """
        return [
            (module, float(group.gradient_divide_factor))
            for module in self._weights.modules()
            for group in groups_of(module)
            if group.mesh_info.shard_mesh_size == 1
            and getattr(group, "gradient_divide_factor", None) is not None
        ]

    def enter(self, changes: Changes, blocks: Sequence[nn.Module]) -> None:
        self._weights.set_aside(changes)
        changes.set(vars(self), "_entered", True)  # undone before these gradients come back
        reduce_nothing(self.model, self._weights.groups(), changes)
        end_backwards_themselves(self.model, changes)
        for module in self._weights.modules():
            # Around the head it would round log-probs, where in ordinary training it meets logits
            # that are of this dtype already.
            state = module._get_fsdp_state()
            if state._mp_policy.output_dtype is not None:
                wide = replace(state._mp_policy, output_dtype=None)
                changes.set(vars(state), "_mp_policy", wide)
        if self.gather == "step" and not self.gathered:
            self._weights.gather(changes)
        elif self.gather == "microbatch":
            self._weights.prefetch(blocks, changes)

    def end_forward(self) -> None:
        if not self.gathered:
            for group in self._weights.groups():
                shard_after_forward(group)

    def last(self) -> None:
        if self.gathered:  # they are reduced when all ranks have come to the end
            return
        self.model.set_requires_gradient_sync(True)
        self.model.set_is_last_backward(True)

    def reduce_held(self) -> None:
        self._weights.reduce()

    def reduce_earlier(self) -> None:
        self._weights.reduce_earlier()

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        return list(gradients)

    def add_up(self, tensor: Tensor) -> None:
        for group in self._mesh.get_all_groups():
            dist.all_reduce(tensor, group=group)

    def settle(self) -> None:
        self._weights.shard()

    def reset(self, *, lost: bool) -> None:
        if lost:
            self._weights.lose()
        elif self._entered:
            self._weights.forget()


def _check_group(group: Any) -> None:
    for policy in policies_of(group):
        if policy.output_dtype not in (None, policy.param_dtype):
            raise UnsupportedError(
                f"MixedPrecisionPolicy has output_dtype={policy.output_dtype} and "
                f"param_dtype={policy.param_dtype}, so that outputs are rounded that are computed "
                "in another dtype. Leave output_dtype out, or give it that of param_dtype."
            )
    if any(takes_any_gradient(parameter) for parameter in group.fsdp_params):
        raise UnsupportedError(
            "a parameter has grad_dtype=None and the model is sharded by fully_shard without a "
            "reduce_dtype, so that ranks may reduce in different dtypes. Give "
            "MixedPrecisionPolicy(reduce_dtype=...)."
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise UnsupportedError(
            "parameters are offloaded to the CPU (CPUOffloadPolicy), which has not been shown "
            "exact. Leave offload_policy out; Config(activations='offload') saves memory instead."
        )


def _check_held(model: nn.Module, wrapper: str, holds: Callable[[str, nn.Parameter], bool]) -> None:
    """Every parameter that trains is one that the wrapper reduces gradients of."""
    for name, parameter in every_parameter(model):
        if parameter.requires_grad and not holds(name, parameter):
            raise UnsupportedError(
                f"parameter {name} trains, and {wrapper} leaves its gradient unreduced: it is to "
                f"ignore the parameter, or the parameter was made after {wrapper} was called. "
                "Freeze it (requires_grad_(False)), or let the wrapper have it."
            )


class Replicated:
    """torch's DistributedDataParallel. Its own reducer is passed by: it expects one forward and one
    backward a step. Gradients are reduced once, after the last backward."""

    lockstep: bool = False
    gathers: bool = False
    reduces: bool = False
    listens: bool = True
    gathered: bool = False
    meshes: Sequence[DeviceMesh] = ()  # of one that is a part of another it sets hooks, refused
    param_dtypes: frozenset[torch.dtype] = frozenset()

    def __init__(self, model: DistributedDataParallel) -> None:
        wrapper = cast(Any, model)
        if getattr(wrapper, "mixed_precision", None) is not None:
            raise UnsupportedError(
                "DistributedDataParallel has mixed_precision, which has not been shown exact. "
                "Leave it out, and use torch.autocast."
            )
        self._wrapper = wrapper
        self.group: dist.ProcessGroup = wrapper.process_group
        self.ranks: DataRanks = ranks_of_group(self.group)

    def check(self, model: nn.Module, *, training: bool) -> None:
        if not training:
            return
        ignored = self._wrapper.parameters_to_ignore
        _check_held(model, "DistributedDataParallel", lambda name, _: name not in ignored)
        hook = self._wrapper._get_ddp_logging_data().get("comm_hook")
        if hook:
            raise UnsupportedError(
                f"DistributedDataParallel has a communication hook ({hook}), which forkpoint would "
                "pass by. Leave register_comm_hook out."
            )

    def factor(self, *, mean: bool) -> float:
        return 1.0

    def apart(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters

    def use(self, gather: Gather, changes: Changes) -> None:
        pass

    def held_bytes(self, gather: Gather) -> int:
        return 0

    def missing_bytes(self) -> int:
        return 0

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        return ()

    def enter(self, changes: Changes, blocks: Sequence[nn.Module]) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def last(self) -> None:
        pass

    def reduce_held(self) -> None:
        pass

    def reduce_earlier(self) -> None:
        pass

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
        for bucket in buckets([g for g in found if g is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=self.group)
            if mean:
                flat /= self.ranks.size
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return found

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def settle(self) -> None:
        pass

    def reset(self, *, lost: bool) -> None:
        pass


def buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype each, in order, of at most some bytes unless one has more."""
    found: list[list[Tensor]] = []
    open_: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = open_.get(gradient.dtype)
        held = sum(g.numel() * g.element_size() for g in bucket) if bucket else 0
        if bucket is None or held + gradient.numel() * gradient.element_size() > MOST_BUCKET_BYTES:
            bucket = []
            found.append(bucket)
            open_[gradient.dtype] = bucket
        bucket.append(gradient)
    return found
