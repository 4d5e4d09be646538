"""Ordinary dense training, as a yardstick.

The stock model's own forward, one rollout at a time, with a log-softmax over its logits: what users
would write, and what every claim that gradients are exact is measured against. Of the engine it has
only the tensors that a loss is shown (`engine.views`); no plan, row, kernel, head or schedule.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from forkpoint.engine.views import LossViews, batch_denominators
from forkpoint.losses.base import Denominators, Loss, LossOutputs
from forkpoint.rollouts import RolloutBatch


@dataclass(frozen=True, eq=False)
class DenseRun:
    """An ordinary run of a batch: every rollout whole, on its own."""

    loss: float
    logprobs_T: Tensor
    entropies_T: Tensor
    gradients: dict[str, Tensor | None]


def dense_run(
    model: nn.Module,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
) -> DenseRun:
    """Loss, log-probs, entropies and every parameter's gradient of ordinary training.

    The log-probs come first without a graph; the loss's gradient by them then weighs each rollout's
    own, so that one rollout's graph exists at a time. Leaves `.grad` as it was.
    """
    parameters = dict(model.named_parameters())
    before = {name: p.grad for name, p in parameters.items()}
    weight = next(iter(parameters.values()))
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    logprobs = torch.zeros(batch.logical_tokens, dtype=dtype, device=weight.device)
    entropies = torch.zeros_like(logprobs)
    try:
        for p in parameters.values():
            p.grad = None
        with torch.no_grad():
            for rollout in range(len(batch)):
                tokens, logp, entropy = _dense_logprobs(model, batch, rollout, dtype)
                logprobs[tokens], entropies[tokens] = logp, entropy
        logprobs.requires_grad_()
        entropies.requires_grad_(loss.needs_entropy)
        views = LossViews(batch, denominators or batch_denominators(batch), weight.device, dtype)
        view, _ = views.of_rollouts(np.ones(len(batch), bool))
        value = loss(LossOutputs(logprobs=logprobs, entropies=entropies), view)
        wanted = [logprobs, *([entropies] if loss.needs_entropy else [])]
        if value.requires_grad:
            weights = torch.autograd.grad(value, wanted, allow_unused=True)
            for rollout in range(len(batch)):
                tokens, *found = _dense_logprobs(model, batch, rollout, dtype)
                total = sum(
                    (w[tokens] * x).sum()
                    for w, x in zip(weights, found, strict=False)
                    if w is not None
                )
                if isinstance(total, Tensor) and total.requires_grad:
                    total.backward()
        gradients = {
            name: None if p.grad is None else p.grad.detach() for name, p in parameters.items()
        }
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return DenseRun(float(value.detach()), logprobs.detach(), entropies.detach(), gradients)


def _dense_logprobs(
    model: nn.Module, batch: RolloutBatch, rollout: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Trained tokens of one rollout as positions in the batch, their log-probs and entropies."""
    device = next(model.parameters()).device
    begin, end = int(batch.offsets[rollout]), int(batch.offsets[rollout + 1])
    trained = torch.as_tensor(np.flatnonzero(batch.loss_mask[begin:end]), device=device)
    ids = torch.as_tensor(batch.token_ids[begin:end].copy(), device=device)
    if len(trained) == 0:
        empty = torch.zeros(0, dtype=dtype, device=device)
        return trained, empty, empty
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, trained - 1]
    logits = logits.to(dtype) / float(batch.temperatures[rollout])
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return trained + begin, every.gather(-1, ids[trained, None])[:, 0], entropy
