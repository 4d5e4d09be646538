"""Losses with arguments that are not allowed, on batches that they cannot be computed on."""

from collections.abc import Callable
from typing import Any

from steps import forked_batch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Rollout, RolloutBatch, losses
from forkpoint.errors import (
    ConfigError,
    ForkpointError,
    RolloutError,
)
from forkpoint.losses import Loss

BATCH = forked_batch()


def loss_kind(
    name: str,
    call: Callable[[], object],
    argv: tuple[str, ...] = (),
    *,
    message: str,
    error: type[ForkpointError] = ConfigError,
) -> Kind:
    return Kind(name=name, error=error, message=message, call=call, argv=argv)


def trained(loss: Any, batch: RolloutBatch = BATCH) -> Callable[[], object]:
    return lambda: policy().forward_backward(batch, loss)


def pair(*rollouts: dict[str, Any]) -> RolloutBatch:
    """The rollouts of one group, with reference log-probs."""
    fields = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "reference_logprobs": [0, -1, -1]}
    return RolloutBatch([Rollout(**{**fields, **r}, group_id="g") for r in rollouts])


class Undeclared(Loss):
    """A loss that does not say how it decomposes."""


class Needy(Loss):
    """A loss that needs what no rollout has."""

    decomposition = "token"
    needs = ("rewards",)


class Loose(Loss):
    """A loss whose declaration is no array."""

    decomposition = "token"

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return outputs.logprobs.sum()

    def zero_rollouts(self, batch: RolloutBatch) -> Any:
        return False

    def __repr__(self) -> str:
        return "Loose()"


def summed(outputs: Any, batch: Any) -> Any:
    return outputs.logprobs.sum()


def vector(outputs: Any, batch: Any) -> Any:
    return outputs.logprobs


def detached(outputs: Any, batch: Any) -> Any:
    return outputs.logprobs.detach().sum()


def bonus(outputs: Any, batch: Any) -> Any:
    return -(outputs.logprobs + 0.01 * outputs.entropies).sum()


def ratio(outputs: Any, batch: Any) -> Any:
    return -(outputs.logprobs - batch.old_logprobs).exp().sum()


WEIGHTED = RolloutBatch(
    [
        Rollout([1, 2, n], [0, 0, 1], n, reference_logprobs=[0, 0, -1], weights=2.0, group_id="g")
        for n in range(2)
    ]
)

LOSSES = (
    loss_kind(
        "A class in place of a loss",
        trained(losses.GRPO),
        message="The loss is the class GRPO; pass an instance, GRPO().",
    ),
    loss_kind(
        "A name in place of a loss",
        trained("grpo"),
        message="The loss is 'grpo' of type str; it takes a forkpoint.losses.Loss or a function",
    ),
    loss_kind(
        "A loss that does not say how it decomposes",
        trained(Undeclared()),
        message="decomposition is None; allowed are 'token', 'rollout', 'joint'.",
    ),
    loss_kind(
        "A loss that declares rollouts to be zero by something else than an array",
        trained(Loose()),
        message="zero_rollouts of the loss Loose() returned False;",
    ),
    loss_kind(
        "A loss that needs what rollouts do not have",
        trained(Needy()),
        message="needs is 'rewards'; allowed are 'old_logprobs', 'reference_logprobs', 'weights',",
    ),
    loss_kind(
        "A loss that returns a vector",
        trained(vector),
        message="the loss vector returned torch.float64 of shape (184,);",
    ),
    loss_kind(
        "A loss without a graph",
        trained(detached),
        message="the loss detached returned a scalar without a graph, so that nothing would be "
        "trained; it must be computed from outputs.logprobs, without detach(), item() or "
        "torch.no_grad().",
    ),
    loss_kind(
        "Reference log-probs that are missing",
        trained(losses.GRPO(kl=0.1), RolloutBatch([Rollout([1, 2], [0, 1], 1.0)])),
        message="GRPO(kl=0.1, kl_estimator='k3', entropy=0.0, normalize='token', clip=0.2, "
        "clip_high=None, dual_clip=None) needs reference_logprobs, but the rollouts have "
        "none. Give every Rollout its reference_logprobs; policy.score(batch) computes "
        "log-probs under a model.",
        error=RolloutError,
    ),
    loss_kind(
        "Weights that have no use",
        trained(losses.DPO(), WEIGHTED),
        message="The rollouts have weights, which DPO does not use.",
        error=RolloutError,
    ),
    loss_kind(
        "A pair of three",
        trained(losses.DPO(), pair({"advantage": 1}, {"advantage": 0}, {"advantage": 0})),
        message="Group g ('0', '1', '2'): DPO takes exactly two rollouts a group, the chosen and",
        error=RolloutError,
    ),
    loss_kind(
        "A pair without a preference",
        trained(losses.DPO(), pair({"advantage": 0.5}, {"advantage": 0.5})),
        message="Group g ('0', '1') has the advantage 0.5 twice;",
        error=RolloutError,
    ),
)
