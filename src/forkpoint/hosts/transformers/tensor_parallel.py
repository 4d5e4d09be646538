"""Models that transformers splits over ranks (tensor and expert parallelism), also within
fully_shard.

The model's own code runs on every rank, and issues the collectives that its splits need. What a
step adds is this. Ranks of one tensor-parallel group have the same batch, and are counted once.
Parameters that each of them has whole, and uses for its own heads alone, have gradients that are
parts; transformers sums these in every backward, which with several backwards counts the first ones
again. Here they are summed once, after the last one.

A split is known by the forward that transformers has set on a module: it closes over the style of
the split, the mesh, and the forward that it stands around. These are read here, and no
configuration, which may have changed since.
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
"""Functions of transformers that are set as forwards."""
SUMMED_HOOK = (TENSOR, "ReplicatedWithGradAllReduce.install_forward.<locals>._all_reduce_grad")
"""The hook that sums a replicated parameter's gradient over ranks, in every backward."""
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
"""Ways of bringing tokens to experts that have been shown exact."""


@dataclass(frozen=True, eq=False)
class ParallelForward:
    """A forward that transformers has set on a module it splits over ranks."""

    style: str
    """The class of the split."""
    tensor: DeviceMesh
    """The ranks that hold the same batch."""
    expert: DeviceMesh | None
    """The ranks that have the experts together; None where the module has none, or parts of all."""
    gives_part: bool
    """Whether each rank's output has channels of its own, and no rank has all of them."""
    own: Callable[..., Any]
    """The module's forward by itself."""


def parallel_forward(where: str, module: nn.Module) -> ParallelForward | None:
    """The forward that transformers has set on a module; None where it has set none.

    Raises UnsupportedError, naming the module as `where`, for a split that has not been shown
    exact.
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
    """The split of a module, from what its forward closes over."""
    kind = type(inside["self"])
    name = kind.__name__
    if name not in EXACT.get(kind.__module__, ()):
        raise UnsupportedError(
            f"{where} is split over ranks by {name} ({kind.__module__}), which has not been shown "
            f"exact; these have: {', '.join((*EXACT[TENSOR], *EXACT[EXPERT]))}. Leave its rule out "
            "of tp_plan and ep_plan."
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
            f"{where} brings tokens to experts by {way.__module__}.{way.__name__}, which has not "
            "been shown exact. Load the model with ep_implementation='auto', and without "
            "experts_implementation='deepgemm_megamoe'."
        )
    own = exchange.experts_forward
    return ParallelForward(name, exchange.tp_mesh, exchange.ep_mesh, False, own)


def parallel_modules(model: nn.Module) -> list[tuple[str, nn.Module, ParallelForward]]:
    """The modules of a model that transformers splits over ranks, by name."""
    found = (
        (name, module, parallel_forward(name or "the model", module))
        for name, module in every_module(model)
    )
    return [(name, module, forward) for name, module, forward in found if forward is not None]


def split_holder(model: nn.Module) -> "TensorSplit | None":
    """The holder of a model that transformers has split over ranks; None where it has not.

    Raises UnsupportedError for splits that have not been shown exact.
    """
    splits = parallel_modules(model)
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
"""Of transformers, from which on models that it splits have been shown exact."""
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
        """Parameters whose gradients are parts on each rank of the tensor-parallel group."""
        modules = (module for _, module, forward in self.splits if forward.style == SUMMED)
        return {parameter for module in modules for parameter in module.parameters(recurse=False)}

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        summed = self._summed()
        return [parameter for parameter in parameters if parameter in summed]

    def enter(
        self, changes: Changes, blocks: Sequence[nn.Module], whole: Iterable[nn.Parameter]
    ) -> None:
        # In place of the forward that gives the parameters hooks, and of hooks from before.
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
    """Let a whole copy of a model whose modules are split compute all of their experts."""
    for name, _, forward in splits:
        if forward.style == DISPATCHED:
            assert forward.expert is not None
            own: dict[str, Any] = vars(copy.get_submodule(name))
            own["num_experts"] *= forward.expert.size()
            own["_is_expert_parallel"] = False
