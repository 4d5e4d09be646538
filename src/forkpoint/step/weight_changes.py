"""Detects changes to weights since an earlier moment."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps that optimizers have taken on some parameters since its construction.

    torch counts changes of a tensor in `_version`, except those by its fused optimizers, which
    transformers' trainers use by default.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.count: int = 0
        # The parameters outlive this: callers hold them.
        known = {id(p) for p in parameters}
        counter = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = counter()
            if steps is not None:
                held = (p for group in optimizer.param_groups for p in group["params"])
                steps.count += any(id(p) in known for p in held)

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)


class Weights:
    """Parameters and buffers at one moment: their addresses, and torch's counts of changes."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.parameters: list[tuple[str, nn.Parameter]] = list(parameters)
        self._steps = OptimizerSteps(p for _, p in self.parameters)
        self._trained = [p.requires_grad for _, p in self.parameters]
        self._all = [*self.parameters, *((f"the buffer {name}", x) for name, x in buffers)]
        self._places = [_place(*each) for each in self._all]

    def changed(self) -> str | None:
        """Describe a change of some weight; None if no change was detected.

        In-place writes to `tensor.data` are not detected, nor those to frozen experts with adapters
        of peft.
        """
        if self._steps.count:
            return "an optimizer has taken a step"
        for (name, p), trained in zip(self.parameters, self._trained, strict=True):
            if p.requires_grad is not trained:
                return f"{name} {'does not require' if trained else 'requires'} gradients now"
        for (name, x), place in zip(self._all, self._places, strict=True):
            if _place(name, x) != place:
                return f"{name} was written to or has other data"
        return None


def _place(name: str, tensor: Tensor) -> tuple[int, ...]:
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    *above, leaf = name.split(".")
    if above[-1:] == ["base_layer"] and leaf not in ("weight", "bias") and not own.requires_grad:
        # Each forward of peft's adapters of experts replaces the frozen experts and restores them,
        # which torch counts.
        return (own.data_ptr(),)
    return own.data_ptr(), own._version, tensor._version
