"""Forwards that transformers sets on modules whose parameters it splits over ranks.

`DistributedConfig(tp_size=..., ep_size=...)` replaces the forward of a split module by one that
brings inputs and outputs into the form that the split needs. It closes over the style of the split,
the mesh, and the forward that it stands around; these are read here, so that a split is known by
what runs and not by a configuration that may have changed since.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.coverings import closed_over
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.origins import is_defined_as

TENSOR = "transformers.distributed.tensor_parallel"
EXPERT = "transformers.distributed.expert_parallel"
FORWARDS = (
    ("TensorParallelLayer.install_forward.<locals>.tp_forward", TENSOR),
    ("ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward", TENSOR),
    ("EpDispatchExpertsParallel.install_forward.<locals>.ep_forward", EXPERT),
)
"""Functions of transformers that are set as forwards, and the modules that define them."""
SUMMED_HOOK = ("ReplicatedWithGradAllReduce.install_forward.<locals>._all_reduce_grad", TENSOR)
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
    tensor_mesh: DeviceMesh
    """The ranks that hold the same batch."""
    expert_mesh: DeviceMesh | None
    """The ranks that have the experts together; None where the module has none, or parts of all."""
    gives_part: bool
    """Whether each rank's output has channels of its own, and no rank has all of them."""
    own: Callable[..., Any]
    """The module's forward by itself."""
    layer: Any = None
    """Object that sets the forward (`install_forward`); None where the forward only sums gradients,
    or brings tokens to experts."""


def parallel_forward(where: str, module: nn.Module) -> ParallelForward | None:
    """The forward that transformers has set on a module; None where it has set none.

    Raises UnsupportedError, naming the module as `where`, for a split that has not been shown
    exact.
    """
    forward = vars(module).get("forward")
    if not isinstance(forward, types.FunctionType):
        return None
    if not any(is_defined_as(forward, name, code) for name, code in FORWARDS):
        return None
    inside = closed_over(forward)
    if "_all_reduce_grad" in inside:
        mesh = closed_over(inside["_all_reduce_grad"])["mesh"]
        own = inside["original_forward"]
        return _with_own(where, module, ParallelForward(SUMMED, mesh, None, False, own))
    kind = type(inside["self"])
    name = "sequence parallelism" if kind.__name__ == "SequenceParallel" else kind.__name__
    if kind.__name__ not in EXACT.get(kind.__module__, ()):
        raise UnsupportedError(
            f"{where} is split over ranks by {name} ({kind.__module__}), which has not been shown "
            f"exact; these have: {', '.join((*EXACT[TENSOR], *EXACT[EXPERT]))}. Leave its rule out "
            "of tp_plan and ep_plan."
        )
    if kind.__name__ == DISPATCHED:
        exchange = inside["implementation"]
        _check_exchange(where, exchange)
        own = exchange.experts_forward
        found = ParallelForward(kind.__name__, exchange.tp_mesh, exchange.ep_mesh, False, own)
    else:
        own = inside["original_forward"]
        packed = kind.__name__ == "PackedColwiseParallel"
        part = packed or (
            kind.__name__ == "ColwiseParallel" and inside["self"].output_layouts.is_shard()
        )
        found = ParallelForward(kind.__name__, inside["mesh"], None, part, own, inside["self"])
    return _with_own(where, module, found)


def _with_own(where: str, module: nn.Module, found: ParallelForward) -> ParallelForward:
    """The same, where what it stands around is the module's own forward."""
    if getattr(found.own, "__func__", None) is not plain_class(module).forward:
        raise UnsupportedError(
            f"{where} has a forward of its own within the one by which transformers splits it over "
            "ranks, which forkpoint cannot look into. Split the model before anything else is put "
            "around its modules."
        )
    return found


def _check_exchange(where: str, exchange: Any) -> None:
    kind = type(exchange)
    if kind.__module__ != EXPERT or kind.__name__ not in EXACT_EXCHANGES:
        raise UnsupportedError(
            f"{where} brings tokens to experts by {kind.__module__}.{kind.__name__}, which has not "
            "been shown exact. Load the model with ep_implementation='auto', and without "
            "experts_implementation='deepgemm_megamoe'."
        )
    if getattr(exchange, "megamoe", None) is not None:
        raise UnsupportedError(
            f"{where} runs experts by DeepGEMM Mega MoE, which has no backward. Load the model "
            "with another experts_implementation."
        )


def parallel_modules(model: nn.Module) -> list[tuple[str, nn.Module, ParallelForward]]:
    """The modules of a model that transformers splits over ranks, by name."""
    found = []
    for name, module in every_module(model):
        forward = parallel_forward(name or "the model", module)
        if forward is not None:
            found.append((name, module, forward))
    return found


def sums_in_every_backward(hook: Any) -> bool:
    """Whether a parameter's hook is transformers' own, which sums its gradient over ranks."""
    return is_defined_as(hook, *SUMMED_HOOK)
