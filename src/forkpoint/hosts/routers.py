"""Records the outputs of the routers of a mixture of experts, and forces their choices."""

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import ChooseExperts, FoundRouter, RouterNote, RouterSet
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import in_forward
from forkpoint.hosts.early_exit import EarlyExit
from forkpoint.hosts.torch_dist.copies import full

TOPK = (torch.topk, torch.Tensor.topk)
GATE = "gate"
"""Name of the router in a block that chooses experts itself."""
WATCHED, LAST = "_forkpoint_router", "_forkpoint_last_router"
"""Attributes of a router: its `_Watched`, and whether a forward of the model ends in it."""

Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a router's scores [T, E], and the values and indices [T, k] of its choice. Returns those of
another choice."""


@dataclass(frozen=True)
class _Watched:
    """A router whose outputs are recorded or whose choices are forced."""

    name: str
    forward: Callable[..., Any]
    """The router's own forward."""
    dimensions: int = 2
    """Number of dimensions of its scores."""
    note: Callable[[Tensor, Tensor], None] | None = None
    """Called with its logits and the chosen experts."""
    choose: Choose | None = None
    chosen: int = -1
    """Index of the chosen experts in its output."""


def record_routers(
    routers: Iterable[FoundRouter], note: RouterNote, changes: Changes, *, chosen: int = -1
) -> None:
    """Pass the logits and choices of each router to `note`, until the changes are undone.

    chosen: index of the choices in a router's outputs. The first output is the logits.
    """
    for layer, router in enumerate(routers):
        _watch(router, changes, note=partial(note, layer), chosen=chosen)


def force_routers(routers: Iterable[FoundRouter], choose: ChooseExperts, changes: Changes) -> None:
    """Replace the choices of routers by those of `choose`, until the changes are undone."""
    for layer, router in enumerate(routers):
        _watch(router, changes, choose=partial(choose, layer, router.name))


class ModelRouters(RouterSet):
    """The routers of a model, and what their family's code does with their outputs."""

    defines_loss: bool = False
    """Whether the family's own code has a load-balancing loss."""
    coefficient: float = 0.0
    """Coefficient of that loss, if the configuration adds it in training; otherwise 0."""
    elsewhere_experts: int = 0
    """Number of experts of routers on other stages."""
    chosen_output: int = -1
    """Index of the chosen experts in a router's outputs."""

    @property
    def chosen(self) -> int | None:
        """Number of experts of a token; None if it is not known."""
        return None

    @property
    def experts(self) -> int:
        return self.elsewhere_experts

    @property
    def biases(self) -> list[Tensor]:
        """For each router, the bias [E] that is added to scores only for the choice. Empty if the
        family has no such biases."""
        return []

    def place(self, every: Sequence[tuple[int, int]], stage: int) -> None:
        """Set the indices of these routers among those of all stages.

        every: by stage, its number of routers, and their number of experts.
        """
        self.first: int = sum(count for count, _ in every[:stage])
        self.layers: int = sum(count for count, _ in every)
        self.elsewhere_experts = max(experts for _, experts in every)

    def end_within(self, block: nn.Module, changes: Changes) -> bool:
        """End forwards in the block's router, until the changes are undone.

        Returns False if the block has no router.
        """
        inside = set(block.modules())
        router = next((r.module for r in self.found if r.module in inside), None)
        if router is not None:
            changes.set(vars(router), LAST, True)
        return router is not None


def routers_of_copy(routers: Iterable[FoundRouter], copy: nn.Module) -> list[FoundRouter]:
    """The routers of a copy of the model of these routers."""
    return [replace(router, module=copy.get_submodule(router.name)) for router in routers]


def num_experts(router: FoundRouter) -> int:
    """The number of experts that a router chooses from."""
    given = getattr(router.module, "num_experts", None)
    parts = (getattr(router.module, name, None) for name in ("proj", GATE))  # "proj" of Gemma 4
    projection = next((part for part in parts if part is not None), router.module)
    weight = getattr(projection, "weight", None)
    if weight is None and isinstance(given, int):
        return given
    if not isinstance(weight, Tensor):
        raise UnsupportedError(lacks_logits(router.name))
    return weight.shape[0]


def lacks_logits(name: str) -> str:
    return (
        f"the router {name} does not return its logits and the chosen experts, as in newer "
        "versions of transformers (such as 5.23). Upgrade transformers, or leave router= and "
        "expert_counts= out."
    )


def _watch(router: FoundRouter, changes: Changes, **what: Any) -> None:
    attributes = vars(router.module)
    watched = attributes.get(WATCHED) or _Watched(
        router.name, router.module.forward, router.dimensions
    )
    changes.set(attributes, WATCHED, replace(watched, **what))
    # A method, for compiled blocks: see `Changes.replace_forward`.
    changes.replace_forward(router.module, types.MethodType(_watched_forward, router.module))


# Not compiled: compiled code would keep the choices of the microbatch that it was compiled for.
@torch.compiler.disable()
def _watched_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watched: _Watched = vars(module)[WATCHED]
    if watched.choose is None:
        output = watched.forward(*args, **kwargs)
    else:
        experts = num_experts(FoundRouter(watched.name, module))
        with _ForcedChoice(experts, watched.dimensions, watched.choose) as forced:
            output = watched.forward(*args, **kwargs)
        if forced.times != 1:
            raise UnsupportedError(
                f"the router {watched.name} called topk over its {experts} experts {forced.times} "
                "times instead of once, so its experts cannot be forced. Upgrade transformers, or "
                "leave routed_experts out of the rollouts and call verify with hold_routes=False."
            )
    if watched.note is not None:
        if not isinstance(output, tuple) or output[watched.chosen].is_floating_point():
            raise UnsupportedError(lacks_logits(watched.name))
        logits, chosen = full(output[0]), full(output[watched.chosen])
        watched.note(logits, chosen)
        if LAST in vars(module) and in_forward():
            raise EarlyExit((logits.flatten(0, -2),))
    return output


class _ForcedChoice(TorchFunctionMode):
    """Context manager in which topk over the scores [..., E] of all experts returns another choice.

    Routers that first choose groups of experts call topk with other shapes for these.
    """

    def __init__(self, experts: int, dimensions: int, choose: Choose) -> None:
        """`dimensions`: number of dimensions of the scores."""
        super().__init__()
        self._experts, self._dimensions, self._choose = experts, dimensions, choose
        self.times: int = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return own
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.ndim != self._dimensions or scores.shape[-1] != self._experts:
            return own
        self.times += 1
        rows = (full(x).reshape(-1, x.shape[-1]) for x in (scores, *own))
        values, chosen = (x.view(own[0].shape) for x in self._choose(*rows))
        return _held_as(scores, values), _held_as(scores, chosen)


def _held_as(like: Tensor, whole: Tensor) -> Tensor:
    """Split a tensor that each rank has whole over ranks, as `like` is split."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)
