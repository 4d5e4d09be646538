"""Changes to weights, which tell whether they are still those of an earlier moment."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """The number of steps that optimizers have taken on some parameters since this was made.

    torch counts changes of a tensor in `_version`, but for those of its fused optimizers, which
    transformers' trainers use by default.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.count: int = 0
        # The parameters outlive this: whoever asks holds them.
        self._known = {id(p) for p in parameters}
        counter = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = counter()
            if steps is not None:
                steps._stepped(optimizer)

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        self.count += any(id(p) in self._known for p in held)


class Weights:
    """Parameters and buffers as they are at one moment: where they lie, and torch's counts of
    changes."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.parameters: list[tuple[str, nn.Parameter]] = list(parameters)
        self._steps = OptimizerSteps(p for _, p in self.parameters)
        self._trained = [p.requires_grad for _, p in self.parameters]
        self._buffers = list(buffers)
        self._places = [_place(p) for _, p in self.parameters]
        self._buffer_places = [_place(x) for _, x in self._buffers]

    def changed(self) -> str | None:
        """A weight that is another now, and how it was changed; None where none is known to be.

        A write to `tensor.data` in place is not among what torch counts.
        """
        if self._steps.count:
            return "an optimizer has taken a step"
        for (name, p), place in zip(self.parameters, self._places, strict=True):
            if _place(p) != place:
                return f"{name} was written to or has other data"
        for (name, x), place in zip(self._buffers, self._buffer_places, strict=True):
            if _place(x) != place:
                return f"the buffer {name} was written to or has other data"
        return None

    def frozen_or_freed(self) -> str | None:
        """A parameter that requires gradients now and did not then, or the reverse."""
        for (name, p), trained in zip(self.parameters, self._trained, strict=True):
            if p.requires_grad is not trained:
                return f"{name} {'does not require' if trained else 'requires'} gradients now"
        return None


def _place(tensor: Tensor) -> tuple[int, int, int]:
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own.data_ptr(), own._version, tensor._version
