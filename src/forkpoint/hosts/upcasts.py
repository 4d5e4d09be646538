"""Float64 models of transformers computed in float64 throughout."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn


class _WithoutUpcasts(ModuleType):
    """`torch`, but with float64 in the place of float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def lifted_upcasts(model: nn.Module) -> Iterator[None]:
    """Let a float64 model of transformers compute in float64 where its code says float32.

    Norms there are computed in float32 whatever the model's dtype, which would limit any comparison
    to about 1e-7.
    """
    with ExitStack() as stack:
        for name in {type(m).__module__ for m in model.modules()}:
            module = sys.modules[name]
            if name.startswith("transformers.models.") and getattr(module, "torch", None) is torch:
                stack.callback(setattr, module, "torch", torch)
                module.torch = _WithoutUpcasts("torch")  # type: ignore[attr-defined]
        # torch.Tensor inherits it: unless this runs within another such block, none is to be left.
        if "float" not in vars(torch.Tensor):
            stack.callback(delattr, torch.Tensor, "float")
            # Of integers too, such as positions: what they are multiplied with is float64 as well.
            torch.Tensor.float = torch.Tensor.double
        yield
