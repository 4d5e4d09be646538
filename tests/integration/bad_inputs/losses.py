"""Losses with arguments that are not allowed, on batches that they cannot be computed on."""

from collections.abc import Callable
from typing import Any

import torch
from steps import forked_batch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Rollout, RolloutBatch, losses
from forkpoint.errors import ConfigError, ForkpointError, RolloutError
from forkpoint.losses import Loss

BATCH = forked_batch()


def loss_kind(
    call: Callable[[], object],
    *,
    message: str,
    error: type[ForkpointError] = ConfigError,
) -> Kind:
    return Kind(error=error, message=message, call=call)


def trained(loss: Any, batch: RolloutBatch = BATCH) -> Callable[[], object]:
    return lambda: policy().forward_backward(batch, loss)


class Undeclared(Loss):
    """A loss that does not say how it decomposes."""


class Needy(Loss):
    """A loss that needs what no rollout has."""

    decomposition = "token"
    needs = ("rewards",)


def detached(outputs: Any, batch: Any) -> Any:
    return outputs.logprobs.detach().sum()


def without_grad(outputs: Any, batch: Any) -> Any:
    torch.set_grad_enabled(False)  # and not as a context manager
    return outputs.logprobs.sum()


LOSSES = (
    loss_kind(
        trained(losses.GRPO), message="The loss is the class GRPO; pass an instance, GRPO()."
    ),
    loss_kind(
        trained("grpo"),
        message="The loss is 'grpo' of type str; it takes a forkpoint.losses.Loss or a function",
    ),
    loss_kind(
        trained(Undeclared()),
        message="decomposition is None; allowed are 'token', 'rollout', 'joint'.",
    ),
    loss_kind(
        trained(Needy()),
        message="needs is 'rewards'; allowed are 'old_logprobs', 'reference_logprobs', 'weights',",
    ),
    loss_kind(
        trained(detached),
        message="the loss detached returned a scalar without a graph, so that nothing would be "
        "trained; it must be computed from outputs.logprobs, without detach(), item() or "
        "torch.no_grad().",
    ),
    loss_kind(
        trained(without_grad),
        message="the loss without_grad returned a scalar without a graph, so that nothing would",
    ),
    loss_kind(
        trained(losses.GRPO(kl=0.1), RolloutBatch([Rollout([1, 2], [0, 1], 1.0)])),
        message="GRPO(kl=0.1, kl_estimator='k3', entropy=0.0, normalize='token', clip=0.2, "
        "clip_high=None, dual_clip=None) needs reference_logprobs, but the rollouts have "
        "none. Give every Rollout its reference_logprobs; policy.score(batch) computes "
        "log-probs under a model.",
        error=RolloutError,
    ),
)
