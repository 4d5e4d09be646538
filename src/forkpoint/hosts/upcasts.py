"""Wider dtypes in the place of those that code of models asks for, for references."""

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
"""Packages whose files write models."""


class _WithoutUpcasts(ModuleType):
    """`torch`, but with float64 in the place of float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _grouped_mm(x_RC: Tensor, weights_ECF: Tensor, *, offs: Tensor) -> Tensor:
        """Products [R, F] of the rows before each of the offsets [E] and their weights, which
        torch does not compute in float64."""
        parts = x_RC.tensor_split(offs[:-1].tolist())
        return torch.cat([x @ w for x, w in zip(parts, weights_ECF, strict=True)])


def _as_float64(x: Tensor) -> Tensor:
    # Not `Tensor.double`: of that compiled code would keep the name it was called by.
    return x.to(torch.float64)


def _as_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def lift_upcasts(model: nn.Module, changes: Changes) -> None:
    """Let a float64 model compute in float64 where its code says float32.

    Norms there are computed in float32 whatever the model's dtype, which would limit any comparison
    to about 1e-7. Experts of torchtitan 0.3 are computed in bfloat16.
    """
    # Objects that are no modules compute as well, such as dispatchers of tokens.
    inside = (o for m in model.modules() for o in (m, *vars(m).values()))
    for name in {plain_class(found).__module__ for found in inside}:
        module = sys.modules.get(name)
        if name.startswith(MODEL_CODE) and getattr(module, "torch", None) is torch:
            changes.set(vars(module), "torch", _WithoutUpcasts("torch"))
    # Of integers too, such as positions: what they are multiplied with is float64 as well.
    _replace_conversion("float", _as_float64, changes)
    _replace_conversion("bfloat16", _as_float64, changes)


def lift_bfloat16(changes: Changes) -> None:
    """Let models compute in float32 where their code says bfloat16."""
    _replace_conversion("bfloat16", _as_float32, changes)


def _replace_conversion(name: str, convert: Callable[[Tensor], Tensor], changes: Changes) -> None:
    # torch.Tensor inherits it: unless this is done within another such block, none is to be left.
    if name in vars(torch.Tensor):
        return
    changes.later(_restore_conversion, name)
    setattr(torch.Tensor, name, convert)
    # While blocks are compiled their tensors are of this class, which has its own.
    changes.later(setattr, FunctionalTensor, name, getattr(FunctionalTensor, name))
    setattr(FunctionalTensor, name, convert)
    # Compiled code is found again by what a model's code says, not by what that means here.
    cache = "enable_autograd_cache"
    changes.later(setattr, functorch_config, cache, getattr(functorch_config, cache))
    setattr(functorch_config, cache, False)


def _restore_conversion(name: str) -> None:
    if name in vars(torch.Tensor):
        delattr(torch.Tensor, name)


@contextmanager
def lifted_upcasts(model: nn.Module) -> Iterator[None]:
    """Within it upcasts are lifted: see `lift_upcasts`."""
    with Changes() as changes:
        lift_upcasts(model, changes)
        yield
