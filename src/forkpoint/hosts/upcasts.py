"""Replaces dtypes that a model's code names by wider ones, for references in high precision."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.functional_tensor import FunctionalTensor

from forkpoint.engine.changes import Changes
from forkpoint.hosts.modules import plain_class

MODEL_CODE = ("transformers.models.", "torchtitan.models.")
"""Packages of models whose code is changed."""


class _WithoutUpcasts(ModuleType):
    """The module `torch`, with float64 instead of float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _grouped_mm(x_RC: Tensor, weights_ECF: Tensor, *, offs: Tensor) -> Tensor:
        """Grouped products [R, F]: rows up to each of the offsets [E] times the weights of their
        group. torch does not compute these in float64."""
        parts = x_RC.tensor_split(offs[:-1].tolist())
        return torch.cat([x @ w for x, w in zip(parts, weights_ECF, strict=True)])


def _as_float64(x: Tensor) -> Tensor:
    # Not `Tensor.double`, because compiled code would keep the name by which it was called.
    return x.to(torch.float64)


def _as_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def lift_upcasts(model: nn.Module, changes: Changes) -> None:
    """Let a float64 model compute in float64 where its code names float32, until the changes are
    undone.

    Norms compute in float32 for any dtype of the model, which would limit comparisons to about
    1e-7. Experts of torchtitan 0.3 compute in bfloat16.
    """
    # Objects that are no modules also compute, such as dispatchers of tokens.
    inside = (o for m in model.modules() for o in (m, *vars(m).values()))
    for name in {plain_class(found).__module__ for found in inside}:
        module = sys.modules.get(name)
        if name.startswith(MODEL_CODE) and getattr(module, "torch", None) is torch:
            changes.set(vars(module), "torch", _WithoutUpcasts("torch"))
    # Integers too, such as positions, because they are multiplied by float64 tensors.
    _replace_conversion("float", _as_float64, changes)
    _replace_conversion("bfloat16", _as_float64, changes)


def lift_bfloat16(changes: Changes) -> None:
    """Let models compute in float32 where their code names bfloat16, until the changes are
    undone."""
    _replace_conversion("bfloat16", _as_float32, changes)


def _replace_conversion(name: str, convert: Callable[[Tensor], Tensor], changes: Changes) -> None:
    # torch.Tensor inherits the method, so it is deleted afterwards. If an enclosing block has set
    # it, that block deletes it.
    if name in vars(torch.Tensor):
        return
    changes.later(_restore_conversion, name)
    setattr(torch.Tensor, name, convert)
    # During compilation, tensors are of this class, which overrides the method.
    changes.set_through(FunctionalTensor, name, convert)
    # Compiled code is looked up by the model's code, which does not show these changes.
    changes.set_through(functorch_config, "enable_autograd_cache", False)


def _restore_conversion(name: str) -> None:
    if name in vars(torch.Tensor):
        delattr(torch.Tensor, name)


@contextmanager
def lifted_upcasts(model: nn.Module) -> Iterator[None]:
    """Context manager in which upcasts are lifted: see `lift_upcasts`."""
    with Changes() as changes:
        lift_upcasts(model, changes)
        yield
