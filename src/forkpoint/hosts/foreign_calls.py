"""Calls of a model by others while a step runs it: from a loss, a hook or another thread.

A step's own calls carry a microbatch, in the call argument that layers pass on. Any other call is
refused: attention would read prefix caches, and masks are not made. Whether a call is the step's
own is never read from the thread alone, since autograd recomputes blocks on threads of its own;
only what runs in forwards alone is told by the thread.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.arguments import CallContext, refuse_call
from forkpoint.hosts.modules import ATTENTION_NAME, add_hook, every_module

UNMASKED = "forkpoint without masks"
"""The attention implementation that masks are made for in a step's forwards: there are none."""
CLAIM = "_forkpoint_step"
"""An attribute of a model while a step runs it: the step's changes."""
_forward = threading.local()
"""Per thread: "context", while it runs a forward of a step."""


def check_idle(model: nn.Module) -> None:
    """Raise UnsupportedError where a step runs the model."""
    if CLAIM in vars(model):
        _refuse_step()


def claim(model: nn.Module, changes: Changes) -> None:
    """Let the model be this step's until the changes are undone.

    Raises UnsupportedError where it is another's: of two threads that come together one gets it.
    """
    attributes = vars(model)
    changes.later(_release, attributes, changes)
    if attributes.setdefault(CLAIM, changes) is not changes:
        _refuse_step()


def _refuse_step() -> NoReturn:
    raise UnsupportedError(
        "the model is inside a step of forkpoint already (this call comes from a loss, a hook or "
        "another thread); let that step end first. Log-probs that a loss needs are computed before "
        "it, by policy.score."
    )


def _release(attributes: dict[str, Any], changes: Changes) -> None:
    if attributes.get(CLAIM) is changes:
        del attributes[CLAIM]


def begin_forward(context: object, changes: Changes) -> None:
    """This thread runs a forward of a step, until the changes are undone."""
    attributes = vars(_forward)
    changes.later(attributes.pop, "context", None)
    attributes["context"] = context


def in_forward() -> bool:
    """Whether this thread runs a forward of a step, and no recomputation."""
    return "context" in vars(_forward)


class ForwardConfig:
    """A decoder's configuration while a step runs, which says that no masks are made.

    To threads that do not run the step it refuses to say so: one that has entered the decoder
    before the step would go on without its mask.
    """

    def __init__(self, config: Any) -> None:
        vars(self)["_config"] = config

    @property
    def _attn_implementation(self) -> str:
        return UNMASKED if in_forward() else refuse_call()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_config"], name, value)


def refuse_calls(modules: Iterable[nn.Module], changes: Changes) -> None:
    """Refuse calls without a microbatch, until the changes are undone.

    Those of sharded modules, whose hooks issue collectives before a forward begins. Others refuse
    in their forwards.
    """

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(isinstance(given, CallContext) for given in (*args, *kwargs.values())):
            refuse_call()

    for module in modules:
        if isinstance(module, FSDPModule):
            _add_first(changes, module, check)


def keep_to_this_thread(model: nn.Module, changes: Changes) -> None:
    """Refuse calls from other threads, until the changes are undone.

    For runs of the stock model, which has hooks meanwhile and no microbatch.
    """
    own = threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() != own:
            refuse_call()

    for _, module in every_module(model):
        if isinstance(module, PreTrainedModel):
            _add_first(changes, module, check)


def _add_first(changes: Changes, module: nn.Module, hook: Callable[..., None]) -> None:
    """Add a hook that runs before a module's other hooks, until the changes are undone."""
    hooks: Any = module._forward_pre_hooks
    add_hook(changes, hooks, hook, module._forward_pre_hooks_with_kwargs)
    hooks.move_to_end(next(reversed(hooks)), last=False)


# Masks of other callers, whose configuration says that attention is forkpoint's.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, refuse_call)
