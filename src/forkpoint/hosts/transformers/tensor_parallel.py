"""Models that transformers splits over ranks (tensor and expert parallelism), also with
fully_shard.

The model's own code runs on every rank, and issues the collectives of its splits. A step differs in
two points. Ranks of one tensor-parallel group have the same batch, which counts once. Some
replicated parameters are used only for a rank's own heads, so each rank has a part of their
gradient. transformers sums the parts in every backward, which would count earlier backwards of a
step again. A step sums them once, after the last backward.

A split is read from the closure of the forward that transformers has set on a module. It has the
style of the split, the mesh, and the earlier forward. The configuration is not read, because it may
have changed since.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import SplitHolder, local
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import Definition, is_defined_as
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.torch_dist.replicated import all_reduce_in_buckets
from forkpoint.hosts.wrappers import closed_over

TENSOR = "transformers.distributed.tensor_parallel"
EXPERT = "transformers.distributed.expert_parallel"
FORWARDS: tuple[Definition, ...] = (
    (TENSOR, "TensorParallelLayer.install_forward.<locals>.tp_forward"),
    (TENSOR, "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"),
    (EXPERT, "EpDispatchExpertsParallel.install_forward.<locals>.ep_forward"),
)
"""Functions of transformers that it sets as forwards of split modules."""
SUMMED_HOOK = (TENSOR, "ReplicatedWithGradAllReduce.install_forward.<locals>._all_reduce_grad")
"""The hook that sums a replicated parameter's gradient over ranks in every backward."""
SUMMED = "ReplicatedWithGradAllReduce"
DISPATCHED = "EpDispatchExpertsParallel"
EXACT: dict[str, tuple[str, ...]] = {
    TENSOR: (
        *("ColwiseParallel", "RowwiseParallel", "EmbeddingParallel", SUMMED),
        *("PackedColwiseParallel", "MoeExpertsParallel", "MlaKvAProjParallel"),
        *("AllReduceParallel", "LocalParamsParallel", "TensorParallelLayer"),
    ),
    EXPERT: (DISPATCHED,),
}
"""Styles of splits that have been shown exact, by the module of transformers that defines them."""
EXACT_EXCHANGES = ("AutoEP", "AllToAllEP", "AllReduceEP")
"""Dispatchers of tokens to experts that have been shown exact."""


@dataclass(frozen=True, eq=False)
class ParallelForward:
    """A forward that transformers has set on a split module."""

    style: str
    """Class name of the style."""
    tensor: DeviceMesh
    """Mesh of tensor-parallel ranks, which have the same batch."""
    expert: DeviceMesh | None
    """Mesh of ranks that share the experts; None if the module has no experts, or parts of all of
    them."""
    gives_part: bool
    """Whether the output's channels are split over ranks."""
    own: Callable[..., Any]
    """The module's own forward."""


def parallel_forward(where: str, module: nn.Module) -> ParallelForward | None:
    """The forward that transformers has set on a module; None if there is none.

    Raises UnsupportedError if the split has not been shown exact. `where`: the module in its
    message.
    """
    forward = vars(module).get("forward")
    if not isinstance(forward, types.FunctionType) or not is_defined_as(forward, *FORWARDS):
        return None
    inside = closed_over(forward)
    if "_all_reduce_grad" in inside:
        mesh = closed_over(inside["_all_reduce_grad"])["mesh"]
        found = ParallelForward(SUMMED, mesh, None, False, inside["original_forward"])
    else:
        found = _read_split(where, inside)
    if getattr(found.own, "__func__", None) is not plain_class(module).forward:
        raise UnsupportedError(
            f"{where} had a custom forward when transformers split it over ranks, and its effect "
            "is not known. Split the model before the forward is set."
        )
    return found


def _read_split(where: str, inside: dict[str, Any]) -> ParallelForward:
    """Read the split of a module from its forward's closure."""
    kind = type(inside["self"])
    name = kind.__name__
    if name not in EXACT.get(kind.__module__, ()):
        raise UnsupportedError(
            f"{where} is split over ranks by {name} ({kind.__module__}), which has not been shown "
            f"exact; supported are {', '.join((*EXACT[TENSOR], *EXACT[EXPERT]))}. Leave its rule "
            "out of tp_plan and ep_plan."
        )
    if name != DISPATCHED:
        part = name == "PackedColwiseParallel" or (
            name == "ColwiseParallel" and inside["self"].output_layouts.is_shard()
        )
        return ParallelForward(name, inside["mesh"], None, part, inside["original_forward"])
    exchange = inside["implementation"]
    way = type(exchange)
    known = way.__module__ == EXPERT and way.__name__ in EXACT_EXCHANGES
    if not known or getattr(exchange, "megamoe", None):
        raise UnsupportedError(
            f"{where} dispatches tokens to experts by {way.__module__}.{way.__name__}, which has "
            "not been shown exact. Load the model with ep_implementation='auto', and without "
            "experts_implementation='deepgemm_megamoe'."
        )
    own = exchange.experts_forward
    return ParallelForward(name, exchange.tp_mesh, exchange.ep_mesh, False, own)


def split_holder(model: nn.Module) -> "TensorSplit | None":
    """The holder of a model that transformers has split over ranks; None if it has not.

    Raises UnsupportedError for splits that have not been shown exact.
    """
    splits = [
        (name, module, forward)
        for name, module in every_module(model)
        if (forward := parallel_forward(name or "the model", module)) is not None
    ]
    if not splits:
        return None
    if Version(transformers.__version__).release < LEAST_VERSION:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has split the model over ranks; such models "
            "have been shown exact with 5.23, and earlier versions split them otherwise. Update "
            "transformers."
        )
    return TensorSplit(splits)


LEAST_VERSION = (5, 23)
"""The oldest version of transformers whose split models have been shown exact."""
Split = tuple[str, nn.Module, ParallelForward]


class TensorSplit(SplitHolder):
    """transformers' tensor and expert parallelism."""

    def __init__(self, splits: Sequence[Split]) -> None:
        """Raises UnsupportedError for splits that have not been shown exact."""
        super().__init__(splits)
        assert self.tensor is not None
        self.meshes: Sequence[DeviceMesh] = (self.tensor,)
        self._group: dist.ProcessGroup = self.tensor.get_group()

    def _summed(self) -> set[nn.Parameter]:
        """Parameters whose gradients must be summed over the tensor-parallel group."""
        modules = (module for _, module, forward in self.splits if forward.style == SUMMED)
        return {parameter for module in modules for parameter in module.parameters(recurse=False)}

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        summed = self._summed()
        return [parameter for parameter in parameters if parameter in summed]

    def enter(
        self, changes: Changes, blocks: Sequence[nn.Module], whole: Iterable[nn.Parameter]
    ) -> None:
        # Replaces the forward that adds hooks to parameters, and removes existing hooks.
        for _, module, forward in self.splits:
            if forward.style == SUMMED:
                changes.replace_forward(module, forward.own)
        for parameter in (*self._summed(), *whole):
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for key, hook in list(hooks.items()):
                if is_defined_as(hook, SUMMED_HOOK):
                    changes.later(hooks.__setitem__, key, hook)
                    del hooks[key]

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        summed = self._summed()
        parts = [
            local(gradient).detach()
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient is not None and parameter in summed
        ]
        all_reduce_in_buckets(parts, self._group)
        return list(gradients)


def unsplit(copy: nn.Module, splits: Sequence[Split]) -> None:
    """Let a whole copy of a split model compute all experts."""
    for name, _, forward in splits:
        if forward.style == DISPATCHED:
            assert forward.expert is not None
            own: dict[str, Any] = vars(copy.get_submodule(name))
            own["num_experts"] *= forward.expert.size()
            own["_is_expert_parallel"] = False
