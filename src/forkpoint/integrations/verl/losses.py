"""verl's losses, which forkpoint's steps call on parts of a mini-batch.

A step computes the loss in each of forkpoint's microbatches, which differ from verl's
micro-batches. For a view of some tokens, verl's loss is called on the micro-batches that hold them,
with constant log-probs at the other tokens. Its gradients at the tokens of the view are correct if
they do not depend on the log-probs of other tokens, or of other rollouts. A test before the first
step checks this, and each step compares its gradients afterwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkpoint.integrations.verl.rows import Rows, jagged
from forkpoint.losses.base import Decomposition, LossBatch, LossOutputs

VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""verl's loss: (model_output=, data=, dp_group=) to a scalar and metrics."""

TOLERANCE = 1e-5
"""Largest relative difference of equal gradients; verl computes losses in float32."""
NOISES = (0.3, 1e-3)
"""Standard deviations, in nats, of the log-probs that losses are tried with."""
ORDER: tuple[Decomposition, ...] = ("token", "rollout", "joint")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One of verl's micro-batches, on the device.

    data: its TensorDict.
    rows: its rows in the mini-batch.
    after, offsets: as `rows.jagged` takes them.
    """

    data: Any
    rows: tuple[int, ...]
    after: Tensor
    offsets: Tensor


Result = dict[str, Any]
"""Loss and metrics of a micro-batch, and the outputs from which they were computed, by verl's
names."""


@dataclass(eq=False)
class MiniBatchLoss:
    """verl's loss of a mini-batch: the sum of verl's function over its micro-batches."""

    function: VerlLoss
    micro_batches: Sequence[MicroBatch]
    rows: Rows
    names: dict[str, str]
    """verl's names of outputs, by forkpoint's names."""
    dp_group: Any
    """Argument of verl's function."""
    device: torch.device

    def __post_init__(self) -> None:
        count = int(self.rows.offsets[-1])
        self._fill = {name: torch.zeros(count, device=self.device) for name in self.names}
        self._home = torch.zeros(len(self.rows.batch), dtype=torch.int64)
        for number, micro_batch in enumerate(self.micro_batches):
            self._home[list(micro_batch.rows)] = number
        self._used = {name: torch.zeros(count, device=self.device) for name in self.names}
        """Gradients that a step has used, by token."""
        self.whole: list[Result] | None = None
        """Results of the last call, if it covered the whole mini-batch."""

    def fill(self, name: str, values_T: Tensor) -> None:
        """Set the values [T] of an output at tokens outside of views."""
        self._fill[name] = values_T.to(self.device)

    def __call__(self, outputs: LossOutputs, view: LossBatch) -> Tensor:
        """The loss of a view, with gradients with respect to the outputs of the view only."""
        shown = {name: outputs.per_token[name] for name in self.names}
        touched = self._home[view.rollout_index.cpu()].unique().tolist()
        leaves = {name: x.detach().requires_grad_() for name, x in shown.items()}
        with torch.enable_grad():
            whole = {
                name: self._fill[name].to(x.dtype).index_put((view.token_index,), x)
                for name, x in leaves.items()
            }
            called = [self._of(self.micro_batches[n], whole) for n in touched]
            total = torch.stack([loss for loss, _, _ in called]).sum()
        if len(view.token_index) == int(self.rows.offsets[-1]):
            self.whole = [_result(*one) for one in called]
        if not torch.is_grad_enabled():
            return total.detach()
        slopes = _slopes(total, leaves)
        value = total.detach()
        for name, slope in slopes.items():
            self._used[name].index_put_((view.token_index,), slope.float())
            value = value + (slope * (shown[name] - shown[name].detach())).sum()
        return value

    def results(
        self, per_token: dict[str, Tensor], *, gradients: bool = False
    ) -> tuple[list[Result], float]:
        """Loss and metrics of each micro-batch, and the difference between the gradients with
        respect to `per_token` and those that the step has used, relative to their norm; 0 without
        `gradients`.

        per_token: outputs [T] by forkpoint's names.
        """
        leaves = {name: per_token[name].detach() for name in self.names}
        found = []
        square, off = 0.0, 0.0
        slopes = {name: torch.zeros_like(x) for name, x in leaves.items()}
        for micro_batch in self.micro_batches:
            inputs = {n: x.clone().requires_grad_(gradients) for n, x in leaves.items()}
            with torch.set_grad_enabled(gradients):
                loss, metrics, outputs = self._of(micro_batch, inputs)
            if gradients:
                for name, slope in _slopes(loss, inputs).items():
                    slopes[name] += slope
            found.append(_result(loss, metrics, outputs))
        if not gradients:
            return found, 0.0
        for name, slope in slopes.items():
            used = self._used[name]
            same = (slope == used) | (slope.isnan() & used.isnan())
            square += float(slope.float().nan_to_num().square().sum())
            off += float(torch.where(same, 0, slope.float() - used).square().sum())
        if off == 0.0:
            return found, 0.0
        ratio = (off / square) ** 0.5 if square else math.inf
        return found, math.inf if math.isnan(ratio) else ratio

    def decomposition(self) -> Decomposition | None:
        """Find the decomposition of the loss; None if all gradients are zero.

        The test changes log-probs of other tokens, then of other rollouts, and compares gradients
        at unchanged tokens.
        """
        generator = torch.Generator().manual_seed(0)
        counts = self.rows.offsets.diff()
        by_token = torch.rand(int(counts.sum()), generator=generator) < 0.5
        rollouts = torch.randperm(len(counts), generator=generator) % 2 == 0
        by_rollout = rollouts.repeat_interleave(counts)
        found, seen = 0, False
        for noise in NOISES:
            before = self._noisy(noise, generator)
            moved = self._noisy(noise, generator)
            base = self._gradients(before)
            seen = seen or bool(base.any())
            for level, moves in enumerate((by_token, by_rollout)):
                if found > level:
                    continue
                at = moves.to(self.device)
                mixed = {name: torch.where(at, moved[name], x) for name, x in before.items()}
                apart = (self._gradients(mixed) - base)[:, ~at].norm()
                if not bool(apart <= TOLERANCE * base[:, ~at].norm()):
                    found = level + 1
        return ORDER[found] if seen else None

    def _noisy(self, noise: float, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            name: x + noise * torch.randn(len(x), generator=generator).to(x.device)
            for name, x in self._fill.items()
        }

    def _gradients(self, per_token: dict[str, Tensor]) -> Tensor:
        """Gradients of the whole loss: [outputs, T]."""
        total = torch.zeros(len(self.names), int(self.rows.offsets[-1]), device=self.device)
        for micro_batch in self.micro_batches:
            leaves = {name: x.detach().clone().requires_grad_() for name, x in per_token.items()}
            with torch.enable_grad():
                loss = self._of(micro_batch, leaves)[0]
            total += torch.stack(list(_slopes(loss, leaves).values()))
        return total

    def _of(
        self, micro_batch: MicroBatch, per_token: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        outputs = {
            self.names[name]: jagged(x, micro_batch.after, micro_batch.offsets)
            for name, x in per_token.items()
        }
        loss, metrics = self.function(
            model_output=dict(outputs), data=micro_batch.data, dp_group=self.dp_group
        )
        return loss, metrics, outputs


def _result(loss: Tensor, metrics: dict[str, Any], outputs: dict[str, Tensor]) -> Result:
    kept = {name: x.detach() for name, x in outputs.items()}
    return {"model_output": kept, "loss": loss.detach().item(), "metrics": metrics}


def _slopes(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss with respect to each leaf; zeros for leaves that it does not use."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    found = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))
