"""Routers of a mixture of experts: their outputs are recorded, and their choices forced.

Routers are the modules that call `topk`, so that no family is known by name (`find_routers`).
"""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter, RouteHolder, RouterNote
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import in_forward
from forkpoint.hosts.early_exit import EarlyExit
from forkpoint.hosts.modules import add_hook

TOPK = (torch.topk, torch.Tensor.topk)
WATCHED, LAST = "_forkpoint_router", "_forkpoint_last_router"
"""Attributes of a router: what is done around its forward, and whether a forward of the model ends
in it."""
_topk_calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By router whose choice was forced: how often one forward of it calls topk, as was found out."""


# Around the forward of a router
# ----------------------------------------------------------------


@dataclass(frozen=True)
class _Watched:
    """A router whose output is recorded, or whose choice is forced."""

    name: str
    forward: Callable[..., Any]
    """Its own."""
    note: Callable[[Tensor, Tensor], None] | None = None
    """Gets its logits and the experts chosen."""
    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Gets its scores and the values and indices of its own choice; gives those of another."""
    calls: int | None = None
    """How often one forward calls topk; None: it is found out in the first one."""


def record_routers(routers: Iterable[FoundRouter], note: RouterNote, changes: Changes) -> None:
    """Give the logits and choices of each router to `note`, until the changes are undone."""
    for layer, router in enumerate(routers):
        _watch(router.name, router.module, changes, note=partial(note, layer))


def force_routers(
    routers: Iterable[FoundRouter],
    holder: RouteHolder,
    changes: Changes,
    copy: nn.Module | None = None,
) -> None:
    """Let routers choose what `holder` says, until the changes are undone.

    copy: of the model that they were found in, whose routers these are; None: they themselves.
    """
    for layer, router in enumerate(routers):
        module = router.module if copy is None else copy.get_submodule(router.name)
        choose = partial(holder.choose, layer, router.name)
        _watch(router.name, module, changes, choose=choose, calls=router.calls)


def _watch(name: str, module: nn.Module, changes: Changes, **what: Any) -> None:
    attributes = vars(module)
    watched = attributes.get(WATCHED) or _Watched(name, module.forward)
    changes.set(attributes, WATCHED, replace(watched, **what))
    # A method, for the sake of compiled blocks: see `Changes.replace_forward`.
    changes.replace_forward(module, types.MethodType(_watched_forward, module))


# Not compiled: compiled code would keep the choices of the microbatch that it was compiled for.
@torch.compiler.disable()
def _watched_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a router that is watched."""
    watched: _Watched = vars(module)[WATCHED]
    forward = partial(watched.forward, *args, **kwargs)
    if watched.choose is None:
        output = forward()
    else:
        calls = watched.calls
        if calls is None and module not in _topk_calls:
            _topk_calls[module] = _calls_that_choose(watched.name, forward)
        calls = _topk_calls[module] if calls is None else calls
        output = _forced(watched.name, calls, watched.choose, forward)
    if watched.note is not None:
        if not isinstance(output, tuple) or output[-1].is_floating_point():
            raise UnsupportedError(lacks_logits(watched.name))
        watched.note(output[0], output[-1])
        if LAST in vars(module) and in_forward():
            raise EarlyExit((output[0],))
    return output


def _forced(
    name: str,
    calls: int,
    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    forward: Callable[[], Any],
) -> Any:
    """The output of a router whose last call of topk gives what `choose` says."""
    done = 0

    def change(scores: Tensor, own: Any) -> Any:
        nonlocal done
        done += 1
        return choose(scores, own[0], own[1]) if done == calls else own

    with _Intercepted(change):
        output = forward()
    if done != calls:
        raise UnsupportedError(
            f"the router {name} called topk {done} times and not {calls} times as before, so that "
            "its experts cannot be forced. Leave routed_experts out of the rollouts; call verify "
            "with hold_routes=False."
        )
    return output


@torch.no_grad()
def _calls_that_choose(name: str, forward: Callable[[], Any]) -> int:
    """How often a router calls topk.

    Raises UnsupportedError where its last call is not what chooses experts.
    """
    calls = 0
    turned: list[Tensor] = []

    def count(_: Tensor, own: Any) -> Any:
        nonlocal calls
        calls += 1
        return own

    def turn(scores: Tensor, _: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        turned.append(own.flip(-1))
        return scores.gather(-1, turned[-1]), turned[-1]

    with _Intercepted(count):
        forward()
    output = _forced(name, calls, turn, forward)
    if not (turned and isinstance(output, tuple) and torch.equal(output[-1], turned[-1])):
        raise UnsupportedError(
            f"the router {name} does not choose its experts by its last call of topk, so that it "
            "cannot be held to routed_experts. Leave routed_experts out of the rollouts."
        )
    return calls


class _Intercepted(TorchFunctionMode):
    """Within it each topk's result is what `change` makes of its input and its own result."""

    def __init__(self, change: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        own = func(*args, **given)
        return self._change(args[0] if args else given["input"], own) if func in TOPK else own


def lacks_logits(name: str) -> str:
    return (
        f"the router {name} does not return its logits and the experts chosen, as it does in newer "
        "versions of transformers (5.23 was looked at). Upgrade transformers, or leave router= and "
        "expert_counts= out."
    )


# Which modules are routers
# ----------------------------------------------------------------


def find_routers(
    model: nn.Module, stock: Callable[[Tensor], object], changes: Changes
) -> tuple[FoundRouter, ...]:
    """Find the modules of a model that choose experts; none if it has no experts.

    Args:
        model: the model.
        stock: runs its stock forward on token ids [1, 1].
        changes: undo the hooks that are set meanwhile.

    Raises UnsupportedError where a model has experts and its routers are not seen: then choices
    can be neither recorded nor forced.
    """
    names = {module: name for name, module in model.named_modules()}
    every = [name for module, name in names.items() if _holds_experts(module, name)]
    # Adapters wrap experts in modules of their own.
    experts = [n for n in every if not any(n != other and _within(n, other) for other in every)]
    if not experts:
        return ()
    inside: list[nn.Module] = []
    calls: dict[str, int] = {}

    def enter(module: nn.Module, _: Any) -> None:
        inside.append(module)

    def leave(*_: Any) -> None:
        inside.pop()

    def count(_: Tensor, own: Any) -> Any:
        name = names[inside[-1]]
        calls[name] = calls.get(name, 0) + 1
        return own

    token = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    mark = changes.mark
    for module in names:
        add_hook(changes, module._forward_pre_hooks, enter)
        add_hook(changes, module._forward_hooks, leave)
    with torch.no_grad(), _Intercepted(count):
        stock(token)
    changes.undo(mark)
    # A router chooses for the experts beside it, or for those in the module that it is.
    # Other calls of topk are those of a load-balancing loss.
    owners = {name.rpartition(".")[0] for name in experts}
    routers = tuple(
        FoundRouter(name, model.get_submodule(name), n)
        for name, n in calls.items()
        if any(_within(name, owner) for owner in owners)
    )
    served = {o for o in owners if any(_within(r.name, o) for r in routers)}
    if served != owners:
        lost = min(owners - served)
        raise UnsupportedError(
            f"{lost} ({type(model.get_submodule(lost)).__name__}) has experts, but no call of topk "
            "chooses among them, so that the routes of two runs cannot be made the same."
        )
    return routers


def _holds_experts(module: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__


def _within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")
