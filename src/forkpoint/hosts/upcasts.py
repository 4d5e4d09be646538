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
        stack.callback(setattr, torch.Tensor, "float", torch.Tensor.float)
        torch.Tensor.float = _float  # type: ignore[method-assign]
        yield


_cast_to_float = torch.Tensor.float


def _float(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self if self.dtype == torch.float64 else _cast_to_float(self, *args, **kwargs)
