"""Counts of changes to weights, which tell whether they are still those of an earlier moment."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
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
