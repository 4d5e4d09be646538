"""Calls of a model during a step. Calls that are not part of the step are refused.

Calls of a step have a microbatch in a call argument, which layers pass on. Any other call, from a
loss, a hook or another thread, is refused, because attention would read prefix caches, and masks
are not made. The thread does not identify a call of the step, because autograd recomputes blocks on
other threads. It is used only for code that runs in forwards and not in recomputations.
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
"""Attribute of a model during a step: the step's `Changes`."""
_CHUNK = "_forkpoint_chunk"
_forward = threading.local()
"""Attribute "context" by thread, while the thread runs a forward of a step."""


class CallContext:
    """The running microbatch, which layers of a model find in their call arguments.

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
        """`ends_in`: modules of the block in which the forward ends early; empty if it does not.
        `places`: places of the microbatch that this rank runs."""
        self.instruction: Instruction = instruction
        self.inputs: MicrobatchInputs = inputs
        self.state: CacheView = state
        self.config: Config = config
        self.entropy: bool = entropy
        self.ends_in: frozenset[Hashable] = ends_in
        self.places: Places = places


class EncoderContext:
    """The images or videos of a call of the encoder. It is passed like a `CallContext`."""

    def __init__(self, media: Sequence[Media]) -> None:
        self.media: Sequence[Media] = media


def set_chunk(layer: nn.Module, tokens: int, changes: Changes) -> None:
    """Restrict a layer's attention to chunks of a rollout, until the changes are undone.

    tokens: length of a chunk. The first chunk begins at the first token of the rollout.
    """
    changes.set(vars(layer), _CHUNK, tokens)


def chunk_of(layer: nn.Module) -> int:
    """Length of the layer's chunks; 0 without chunks."""
    # getattr, because compiled code has a guard on a missing attribute, and none on a missing key.
    return getattr(layer, _CHUNK, 0)


def has_chunks(layer: nn.Module) -> bool:
    """Whether the layer's attention is restricted to chunks. Not for compiled code."""
    return _CHUNK in vars(layer)


def refuse_call(*_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError for a call of the model that is not part of the step."""
    raise UnsupportedError(
        "the model, or a part of it, was called while a step of forkpoint runs it (from a loss, a "
        "hook or another thread), or its attn_implementation was set to 'forkpoint'. Call it "
        "before or after the step, or call a copy of the model."
    )


def check_idle(model: nn.Module) -> None:
    """Raise UnsupportedError if a step runs the model."""
    if CLAIM in vars(model):
        _refuse_step()


def claim(model: nn.Module, changes: Changes) -> None:
    """Reserve the model for this step until the changes are undone.

    Raises UnsupportedError if another step has reserved it. Of two concurrent threads, one
    succeeds. The same step may reserve it again.
    """
    attributes = vars(model)
    if attributes.get(CLAIM) is changes:
        return
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
    """Mark this thread as running a forward of a step, until the changes are undone."""
    attributes = vars(_forward)
    changes.later(attributes.pop, "context", None)
    attributes["context"] = context


def in_forward() -> bool:
    """Whether this thread runs a forward of a step, and no recomputation."""
    return "context" in vars(_forward)


def refuse_calls(modules: Iterable[nn.Module], changes: Changes) -> None:
    """Refuse calls without a microbatch, until the changes are undone.

    Only calls of sharded modules are checked here, because their hooks issue collectives before the
    forward. Other modules refuse in their forwards.
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

    For stock forwards, in which the model has hooks of forkpoint and no microbatch.
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
