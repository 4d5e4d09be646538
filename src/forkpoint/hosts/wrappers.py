"""Wrappers that users set around a model's forwards: compiled code, autocast, heads of TRL.

A step removes compiled code and TRL's fused head, and restores them afterwards. forkpoint compiles
blocks itself, and its head also computes log-probs instead of logits. Autocast, and accelerate's
conversion of outputs to float32, are kept, because they change values. Any other forward that is
set on a module is refused.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import is_code_of
from forkpoint.hosts.modules import HOOKS, every_module, forget_lists

FUSED_HEAD = ("trl.trainer.utils", "add_fused_lm_head.<locals>._fused_forward")
"""Definition of the forward that TRL sets on a model. It computes log-probs on request, and
otherwise calls the earlier forward."""
FLOAT32_HEAD = (
    "trl.trainer.grpo_trainer",
    "GRPOTrainer.__init__.<locals>._cast_lm_head_to_fp32.<locals>.cast_forward_to_fp32",
)
"""Definition of the forward that TRL sets on a head to compute its product in float32, without
autocast."""
DYNAMO = "torch._dynamo.eval_frame"


@dataclass(frozen=True)
class SetForward:
    """A forward that is set on a module: the wrappers around the forward of its class."""

    own: Callable[..., Any]
    """The forward of the module's class, bound to the module."""
    kept: tuple[Any, ...]
    """Wrappers that stay, outermost first: torch.autocast objects and accelerate's converters to
    float32."""
    removable: bool
    """Whether compiled code or TRL's fused head is among the wrappers."""
    in_float32: bool = False
    """Whether this is the forward of a head that computes its product in float32."""

    @property
    def autocasts(self) -> tuple[torch.autocast, ...]:
        return tuple(layer for layer in self.kept if isinstance(layer, torch.autocast))

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Put the kept wrappers around another forward."""
        for layer in reversed(self.kept):
            if isinstance(layer, torch.autocast):
                forward = _same_autocast(layer)(forward)
            else:
                # As a function, because accelerate recognises its wrapper by its function.
                made = sys.modules[type(layer).__module__].convert_outputs_to_fp32
                forward = made(forward)
        return forward


def set_forward(module: nn.Module) -> SetForward | None:
    """The forward that is set on a module; None if there is none or it is not known."""
    forward = vars(module).get("forward")
    kept: list[Any] = []
    removable = False
    while forward is not None:
        bound = isinstance(forward, types.MethodType)
        if bound and forward.__self__ is not module:
            return None
        function: Any = forward.__func__ if bound else forward
        if bound and _is_of_class(function, type(module)):
            return SetForward(forward, tuple(kept), removable)
        if _is(
            function, "torch.amp.autocast_mode", "autocast_decorator.<locals>.decorate_autocast"
        ):
            kept.append(closed_over(function)["autocast_instance"])
            forward = function.__wrapped__
        elif _is(
            function, "accelerate.utils.operations", "convert_outputs_to_fp32.<locals>.forward"
        ):
            kept.append(function.__wrapped__)
            forward = function.__wrapped__.model_forward
        elif _is_compiled(function):
            removable = True
            forward = function._torchdynamo_orig_callable
        elif not kept and _is(function, *FLOAT32_HEAD):
            if closed_over(function)["lm_head"] is not module:
                return None
            own = types.MethodType(type(module).forward, module)
            return SetForward(own, (), False, in_float32=True)
        elif bound and _is(function, *FUSED_HEAD):
            removable = True
            forward = closed_over(function)["original_forward"]
        elif _is(function, "torch._dynamo.external_utils", "wrap_inline.<locals>.inner"):
            forward = function.__wrapped__  # what torch.compile puts around functions of torch
        else:
            return None
        if bound and isinstance(forward, types.FunctionType):
            forward = types.MethodType(forward, module)
    return None


def in_float32(head: nn.Module) -> bool:
    """Whether TRL has set a forward on the head that computes its product in float32."""
    known = set_forward(head)
    return known is not None and known.in_float32


def autocasts_of(model: nn.Module) -> tuple[torch.autocast, ...]:
    """The autocasts that are set around forwards of a model's modules."""
    found = (set_forward(m) for _, m in every_module(model) if "forward" in vars(m))
    return tuple(autocast for forward in found if forward for autocast in forward.autocasts)


@contextmanager
def entered(autocasts: tuple[torch.autocast, ...]) -> Iterator[None]:
    """Context manager that enters these autocasts, the first one outermost."""
    with ExitStack() as stack:
        for autocast in autocasts:
            stack.enter_context(_same_autocast(autocast))
        yield


class ForwardWrappers:
    """Removes wrappers around the forwards of one model."""

    def __init__(self) -> None:
        self._forwards: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
        """By module: the forward that was set on it, and the same with only the kept wrappers.
        These objects are reused, so that the fingerprint does not change at every step."""

    def take_off(self, model: nn.Module, changes: Changes) -> None:
        """Remove compiled code and TRL's head until the changes are undone."""
        found, compiled = False, _compiled_class()
        for where, module in every_module(model):
            attributes = vars(module)
            if attributes.get("_compiled_call_impl") is not None:
                changes.set(attributes, "_compiled_call_impl", None)
            if "forward" in attributes:
                self._take_off_forward(module, changes)
            children = attributes["_modules"]
            for name, child in children.items():
                if type(child) is compiled:
                    inside = uncompiled(child, f"{where}.{name}".lstrip("."))
                    changes.set(children, name, inside)
                    found = True
        if found:
            forget_lists()
            self.take_off(model, changes)

    def _take_off_forward(self, module: nn.Module, changes: Changes) -> None:
        known = set_forward(module)
        if known is None or not known.removable:
            return
        attributes = vars(module)
        before, forward = self._forwards.get(module, (None, known.own))
        if before is not attributes["forward"]:
            forward = known.around(known.own)
            self._forwards[module] = (attributes["forward"], forward)
        changes.replace_forward(module, forward)


def _compiled_class() -> type | None:
    """The class of the modules that torch.compile returns; None where nothing is compiled."""
    # Importing it takes a second.
    return getattr(sys.modules.get(DYNAMO), "OptimizedModule", None)


def is_compiled_class(kind: type) -> bool:
    """Whether torch.compile returns modules of this class."""
    return kind is _compiled_class()


def uncompiled(model: Any, name: str = "the model") -> Any:
    """The original of a module that torch.compile returned; other modules unchanged.

    Raises UnsupportedError if something was set on the compiled module, such as a hook.
    """
    while type(model) is _compiled_class():
        attributes = vars(model)
        hooks = any(attributes[kind] for kind in HOOKS)
        if hooks or not _is_compiled(attributes["forward"]):
            found = "a hook" if hooks else "a forward"
            raise UnsupportedError(
                f"{name} is the result of torch.compile, and has {found}. A step runs the module "
                f"without compiled code, and thus without {found}. Set it on module._orig_mod, or "
                "before torch.compile."
            )
        model = model._orig_mod
    return model


def _is_of_class(function: Any, kind: type[nn.Module]) -> bool:
    """Whether a function is the forward of a class, or a function inside that forward's decorators.

    accelerate's unwrap_model sets such a function.
    """
    own: Any = kind.forward
    while own is not None:
        if own is function:
            return True
        own = getattr(own, "__wrapped__", None)
    return False


def _is(function: Any, module: str, qualname: str) -> bool:
    """Whether a function was defined in this module with this qualified name."""
    return isinstance(function, types.FunctionType) and is_code_of(
        function.__code__, (module, qualname)
    )


def _is_compiled(function: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    code = sys.modules.get(DYNAMO)
    return (
        code is not None
        and "_torchdynamo_orig_callable" in vars(function)
        and function.__code__.co_filename == code.__file__
    )


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _same_autocast(autocast: torch.autocast) -> torch.autocast:
    """A new autocast with the same options, because an entered one stores its state in itself."""
    return torch.autocast(
        autocast.device,
        dtype=autocast.fast_dtype,
        enabled=autocast._enabled,
        cache_enabled=autocast._cache_enabled,
    )
