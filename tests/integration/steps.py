"""Helpers for tests of whole steps: a batch with every kind of fork, and exactness."""

import math
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forkpoint import Config, Policy, Rollout, RolloutBatch, wrap
from forkpoint.losses.base import Loss, LossFunction, as_loss
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model

VOCAB = 61
# Microbatches of prompts, then microbatches below them that read several parents; segments are cut
# at 12 tokens.
ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=12)


def forked_batch(*, seed: int = 0, vocab: int = VOCAB, stretch: int = 1) -> RolloutBatch:
    """Two groups of rollouts, three levels of forks, one rollout that is a prefix of another, two
    identical ones, trained tokens inside shared segments with different advantages.

    stretch: a factor on the length of every piece.
    """
    rng = np.random.default_rng(seed)

    def piece(length: int) -> list[int]:
        return rng.integers(0, vocab, length * stretch).tolist()

    rollouts = []
    for group, prompt_tokens in enumerate((9, 5)):
        prompt, first, second = piece(prompt_tokens), piece(4), piece(3)
        endings = [
            first + second + piece(5),
            first + second + piece(2),
            first + second,
            first + piece(4),
            first + piece(4),
            piece(6),
        ]
        endings[4] = endings[3]
        for member, ending in enumerate(endings):
            ids = prompt + ending
            mask = [False] * len(prompt) + [True] * len(ending)
            mask[len(prompt) + 1] = False
            rollouts.append(
                Rollout(
                    ids,
                    mask,
                    advantage=float(rng.normal()),
                    old_logprobs=-4 + 0.1 * rng.normal(size=len(ids)),
                    reference_logprobs=-4 + 0.1 * rng.normal(size=len(ids)),
                    group_id=f"g{group}",
                    rollout_id=f"g{group}r{member}",
                )
            )
    return RolloutBatch(rollouts)


def small_model(family: str, **options: Any) -> PreTrainedModel:
    """A tiny model of two layers, a first and a last one, for tests of what each layer does alike.

    Tests of what is done between layers, of one layer or with those between the first and the last
    have models of three or more.
    """
    return tiny_model(family, **{"num_hidden_layers": 2, **options})


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of every parameter's gradient."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def model_state(model: nn.Module) -> dict[str, Any]:
    """All that a step must leave as it was: attributes, hooks and configurations of every module.

    Values that compare by identity stand for themselves, since what is compared is still alive.
    """

    def frozen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: frozen(entry) for key, entry in value.items()}
        if isinstance(value, PreTrainedConfig):
            return frozen(vars(value))
        if isinstance(value, (list, tuple, set)):
            return [frozen(entry) for entry in value]
        return value if isinstance(value, (str, int, float, bool)) else id(value)

    return {name: frozen(vars(module)) for name, module in model.named_modules()}


def relative_distance(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """Norm of the difference over that of what is wanted; inf where only one has a gradient."""
    assert found.keys() == wanted.keys()
    square, total = 0.0, 0.0
    for name, gradient in wanted.items():
        mine = found[name]
        if (mine is None) != (gradient is None):
            return math.inf
        if mine is not None and gradient is not None:
            square += float((mine.double() - gradient.double()).square().sum())
            total += float(gradient.double().square().sum())
    assert total > 0, "the wanted gradient is zero, so nothing is compared"
    return math.sqrt(square / total)


def with_options(policy: Policy, config: Config) -> Policy:
    """A policy of the same model with every option of `config`.

    A sample that has shown the model to agree is not run again, as it is where a model is wrapped
    anew.
    """
    return policy.with_config(**{f.name: getattr(config, f.name) for f in fields(config)})


def step_error(
    model: nn.Module,
    batch: RolloutBatch,
    loss: Loss | LossFunction,
    config: Config = ACROSS,
    *,
    policy: Policy | None = None,
    kept: bool = False,
) -> float:
    """How far a step's gradients are from ordinary training's, relative to their norm.

    Also asserts the loss and every log-prob to a precision that follows from the dtype. A float64
    model computes in float64 throughout. `kept` leaves the step's gradients in `.grad`.
    """
    policy = policy or wrap(model, config)
    double = next(model.parameters()).dtype == torch.float64
    clear_gradients(model)
    with lifted_upcasts(model) if double else nullcontext():
        stats = policy.forward_backward(batch, loss)
        found = gradients(model)
        clear_gradients(model)
        dense = dense_run(model, batch, as_loss(loss))
    if kept:
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
    tolerance = 1e-10 if double else 1e-4
    assert stats.computed_tokens < stats.logical_tokens or config.sharing == "none"
    assert abs(stats.loss - dense.loss) < tolerance
    assert float((stats.logprobs - dense.per_token["logprobs"]).abs().max()) < tolerance
    return relative_distance(found, dense.gradients)
