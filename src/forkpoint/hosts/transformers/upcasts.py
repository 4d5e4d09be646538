"""Stock models of transformers in higher precision, as references are computed."""

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
from forkpoint.hosts.transformers.calls import configurations
from forkpoint.hosts.transformers.linear_attention import recurrent_modules


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
    """Let a float64 model of transformers compute in float64 where its code says float32.

    Norms there are computed in float32 whatever the model's dtype, which would limit any comparison
    to about 1e-7.
    """
    for name in {plain_class(m).__module__ for m in model.modules()}:
        module = sys.modules[name]
        if name.startswith("transformers.models.") and getattr(module, "torch", None) is torch:
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


def run_plain_experts(model: nn.Module, changes: Changes) -> None:
    """Let a mixture's experts run one by one: grouped matrix products take few dtypes."""
    for config in configurations(model):
        # Not its property, which also sets it in configurations of other models within.
        changes.set(vars(config), "_experts_implementation_internal", "eager")


# In newer versions each is a wrapper of its torch form, in whose place a package's kernel may run.
WRAPPED = (
    "torch_chunk_gated_delta_rule",
    "causal_conv1d_fn",
    "mamba2_chunk_scan",
    "mamba2_split_conv1d_scan_combined",
)
# In older ones modules hold the package's functions, and None is the torch form.
HELD: dict[str, str | None] = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "causal_conv1d_fn": None,
}


def _module_of(module: nn.Module) -> str:
    return plain_class(module).__module__


def run_plain_recurrences(model: nn.Module, changes: Changes) -> None:
    """Let stock recurrent layers run their torch forms: kernels of packages take 16 bits alone."""
    modules = list(recurrent_modules(model).values())
    for code in {name: sys.modules[name] for name in map(_module_of, modules)}.values():
        for name in WRAPPED:
            plain = getattr(vars(code).get(name), "__wrapped__", None)
            if plain is not None:
                changes.set(vars(code), name, plain)
    for module in modules:
        for name, plain in HELD.items():
            if name in vars(module):
                code = vars(sys.modules[plain_class(module).__module__])
                changes.set(vars(module), name, code[plain] if plain else None)
