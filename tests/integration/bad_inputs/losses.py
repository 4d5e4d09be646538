"""Losses with arguments that are not allowed, on batches that they cannot be computed on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from steps import forked_batch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Rollout, RolloutBatch, losses
from forkpoint.errors import (
    ArgumentError,
    ConfigError,
    ForkpointError,
    RolloutError,
    UnsupportedError,
)
from forkpoint.losses import Loss

BATCH = forked_batch()


def loss_kind(
    name: str,
    call: Callable[[], object],
    argv: tuple[str, ...] = (),
    *,
    message: str,
    means: str,
    remedy: str,
    error: type[ForkpointError] = ConfigError,
) -> Kind:
    return Kind(
        name=name, error=error, message=message, means=means, remedy=remedy, call=call, argv=argv
    )


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


def nothing(outputs: Any, batch: Any) -> Any:
    summed(outputs, batch)


def learned(outputs: Any, batch: Any) -> Any:
    return torch.ones(2, requires_grad=True).sum() * batch.total(outputs.logprobs, "token")


def detached(outputs: Any, batch: Any) -> Any:
    return outputs.logprobs.detach().sum()


def bonus(outputs: Any, batch: Any) -> Any:
    return -(outputs.logprobs + 0.01 * outputs.entropies).sum()


def ratio(outputs: Any, batch: Any) -> Any:
    return -(outputs.logprobs - batch.old_logprobs).exp().sum()


WITHOUT = RolloutBatch([Rollout([1, 2, n], [0, 0, 1], n) for n in range(2)])
WEIGHTED = RolloutBatch(
    [
        Rollout([1, 2, n], [0, 0, 1], n, reference_logprobs=[0, 0, -1], weights=2.0, group_id="g")
        for n in range(2)
    ]
)

LOSSES = (
    loss_kind(
        "An argument without its name",
        lambda: losses.GRPO(0.2),  # type: ignore[misc]
        error=ArgumentError,
        message="GRPO takes arguments by name, and got 0.2 without one. Write GRPO(name=value); "
        "its names are kl, kl_estimator, entropy, normalize, clip, clip_high, dual_clip.",
        means="A number alone does not say whether it is a clip or a coefficient.",
        remedy="losses.GRPO(clip=0.2).",
    ),
    loss_kind(
        "A function that reads entropies and does not ask for them",
        trained(bonus),
        message="the loss bonus reads outputs.entropies, which is None because it does not ask for "
        "them. Give losses.FunctionLoss(function, needs_entropy=True), or set needs_entropy = True "
        "in its class.",
        means="Entropies take time, so they are computed for losses that ask for them.",
        remedy="losses.FunctionLoss(function, needs_entropy=True).",
    ),
    loss_kind(
        "A function that reads what the rollouts do not have",
        trained(ratio, WITHOUT),
        message="the loss ratio reads batch.old_logprobs, which is None because the rollouts have "
        "none. Give every Rollout its old_logprobs; policy.score(batch) computes log-probs under a "
        "model.",
        means="Fields of a batch are None where no rollout has them.",
        remedy="Give the rollouts old_logprobs, or let the function do without them.",
    ),
    loss_kind(
        "An argument of TRL or verl",
        lambda: losses.GRPO(epsilon=0.2, loss_agg_mode="seq-mean-token-mean"),  # type: ignore[call-arg]
        message="GRPO has no argument epsilon: give clip=0.2. GRPO has no "
        "argument loss_agg_mode: give normalize='rollout'.",
        means="The names and values of other libraries are known, and not taken: some of the same "
        "name have another meaning.",
        remedy="Give what the message names; docs/losses.md has the table.",
        error=ArgumentError,
    ),
    loss_kind(
        "An argument whose number has another meaning",
        lambda: losses.CISPO(epsilon_high=5.0),  # type: ignore[call-arg]
        message="CISPO has no argument epsilon_high: TRL's cispo bounds weights by it, and "
        "clip_high is added to 1; give epsilon_high - 1 as clip_high.",
        means="The number would be taken for another one.",
        remedy="Give the converted number.",
        error=ArgumentError,
    ),
    loss_kind(
        "An argument that no loss has",
        lambda: losses.DPO(bata=0.2),  # type: ignore[call-arg]
        message="DPO has no argument bata; it takes beta, variant, label_smoothing, "
        "length_normalized. Perhaps beta is meant.",
        means="It would be ignored.",
        remedy="Take one of those that are named.",
        error=ArgumentError,
    ),
    Kind(
        name="An option whose name another loss has",
        error=ArgumentError,
        message="GRPO has no argument beta: give kl=0.04.",
        means="TRL's beta of GRPO is the coefficient of the KL divergence.",
        remedy="Give kl, or take dpo if that is the loss.",
        argv=("replay", "ok.jsonl", "--model", "ok.json", "--loss", "grpo,beta=0.04"),
    ),
    loss_kind(
        "A clip below 0",
        lambda: losses.GRPO(clip=-0.1),
        message="clip is -0.1; it takes a number of at least 0.",
        means="It is how far the ratio may leave 1.",
        remedy="0.2 is the usual value; math.inf does not clip.",
    ),
    loss_kind(
        "A dual clip of at most 1",
        lambda: losses.GRPO(dual_clip=1),
        message="dual_clip is 1; it takes a number above 1, such as 3, or None. At 1 no token of a "
        "negative advantage would be trained on-policy.",
        means="On-policy the ratio is 1, which would be clipped already.",
        remedy="Give 3, say, or None.",
    ),
    loss_kind(
        "An infinite KL coefficient",
        lambda: losses.GRPO(kl=float("inf")),
        message="kl is inf; it takes a finite number of at least 0.",
        means="It would reach every gradient.",
        remedy="Give a number; 0 leaves the term out.",
    ),
    loss_kind(
        "A KL estimator that there is none of",
        lambda: losses.GRPO(kl_estimator="k4"),  # type: ignore[arg-type]
        message="kl_estimator is 'k4'; allowed are 'k1', 'k2', 'k3'.",
        means="docs/losses.md has the formulas of the three.",
        remedy="Leave it out for k3.",
    ),
    loss_kind(
        "A normalisation that there is none of",
        lambda: losses.GRPO(normalize="mean"),  # type: ignore[arg-type]
        message="normalize is 'mean'; allowed are 'token', 'rollout'.",
        means="It says what the sum over tokens is divided by.",
        remedy='"token" is the mean over tokens, "rollout" that of rollouts\' means.',
    ),
    loss_kind(
        "No length to divide by",
        lambda: losses.DrGRPO(max_tokens=0),
        message="max_tokens is 0; it takes a finite number above 0.",
        means="Dr. GRPO divides by a constant.",
        remedy="Give the most tokens that a response may have.",
    ),
    loss_kind(
        "A beta of 0",
        lambda: losses.DPO(beta=0),
        message="beta is 0; it takes a finite number above 0.",
        means="The loss would not depend on the model.",
        remedy="0.1 is the usual value.",
    ),
    loss_kind(
        "A label smoothing of a half",
        lambda: losses.DPO(label_smoothing=0.5),
        message="label_smoothing is 0.5; it takes a number below 0.5. At 0.5 a pair says nothing, "
        "above it the other rollout is preferred.",
        means="It is the chance that the labels of a pair are exchanged.",
        remedy="Give less, or exchange the advantages.",
    ),
    loss_kind(
        "A label smoothing that has no use",
        lambda: losses.DPO(variant="ipo", label_smoothing=0.1),
        message="label_smoothing is 0.1, but the variant 'ipo' has none; allowed are 'sigmoid' and "
        "'robust', or a label_smoothing of 0.",
        means="It would be ignored.",
        remedy="Leave it out, or take another variant.",
    ),
    loss_kind(
        "A class in place of a loss",
        trained(losses.GRPO),
        message="The loss is the class GRPO; pass an instance, GRPO().",
        means="A class has no arguments yet.",
        remedy="losses.GRPO(), with brackets.",
    ),
    loss_kind(
        "A name in place of a loss",
        trained("grpo"),
        message="The loss is 'grpo' of type str; it takes a forkpoint.losses.Loss or a function of "
        "(outputs, batch). A loss that declares its decomposition subclasses Loss.",
        means="In Python losses are objects; names are for the command line.",
        remedy="forkpoint.losses.GRPO().",
    ),
    loss_kind(
        "A loss that does not say how it decomposes",
        trained(Undeclared()),
        message="decomposition is None; allowed are 'token', 'rollout', 'joint'.",
        means="Without it the engine cannot know which tokens the loss must see together.",
        remedy='decomposition = "joint" is always right, if not always fastest.',
    ),
    loss_kind(
        "A loss that declares rollouts to be zero by something else than an array",
        trained(Loose()),
        message="zero_rollouts of the loss Loose() returned False; it must return a numpy array of "
        "bool, one entry for each of the 12 rollouts.",
        means="It would not be known which rollouts can be left out.",
        remedy="batch.where_all_trained(batch.advantages == 0), say; or do not define it.",
    ),
    loss_kind(
        "A loss that needs what rollouts do not have",
        trained(Needy()),
        message="needs is 'rewards'; allowed are 'old_logprobs', 'reference_logprobs', 'weights', "
        "'returns', 'old_values'.",
        means="needs names fields of a batch that may be missing.",
        remedy="Carry other values in the advantages, or in a table by batch.rollout_ids.",
    ),
    loss_kind(
        "A loss that returns a vector",
        trained(vector),
        message="the loss vector returned torch.float64 of shape (184,); it must return a "
        "floating-point scalar tensor, computed from outputs.logprobs.",
        means="A step has one number to differentiate.",
        remedy="Sum, and divide by a count of batch.denominators.",
    ),
    loss_kind(
        "A loss that returns nothing",
        trained(nothing),
        message="the loss nothing returned None; it must return a floating-point scalar tensor, "
        "computed from outputs.logprobs.",
        means="Its return statement is missing.",
        remedy="Return the scalar; forkpoint calls backward.",
    ),
    loss_kind(
        "A loss without a graph",
        trained(detached),
        message="the loss detached returned a scalar without a graph, so that nothing would be "
        "trained; it must be computed from outputs.logprobs, without detach(), item() or "
        "torch.no_grad().",
        means="Every gradient would be 0, and training would go on without learning.",
        remedy="Compute it from outputs.logprobs themselves; detach only the other side of a "
        "ratio.",
    ),
    loss_kind(
        "A loss that reads another trainable tensor",
        trained(learned),
        message="the loss reads a trainable tensor of shape (2,) and dtype torch.float32, which is "
        "none of the model's outputs. Compute such a loss from policy.logprobs() and call "
        "backward(), or detach the tensor.",
        means="A step computes gradients by the model's outputs; the tensor would get none.",
        remedy="policy.logprobs gives log-probs with a graph, for ordinary autograd.",
        error=UnsupportedError,
    ),
    loss_kind(
        "Reference log-probs that are missing",
        trained(losses.GRPO(kl=0.1), RolloutBatch([Rollout([1, 2], [0, 1], 1.0)])),
        message="GRPO(kl=0.1, kl_estimator='k3', entropy=0.0, normalize='token', clip=0.2, "
        "clip_high=None, dual_clip=None) needs reference_logprobs, but the rollouts have "
        "none. Give every Rollout its reference_logprobs; policy.score(batch) computes "
        "log-probs under a model.",
        means="The loss compares the model with a reference.",
        remedy="Score the batch under the reference model, and make the rollouts anew with "
        "reference_logprobs.",
        error=RolloutError,
    ),
    Kind(
        name="Reference log-probs that are missing from a file",
        error=RolloutError,
        message="DPO(beta=0.1, variant='sigmoid', label_smoothing=0.0, length_normalized=False) "
        "needs reference_logprobs, but the rollouts have none. Give every Rollout its "
        "reference_logprobs; policy.score(batch) computes log-probs under a model.",
        means="DPO compares the model with a reference.",
        remedy="Add reference_logprobs to every line.",
        argv=("replay", "ok.jsonl", "--model", "ok.json", "--loss", "dpo"),
    ),
    loss_kind(
        "Weights that have no use",
        trained(losses.DPO(), WEIGHTED),
        message="The rollouts have weights, for which DPO has no use. Leave weights out, or take a "
        "loss that multiplies its terms by them, such as GRPO.",
        means="They would be ignored.",
        remedy="Make the rollouts without weights.",
        error=RolloutError,
    ),
    loss_kind(
        "A pair of three",
        trained(losses.DPO(), pair({"advantage": 1}, {"advantage": 0}, {"advantage": 0})),
        message="Group g ('0', '1', '2'): DPO takes exactly two rollouts a group, the chosen and "
        "the rejected one, not 3. Give each pair a group_id of its own.",
        means="Which two of the group are a pair is not known.",
        remedy="Make a group of every pair, with a group_id of its own.",
        error=RolloutError,
    ),
    loss_kind(
        "A pair without a preference",
        trained(losses.DPO(), pair({"advantage": 0.5}, {"advantage": 0.5})),
        message="Group g ('0', '1') has the advantage 0.5 twice; of a pair's rollouts DPO chooses "
        "the one with the larger advantage. Give the chosen one 1, say, and the rejected "
        "one 0.",
        means="Neither is chosen.",
        remedy="Leave such pairs out, or give the chosen one more.",
        error=RolloutError,
    ),
    loss_kind(
        "A pair with nothing trained",
        trained(losses.DPO(), pair({"advantage": 1}, {"advantage": 0, "loss_mask": [0, 0, 0]})),
        message="Group g ('0', '1'): rollout '1' has no trained tokens; DPO compares two rollouts "
        "by one advantage each, at their trained tokens. Give the rollout a single "
        "advantage and train at least one token, or leave the pair out.",
        means="The log-prob of an empty response says nothing.",
        remedy="Train at least the end token of an empty response.",
        error=RolloutError,
    ),
    loss_kind(
        "Importance weights without old log-probs",
        lambda: losses.importance_weights(
            RolloutBatch([Rollout([1, 2], [0, 1], 1.0)]), np.zeros(2)
        ),
        message="importance_weights needs old_logprobs, but the rollouts have none. Give every "
        "Rollout its old_logprobs; policy.score(batch) computes them under the model to be "
        "trained.",
        means="They are ratios of the old policy to the sampler.",
        remedy="policy.score(batch).logprobs, before the first update, are the old log-probs.",
        error=RolloutError,
    ),
    loss_kind(
        "Sampler log-probs of another length",
        lambda: losses.importance_weights(BATCH, [0.0, -1.0, -2.0]),  # type: ignore[arg-type]
        message="sampler_logprobs has the shape (3,), and the batch has 184 tokens; it takes one "
        "number per token, of all rollouts one after another.",
        means="Entry i belongs to token i of the batch.",
        remedy="Concatenate those of all rollouts, prompts included.",
        error=RolloutError,
    ),
    loss_kind(
        "Probabilities in place of the sampler's log-probs",
        lambda: losses.importance_weights(
            RolloutBatch([Rollout([1, 2], [0, 1], 1.0, [0, -1.5])]), [1.0, 0.25]
        ),
        message="Rollout '0': sampler_logprobs is 0.25 at its token 1, and old_logprobs is -1.5; "
        "the logarithm of a probability is at most 0, and rounding to 16 bits adds at most 0.125. "
        "Give log-probs rather than probabilities or their negatives.",
        means="Every ratio would be too small, and almost nothing would be trained.",
        remedy="Give the logarithms of the probabilities.",
        error=RolloutError,
    ),
    loss_kind(
        "A floor above the cap",
        lambda: losses.importance_weights(BATCH, BATCH.old_logprobs, cap=0.5, floor=0.6),  # type: ignore[arg-type]
        message="floor is 0.6 and cap is 0.5; floor is at most cap.",
        means="No ratio lies between them.",
        remedy="Exchange them, or leave floor out.",
    ),
)
