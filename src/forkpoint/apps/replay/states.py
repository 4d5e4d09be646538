"""Optimizer and generator state that was read from a checkpoint, checked before it is put back."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError

_NAME = re.compile(r"([^/]+)/optimizer/(0|[1-9]\d{0,8})/(.+)", re.ASCII | re.DOTALL)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_KEEPS: dict[type[Optimizer], Callable[[dict[str, Any]], tuple[str, ...]]] = {
    Adam: lambda group: (*_MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else _MOMENTS,
    AdamW: lambda group: (*_MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else _MOMENTS,
    SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    Adadelta: lambda _: ("step", "square_avg", "acc_delta"),
    Adagrad: lambda _: ("step", "sum"),
    Adamax: lambda _: ("step", "exp_avg", "exp_inf"),
    ASGD: lambda _: ("step", "eta", "mu", "ax"),
    NAdam: lambda _: (*_MOMENTS, "mu_product"),
    RAdam: lambda _: _MOMENTS,
    RMSprop: lambda group: (
        *("step", "square_avg"),
        *(("momentum_buffer",) if group["momentum"] > 0 else ()),
        *(("grad_avg",) if group["centered"] else ()),
    ),
    Rprop: lambda _: ("step", "prev", "step_size"),
}
"""State that torch's optimizers keep of a parameter they have changed, by the options of its group.
Each is one number, or one for each element of the parameter."""
_ONE_NUMBER = {"step", "eta", "mu", "mu_product"}


@dataclass(frozen=True)
class Kept:
    """The name of one value of an optimizer's state: whose, of which parameter, and which."""

    side: str
    index: int
    """Of the parameter, over all groups of the optimizer."""
    name: str

    @classmethod
    def of(cls, key: str) -> "Kept | None":
        """The name that a key spells; None for other keys."""
        found = _NAME.fullmatch(key)
        return None if found is None else cls(found[1], int(found[2]), found[3])

    def check(self, optimizer: Optimizer, parameter: Tensor, value: Tensor, step: int) -> None:
        """Raises SchemaError for a tensor that torch's optimizers do not have after `step` steps.

        Of other optimizers nothing is known.
        """
        where = f"{self.side}/optimizer/{self.index}/{self.name}"
        if type(optimizer) not in _KEEPS:
            return
        if self.name in _ONE_NUMBER:
            if value.dtype not in (torch.float32, torch.float64) or value.numel() != 1:
                raise SchemaError(f"{where} is {value.dtype}; it takes one float32 number")
        elif value.dtype != parameter.dtype:
            raise SchemaError(f"{where} is {value.dtype}, and its parameter {parameter.dtype}")
        # A NaN is not within these bounds either.
        if self.name == "step" and not 1 <= float(value) <= step:
            raise SchemaError(f"{where} is {float(value)}; it takes a number from 1 to {step}")


def check_states(
    side: str,
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    plain: Iterable[str],
) -> None:
    """Refuse names and shapes of state that this optimizer does not keep.

    Args:
        side: whose state is looked at.
        optimizer: what it will be put back into.
        parameters: of the optimizer, over all of its groups.
        shapes: of all tensors of state in the file, by key.
        plain: keys of what is kept besides tensors.

    Raises SchemaError. Of optimizers that are not torch's own, only numbers of parameters are
    looked at.
    """
    names: dict[int, set[str]] = {}
    known = _KEEPS.get(type(optimizer))
    for key in (*shapes, *plain):
        kept = Kept.of(key)
        if kept is None or kept.side != side:
            continue
        if kept.index >= len(parameters):
            raise SchemaError(f"there is {key}, and the optimizer has {len(parameters)} parameters")
        if kept.name in names.setdefault(kept.index, set()):
            raise SchemaError(f"{short(key)} is there as a tensor and as a plain value")
        names[kept.index].add(kept.name)
        shape = tuple(parameters[kept.index].shape)
        if known and shapes.get(key) not in ((), (1,), shape):
            raise SchemaError(
                f"{short(key)} is of shape {shapes.get(key)}, and its parameter of {shape}"
            )
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for index, found in names.items():
        if known and found != set(known(groups[index])):
            raise SchemaError(
                f"the state of parameter {index} of side {side} has {short(sorted(found))}, and "
                f"{type(optimizer).__name__} keeps {', '.join(known(groups[index])) or 'nothing'}"
            )


def generator_takes(device: str, state: Tensor) -> bool:
    """Whether a tensor is a state of the random number generator of a device."""
    generator = torch.Generator(device)
    known = generator.get_state()
    if (state.dtype, state.shape) != (known.dtype, known.shape):
        return False
    try:
        generator.set_state(state)
    except RuntimeError:  # torch looks at what is in it
        return False
    return True
