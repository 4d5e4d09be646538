"""Router losses of ordinary training, written with stock transformers, one rollout at a time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from experts import expert_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint import Rollout, RolloutBatch
from forkpoint.losses.base import Loss, LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from versions import skip_without_router_logits

VOCAB = 61


@dataclass(frozen=True)
class Ordinary:
    """Results of ordinary training."""

    loss: float
    router_loss: float
    gradients: dict[str, Tensor | None]
    counts_LE: Tensor
    """int64, of the experts that the routers chose."""


def routed_model(family: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A float64 model whose routers are far from uniform, in training mode."""
    model = expert_model(
        family, torch.float64, seed=seed, vocab_size=VOCAB, attention_dropout=0.0, **changes
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter += torch.randn_like(parameter) * spread
    skip_without_router_logits(family)
    return model.train()


def ragged_batch(seed: int = 0) -> RolloutBatch:
    """Groups of four, two and one rollouts, with a fork within responses, a rollout that is the
    beginning of others, two equal ones, and one in which nothing is trained."""
    rng = np.random.default_rng(seed)

    def piece(length: int) -> list[int]:
        return rng.integers(0, VOCAB, length).tolist()

    opening, first, second, common = piece(3), piece(8), piece(4), piece(3)
    twin = piece(5)
    found: list[tuple[list[int], list[int], int]] = [
        (opening + first, common + piece(5), 0),
        (opening + first, common + piece(2), 0),
        (opening + first, common, 0),
        (opening + first, piece(7), 0),
        (opening + second, twin, 1),
        (opening + second, twin, 1),
        (piece(6), piece(4), 2),
    ]
    rollouts = []
    for number, (prompt, response, group) in enumerate(found):
        mask = np.arange(len(prompt) + len(response)) >= len(prompt)
        if number == 3:
            mask[:] = False
        rollouts.append(Rollout(prompt + response, mask, float(rng.normal()), group_id=group))
    return RolloutBatch(rollouts)


def parts_of(scope: str | list[list[int]], batch: RolloutBatch) -> list[list[int]]:
    """A scope of RouterLoss as lists of rollouts."""
    if isinstance(scope, list):
        return scope
    every = list(range(len(batch)))
    return [every] if scope == "batch" else [[rollout] for rollout in every]


def gradient_error(model: nn.Module, wanted: dict[str, Tensor | None]) -> float:
    """Of all parameters together by the norm of all, or of any router by its own: the largest."""
    square = total = 0.0
    worst = 0.0
    for name, parameter in model.named_parameters():
        expected = wanted[name]
        expected = torch.zeros_like(parameter) if expected is None else expected
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference, norm = float((found - expected).norm()), float(expected.norm())
        square, total = square + difference**2, total + norm**2
        if ".gate." in name or ".router." in name:
            worst = max(worst, difference / norm if norm else difference)
    assert total > 0, "the wanted gradient is zero, so nothing is compared"
    return max(worst, (square / total) ** 0.5)


def ordinary_training(
    model: PreTrainedModel,
    batch: RolloutBatch,
    loss: Loss,
    *,
    load_balancing: float,
    z: float,
    parts: Sequence[Sequence[int]],
    last_token: bool = True,
) -> Ordinary:
    """Loss, router loss, and gradients of their sum, by one graph over all rollouts.

    Whatever the tokens' losses, every rollout's forward runs. The model is to have its upcasts
    lifted where it is float64.
    """
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    config = model.config
    routers: list[tuple[Tensor, ...]] = []
    outputs = {}
    per_token = torch.zeros(batch.logical_tokens, dtype=torch.float64)
    chosen: list[list[Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: chosen[-1].append(output[-1]))
        for module in model.modules()
        if "Router" in type(module).__name__
    ]
    model.zero_grad()
    for rollout in range(len(batch)):
        begin, end = int(batch.offsets[rollout]), int(batch.offsets[rollout + 1])
        ids = torch.tensor(batch.token_ids[begin:end].astype(np.int64))
        if not last_token:
            ids = ids[:-1]
        chosen.append([])
        outputs[rollout] = model(
            input_ids=ids[None], use_cache=False, output_router_logits=True, return_dict=True
        )
        routers.append(tuple(outputs[rollout].router_logits))
        logps = outputs[rollout].logits[0].log_softmax(-1)
        labels = torch.tensor(batch.token_ids[begin + 1 : end].astype(np.int64))
        taken = logps[: len(labels)].gather(-1, labels[:, None])[:, 0]
        per_token = torch.cat([per_token[: begin + 1], taken, per_token[end:]])
    for hook in hooks:
        hook.remove()
    mask = torch.tensor(batch.loss_mask)
    views = LossViews(batch, batch_denominators(batch), torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    value = loss(LossOutputs(logprobs=torch.where(mask, per_token, 0.0)), view)
    aux = torch.zeros((), dtype=torch.float64)
    for part in parts:
        logits = tuple(torch.cat(layer) for layer in zip(*(routers[r] for r in part), strict=True))
        if load_balancing:
            assert function is not None
            experts = logits[0].shape[-1]
            aux = aux + load_balancing * function(
                logits, experts, config.num_experts_per_tok
            ) / len(parts)
        if z:
            squares = [x.logsumexp(-1).square() for x in logits]
            aux = aux + z * torch.cat(squares).mean() / len(parts)
    (value + aux).backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    model.zero_grad()
    layers = len(chosen[0])
    counts = torch.stack(
        [
            torch.stack(
                [torch.bincount(each[layer].flatten(), minlength=8) for each in chosen]
            ).sum(0)
            for layer in range(layers)
        ]
    )
    return Ordinary(float(value.detach()), float(aux.detach()), gradients, counts)
