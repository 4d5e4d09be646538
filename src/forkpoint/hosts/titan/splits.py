"""Models that torchtitan splits over ranks: tensor, sequence and expert parallelism.

torchtitan's own code runs on every rank. Hooks of its modules convert tensors to and from DTensors
and issue the collectives; in torchtitan 0.3, forwards that are set on modules do this. A step adds
only the collectives of the head. Splits are read from the closures of these hooks and forwards,
which have the style of the split and the mesh. The configuration is not read, because it may have
changed since.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import SplitHolder
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import Definition, describe_function, is_defined_as
from forkpoint.hosts.modules import HOOKS, every_module, every_parameter, plain_class
from forkpoint.hosts.wrappers import closed_over

STYLE = "torch.distributed.tensor.parallel.style"
SPLIT_HOOKS: tuple[Definition, ...] = (
    ("torch.distributed.tensor._api", "distribute_module.<locals>.<lambda>"),
    (STYLE, "PrepareModuleInput._apply.<locals>.<lambda>"),
    (STYLE, "PrepareModuleOutput._apply.<locals>.<lambda>"),
)
"""Hooks that implement torch's parallel styles."""
ATTENTION = "torch.distributed.tensor.experimental._context_parallel._attention"
CONTEXT_HOOKS: tuple[Definition, ...] = (
    (ATTENTION, "_ContextParallel.sdpa_input_fn"),
    (ATTENTION, "_ContextParallel.sdpa_output_fn"),
)
"""Hooks of the inner attention that implement torchtitan's context parallelism."""
EXCHANGES = "torchtitan.distributed.expert_parallel"
EXACT: dict[str, tuple[str, ...]] = {
    STYLE: (
        *("ColwiseParallel", "RowwiseParallel", "SequenceParallel"),
        *("PrepareModuleInput", "PrepareModuleOutput"),
    ),
    "torchtitan.distributed": ("NoParallel",),
    EXCHANGES: ("TensorParallel", "ExpertParallel", "ExpertTensorParallel"),
}
"""Styles that have been shown exact, by the module that defines them."""
REDISTRIBUTES: Definition = (
    "torchtitan.protocols.module",
    "Module.parallelize.<locals>.forward_with_redistribution",
)
"""The forward that torchtitan 0.3 sets on split modules, around the forward of their class."""
WRONG = "ReordererSequenceParallel"
"""A style with which torchtitan 0.2.2 itself computes wrong gradients."""


@dataclass(frozen=True)
class TitanStyle:
    """How a module is split."""

    tensor: DeviceMesh | None
    """Mesh of tensor-parallel ranks, which have the same batch; None if the module only exchanges
    tokens."""
    expert: DeviceMesh | None
    """Mesh of ranks that share the experts; None if the module exchanges no tokens."""


Split = tuple[str, nn.Module, TitanStyle]


def split_modules(model: nn.Module) -> list[Split]:
    """Name, module and split of each module that is split over ranks.

    Raises UnsupportedError for a style that has not been shown exact.
    """
    found: list[Split] = []
    for name, module in every_module(model):
        where = name or "the model"
        if redistributes(module):
            found.append((name, module, _redistribution(where, module)))
        found += [(name, module, _style(where, hook)) for hook in _hooks(module)]
    return [(n, m, how) for n, m, how in found if (how.tensor, how.expert) != (None, None)]


def redistributes(module: nn.Module) -> bool:
    """Whether Module.parallelize of torchtitan 0.3 has set the module's forward."""
    return is_defined_as(vars(module).get("forward"), REDISTRIBUTES)


def as_in_blocks(block: Any, hidden: Tensor) -> Tensor:
    """Convert a rank's part of hidden states to the input of a block: a DTensor in torchtitan
    0.3."""
    norm = block.attention_norm
    if not redistributes(norm):
        return hidden
    mesh = closed_over(norm.forward)["parallel_dims"].get_optional_mesh("tp")
    return hidden if mesh is None else DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)


def splits_hidden(block: Any) -> bool:
    """Whether a split block of torchtitan 0.3 takes a part of the sequence on each rank."""
    return _is_in_parts(block.attention_norm._sharding_config.in_src_shardings["input"])


def _is_in_parts(layout: Any) -> bool:
    """Whether sequence parallelism splits a tensor of this layout."""
    return layout.partition_spec is not None


def _redistribution(where: str, module: nn.Module) -> TitanStyle:
    """The split of a module by torchtitan 0.3."""
    inside = closed_over(module.forward)
    dims, own = inside["parallel_dims"], inside["fn"]
    if dims.spmd_backend != "partial_dtensor":
        raise UnsupportedError(
            f"{where} is split over ranks with torchtitan's backend {dims.spmd_backend!r}, which "
            "has not been shown exact. Set parallelism.spmd_backend to 'partial_dtensor'."
        )
    if dims.cp_enabled:
        raise UnsupportedError(
            f"{where} is under torchtitan's context parallelism, which has not been shown exact in "
            "torchtitan 0.3. Set context_parallel_degree to 1 and multiply "
            "data_parallel_shard_degree by it. In your own loop, pass wrap a mesh with 'cp'."
        )
    if isinstance(own, partial):  # of local_map, which converts tensors
        own = own.args[0]
    if not isinstance(own, MethodType) or own.__func__ is not plain_class(module).forward:
        raise UnsupportedError(
            f"{where} had a custom forward ({describe_function(own)}) when torchtitan split it, "
            "and its effect is not known. Split the model before the forward is set."
        )
    tensor, expert = dims.get_optional_mesh("tp"), dims.get_optional_mesh("ep")
    if "token_dispatcher" not in vars(module):
        return TitanStyle(tensor, None)
    if expert is not None:
        return TitanStyle(None, expert)
    if tensor is not None and _is_in_parts(vars(module)["_sharding_config"].out_dst_shardings):
        raise UnsupportedError(
            f"{where} is under sequence parallelism without expert parallelism, and torchtitan's "
            "gradients below these experts are wrong. Set expert_parallel_degree to "
            "tensor_parallel_degree, or enable_sequence_parallel to False."
        )
    return TitanStyle(tensor, None)


def _hooks(module: nn.Module) -> Iterator[Any]:
    for kind in HOOKS:
        yield from (h for h in vars(module)[kind].values() if is_defined_as(h, *SPLIT_HOOKS))


def _style(where: str, hook: Any) -> TitanStyle:
    inside = closed_over(hook)
    function = inside.get("input_fn") or inside.get("output_fn") or type(inside["self"])._apply
    while isinstance(function, partial):
        function = function.func
    module, style = function.__module__, function.__qualname__.partition(".")[0]
    if style == WRONG:
        raise UnsupportedError(
            f"{where} is split over ranks by {WRONG}. torchtitan does not sum the gradient of the "
            "router over these ranks. Set expert_tensor_parallel_degree to tensor_parallel_degree, "
            "or one of the two degrees to 1."
        )
    if style not in EXACT.get(module, ()):
        known = ", ".join(name for names in EXACT.values() for name in names)
        raise UnsupportedError(
            f"{where} is split over ranks by {describe_function(function)}, which has not been "
            f"shown exact; supported styles are {known}. Use torchtitan's own parallelize function "
            "without it."
        )
    mesh: DeviceMesh = inside["device_mesh"]
    if style == "ExpertParallel":
        return TitanStyle(None, mesh)
    if style == "ExpertTensorParallel":
        return TitanStyle(mesh["etp"], mesh["ep"])
    return TitanStyle(mesh, None)


def without_hooks(module: nn.Module, known: Sequence[Definition], changes: Changes) -> None:
    """Remove hooks with these definitions from a module until the changes are undone."""
    for kind in HOOKS:
        own = vars(module)[kind]
        changes.set(
            vars(module),
            kind,
            type(own)((n, hook) for n, hook in own.items() if not is_defined_as(hook, *known)),
        )


def splits_sequences(model: Any) -> bool:
    """Whether the model uses torchtitan's own context parallelism. Its layers then take
    positions."""
    return any(
        is_defined_as(hook, *CONTEXT_HOOKS)
        for block in model.layers.values()
        for hook in block.attention.inner_attention._forward_pre_hooks.values()
    )


def unsplit(copy: nn.Module, _: Sequence[Split]) -> None:
    """Let a whole copy of a split model run on one rank."""
    for module in copy.modules():
        without_hooks(module, (*SPLIT_HOOKS, *CONTEXT_HOOKS), Changes())
        if "tp_group" in vars(module):  # of embeddings of torchtitan 0.3
            vars(module)["tp_group"] = None
        if "token_dispatcher" in vars(module):  # of its experts
            vars(vars(module)["token_dispatcher"])["ep_mesh"] = None


def split_holder(model: nn.Module) -> "TitanSplit | None":
    """The holder of a model that torchtitan has split over ranks; None if it has not.

    Raises UnsupportedError for splits that have not been shown exact.
    """
    splits = split_modules(model)
    return TitanSplit(model, splits) if splits else None


class TitanSplit(SplitHolder):
    """torchtitan's tensor parallelism with sequence parallelism, and its expert parallelism."""

    def __init__(self, model: nn.Module, splits: Sequence[Split]) -> None:
        """Raises UnsupportedError if a part of the model is not split like the rest."""
        super().__init__(splits)
        self.meshes: Sequence[DeviceMesh] = [m for m in (self.tensor, self.expert) if m is not None]
        if self.tensor is not None:
            self.length_multiple: int = self.tensor.size()
            self._check_all_split(model, self.relations["tensor"])

    def _check_all_split(self, model: nn.Module, ranks: tuple[int, ...]) -> None:
        dealt = {p for module in self.experts for p in module.parameters()}
        for name, parameter in every_parameter(model):
            if parameter in dealt:
                continue
            given: Any = parameter
            groups = given.device_mesh.get_all_groups() if isinstance(given, DTensor) else []
            if not any(set(ranks) <= set(dist.get_process_group_ranks(g)) for g in groups):
                raise UnsupportedError(
                    f"{self.splits[0][0]} is split over ranks {list(ranks)} and {name} is not, "
                    "which has not been shown exact. Use torchtitan's own parallelize function for "
                    "the whole model."
                )
