"""Subclasses of a trainer, stock or ours, that change its loss or its backward."""

from typing import Any

import torch


def scaled(base: Any) -> type:
    class Scaled(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 0.5 * super().compute_loss(*args, **kwargs)

    return Scaled


def counted(base: Any) -> type:
    """Weights of 0 and 2, by a count of its calls."""

    class Counted(base):
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return (0.0, 2.0)[self.calls % 2] * super().compute_loss(*args, **kwargs)

    return Counted


def squared(base: Any) -> type:
    class Squared(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self._metrics["train"]["own"].append(loss.item())
            return loss + (loss - 1.0) ** 2

    return Squared


def pulled(base: Any) -> type:
    """A term of the parameters, a constant, and a call without gradients."""

    class Pulled(base):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                value = super().compute_loss(model, *args, **kwargs)
            pull = sum(p.square().sum() for p in self.model.parameters())
            return super().compute_loss(model, *args, **kwargs) + 1e-3 * pull + value + 3.0

    return Pulled


def twice(base: Any) -> type:
    """Two losses of a micro-batch, and a third that nothing is computed from."""

    class Twice(base):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            first, second, _ = (super(Twice, self).compute_loss(model, inputs) for _ in range(3))
            return first - 0.3 * second

    return Twice


def inner(base: Any) -> type:
    """Another `_compute_loss`, with random numbers."""

    class Inner(base):
        def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            noise = torch.rand((), generator=torch.Generator().manual_seed(self._drawn()))
            return (1 + noise) * super()._compute_loss(*args, **kwargs)

        def _drawn(self) -> int:
            self.drawn = getattr(self, "drawn", 0) + 1
            return self.drawn

    return Inner


def backwards(base: Any) -> type:
    """A `training_step` of its own, which weights micro-batches by their losses."""

    class Backwards(base):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            loss = loss * (2 + loss.detach())
            self.accelerator.backward(loss)
            if hasattr(self, "_step"):
                self._step += 1
            return loss.detach()

    return Backwards


def outputs(base: Any) -> type:
    """The log-probs themselves."""

    class Outputs(base):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return (logps * 1.5, *others)

    return Outputs
