"""Calls of a model while a step runs it: the step's own, and those of others, which are refused.

A step's own calls carry a microbatch, in a call argument that layers pass on. Any other call, from
a loss, a hook or another thread, is refused: attention would read prefix caches, and masks are not
made. Whether a call is the step's own is never read from the thread alone, since autograd
recomputes blocks on threads of its own; only what runs in forwards alone is told by the thread.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.microbatches import CacheView, MicrobatchInputs
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import add_hook
from forkpoint.parallel.topology import ALL_PLACES, Places
from forkpoint.plan.program import Instruction
from forkpoint.rollouts.media import Media

CLAIM = "_forkpoint_step"
"""An attribute of a model while a step runs it: the step's changes."""
_CHUNK = "_forkpoint_chunk"
_forward = threading.local()
"""Per thread: "context", while it runs a forward of a step."""


class CallContext:
    """The microbatch that runs, as layers of a model find it in their call arguments.

    A plain object: FSDP copies dataclasses that it meets in call arguments.
    """

    def __init__(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: CacheView,
        config: Config,
        *,
        entropy: bool,
        ends_in: frozenset[Hashable],
        places: Places = ALL_PLACES,
    ) -> None:
        """`ends_in`: the modules of the block in which the forward ends; none where it goes on.
        `places`: which of the microbatch this rank runs."""
        self.instruction: Instruction = instruction
        self.inputs: MicrobatchInputs = inputs
        self.state: CacheView = state
        self.config: Config = config
        self.entropy: bool = entropy
        self.ends_in: frozenset[Hashable] = ends_in
        self.places: Places = places


class EncoderContext:
    """The images or videos that are encoded, in the place of a microbatch."""

    def __init__(self, media: Sequence[Media]) -> None:
        self.media: Sequence[Media] = media


def set_chunk(layer: nn.Module, tokens: int, changes: Changes) -> None:
    """Let a layer's tokens see those of their own chunk alone, until the changes are undone.

    tokens: of a chunk; the first begins where rollouts begin.
    """
    changes.set(vars(layer), _CHUNK, tokens)


def chunk_of(layer: nn.Module) -> int:
    """How many tokens a chunk of the layer has; 0 where it has none."""
    # By getattr: compiled code checks that an attribute is missing, and of a key it does not.
    return getattr(layer, _CHUNK, 0)


def has_chunks(layer: nn.Module) -> bool:
    """Whether tokens see those of their own chunk alone; for code that is not compiled."""
    return _CHUNK in vars(layer)


def refuse_call(*_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError, for a call of the model that is not a step's."""
    raise UnsupportedError(
        "the model, or a part of it, was called while a step of forkpoint runs it (from a loss, a "
        "hook or another thread), or its attn_implementation was set to 'forkpoint'. Call it "
        "before or after the step, or call a copy of the model."
    )


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


def refuse_calls(modules: Iterable[nn.Module], changes: Changes) -> None:
    """Refuse calls without a microbatch, until the changes are undone.

    Those of sharded modules, whose hooks issue collectives before a forward begins. Others refuse
    in their forwards.
    """

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = CallContext, EncoderContext
        if not any(isinstance(given, own) for given in (*args, *kwargs.values())):
            refuse_call()

    for module in modules:
        if isinstance(module, FSDPModule):
            _add_first(changes, module, check)


def keep_to_this_thread(modules: Iterable[nn.Module], changes: Changes) -> None:
    """Refuse calls of the modules from other threads, until the changes are undone.

    For runs of the stock model, which has hooks meanwhile and no microbatch.
    """
    own = threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() != own:
            refuse_call()

    for module in modules:
        _add_first(changes, module, check)


def _add_first(changes: Changes, module: nn.Module, hook: Callable[..., None]) -> None:
    hooks: Any = module._forward_pre_hooks
    add_hook(changes, hooks, hook, module._forward_pre_hooks_with_kwargs)
    hooks.move_to_end(next(reversed(hooks)), last=False)
