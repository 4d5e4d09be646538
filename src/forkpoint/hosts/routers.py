"""Routers of a mixture of experts while microbatches run: their logits, and the experts chosen.

Which modules are routers a family says itself: transformers records their logits for its own
load-balancing loss.
"""

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import RouteHolder, RouterNote
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import in_forward
from forkpoint.hosts.early_exit import EarlyExit
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.routes import Intercepted

_topk_calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By router that has been held: how often one forward of it calls topk, the last time for the
experts."""
WATCH = "_forkpoint_watch"
LOAD_BALANCING = "load_balancing_loss_func"
BIAS = "e_score_correction_bias"


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, causal: PreTrainedModel) -> None:
        recorded = getattr(causal.base_model, "_can_record_outputs", None) or {}
        spec: Any = recorded.get("router_logits")
        kinds = tuple(
            getattr(entry, "target_class", entry)
            for entry in (spec if isinstance(spec, list) else [spec])
            if entry is not None
        )
        found = [(n, m) for n, m in every_module(causal) if kinds and isinstance(m, kinds)]
        self.names: list[str] = [name for name, _ in found]
        self.modules: list[nn.Module] = [module for _, module in found]
        self.layers: int = len(found)
        self.defines_loss: bool = defines_load_balancing(causal)
        self.coefficient: float = 0.0
        if adds_load_balancing(causal):
            self.coefficient = float(causal.config.router_aux_loss_coef)
        self._watch = _Watch()

    @property
    def experts(self) -> int:
        """Among how many experts each chooses."""
        weight = getattr(self.modules[0], "weight", None)
        if not isinstance(weight, Tensor):
            raise UnsupportedError(_of_other_form(self.names[0]))
        return weight.shape[0]

    @property
    def biases(self) -> list[Tensor]:
        """Of each the buffer that DeepSeek-V3 and GLM-4-MoE keep, [E]."""
        found = (getattr(module, BIAS, None) for module in self.modules)
        return [bias for bias in found if isinstance(bias, Tensor)]

    @property
    def chosen(self) -> int | None:
        """To how many experts a token is sent, where routers say so."""
        found = getattr(self.modules[0], "top_k", None)
        return found if isinstance(found, int) else None

    def enter(
        self, note: RouterNote | None, changes: Changes, holder: RouteHolder | None = None
    ) -> None:
        """Give what each router computes to `note` from now on, until the changes are undone, and
        let it choose what `holder` says."""
        self._watch.note = note
        self._watch.holder = holder
        for index, (name, module) in enumerate(zip(self.names, self.modules, strict=True)):
            changes.set(vars(module), WATCH, (self._watch, index, name, module.forward))
            # A method, for the sake of compiled blocks: see `Changes.replace_forward`.
            changes.replace_forward(module, types.MethodType(_watched_forward, module))

    def end_within(self, block: nn.Module, changes: Changes) -> bool:
        """Let a forward end in the block's router, until the changes are undone.

        False where the block has none.
        """
        inside = set(block.modules())
        router = next((module for module in self.modules if module in inside), None)
        if router is not None:
            changes.set(vars(self._watch), "ends_in", router)
        return router is not None


class _Watch:
    """The step that looks at routers."""

    def __init__(self) -> None:
        self.note: RouterNote | None = None
        self.holder: RouteHolder | None = None
        self.ends_in: nn.Module | None = None
        """The router in which the forward that runs ends."""


@torch.compiler.disable()
def _watched_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A router's own forward, which the step is told of. Not compiled: see `RoutedRun`."""
    watch, index, name, forward = vars(module)[WATCH]
    if watch.holder is None:
        output = forward(*args, **kwargs)
    else:
        output = _held(watch.holder, index, name, module, partial(forward, *args, **kwargs))
    if not isinstance(output, tuple) or output[-1].is_floating_point():
        raise UnsupportedError(_of_other_form(name))
    if not in_forward():  # recomputed, or called by others
        return output
    if watch.note is not None:
        watch.note(index, output[0], output[-1])
    if module is watch.ends_in:
        raise EarlyExit((output[0],))
    return output


def _held(
    holder: RouteHolder, index: int, name: str, module: nn.Module, forward: Callable[[], Any]
) -> Any:
    """The router's output with the experts that `holder` says."""
    if module not in _topk_calls:
        _topk_calls[module] = _calls_that_choose(name, forward)

    def choose(scores_TE: Tensor, own: Any) -> tuple[Tensor, Tensor]:
        return holder.choose(index, name, scores_TE, own[0], own[1])

    return _chosen_by(choose, _topk_calls[module], forward)


def _chosen_by(choose: Callable[[Tensor, Any], Any], calls: int, forward: Callable[[], Any]) -> Any:
    """The output of a router whose last call of topk gives what `choose` says."""
    done = 0

    def change(scores: Tensor, own: Any) -> Any:
        nonlocal done
        done += 1
        return choose(scores, own) if done == calls else own

    with Intercepted(change):
        return forward()


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

    def turn(scores: Tensor, own: Any) -> tuple[Tensor, Tensor]:
        turned.append(own[1].flip(-1))
        return scores.gather(-1, turned[-1]), turned[-1]

    with Intercepted(count):
        forward()
    output = _chosen_by(turn, calls, forward)
    if not (turned and isinstance(output, tuple) and torch.equal(output[-1], turned[-1])):
        raise UnsupportedError(
            f"the router {name} does not choose its experts by its last call of topk, so that it "
            "cannot be held to routed_experts. Leave routed_experts out of the rollouts."
        )
    return calls


def _of_other_form(name: str) -> str:
    return (
        f"the router {name} does not return its logits and the experts chosen, as it does in newer "
        "versions of transformers (5.23 was looked at). Upgrade transformers, or leave router= and "
        "expert_counts= out."
    )


def defines_load_balancing(causal: PreTrainedModel) -> bool:
    """Whether transformers adds a load-balancing loss to this model's own."""
    kind = plain_class(causal)
    file = sys.modules[kind.__module__]
    return hasattr(file, LOAD_BALANCING) and kind.__name__.endswith("ForCausalLM")


def adds_load_balancing(causal: PreTrainedModel) -> bool:
    """Whether ordinary training of this model adds that loss by itself."""
    wanted = getattr(causal.config, "output_router_logits", False)
    return bool(wanted) and defines_load_balancing(causal)
