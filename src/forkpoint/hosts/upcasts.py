"""Float64 in the place of the float32 that code of models asks for, for references."""

import sys
from collections.abc import Iterator
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


def _as_float64(x: Tensor) -> Tensor:
    # Not `Tensor.double`: of that compiled code would keep the name it was called by.
    return x.to(torch.float64)


def lift_upcasts(model: nn.Module, changes: Changes) -> None:
    """Let a float64 model compute in float64 where its code says float32.

    Norms there are computed in float32 whatever the model's dtype, which would limit any comparison
    to about 1e-7.
    """
    for name in {plain_class(m).__module__ for m in model.modules()}:
        module = sys.modules[name]
        if name.startswith(MODEL_CODE) and getattr(module, "torch", None) is torch:
            changes.set(vars(module), "torch", _WithoutUpcasts("torch"))
    # torch.Tensor inherits it: unless this is done within another such block, none is to be left.
    if "float" not in vars(torch.Tensor):
        changes.later(_without_float)
        # Of integers too, such as positions: what they are multiplied with is float64 as well.
        torch.Tensor.float = _as_float64  # type: ignore[method-assign]
        # While blocks are compiled their tensors are of this class, which has its own.
        changes.later(setattr, FunctionalTensor, "float", FunctionalTensor.float)
        FunctionalTensor.float = _as_float64  # type: ignore[method-assign]
        # Compiled code is found again by what a model's code says, not by what that means here.
        name = "enable_autograd_cache"
        changes.later(setattr, functorch_config, name, getattr(functorch_config, name))
        setattr(functorch_config, name, False)


def _without_float() -> None:
    if "float" in vars(torch.Tensor):
        del torch.Tensor.float


@contextmanager
def lifted_upcasts(model: nn.Module) -> Iterator[None]:
    """Within it upcasts are lifted: see `lift_upcasts`."""
    with Changes() as changes:
        lift_upcasts(model, changes)
        yield
