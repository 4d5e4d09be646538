"""The batches of the acceptance test: between them, every shape that sharing can take.

Group `alpha` is a tree three forks deep below its root, with a rollout that is a prefix of another,
two identical ones, one of a single token, one without trained tokens, and two at a temperature of
their own, one of which has the tokens of the identical ones. Group `beta` begins as `alpha` does;
`gamma` is one rollout that shares nothing. Tokens are trained inside shared segments, each owner
with its own mask, advantage and old log-prob.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
from torch import Tensor

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.config import Boundary, Sharing
from forkpoint.losses import DPO, GRPO, GSPO, LogLikelihood, LossBatch, LossOutputs
from forkpoint.losses.base import Loss

WARM = 0.7
TIGHT, CHAIN = 24, 8
"""Tokens a row: the longest rollout fits and no tree does; not even a shared prompt does."""

SHARINGS: tuple[Sharing, ...] = ("none", "group", "tree")
BOUNDARIES: tuple[Boundary, ...] = ("within", "across", "mixed")
EVERY = tuple(Config(sharing=s, boundary=b) for s, b in product(SHARINGS, BOUNDARIES))
"""Each sharing with each boundary."""

OPENING = (1, 7, 22)
PROMPT_A = (*OPENING, 30, 4, 18, 51, 9, 33, 2, 45, 12)
PROMPT_B = (*OPENING, 8, 16, 40)
LEFT, LEFT_UP, LEFT_UP_A, LEFT_UP_B = (5, 37, 14, 20), (28, 6, 49), (11, 58), (43, 3, 25, 10)
LEFT_DOWN, RIGHT, RIGHT_UP, RIGHT_DOWN = (50, 19), (31, 27, 46, 13, 21), (44,), (36, 60, 17)

PATHS = {
    "deep-a": (PROMPT_A, LEFT, LEFT_UP, LEFT_UP_A),
    "deep-b": (PROMPT_A, LEFT, LEFT_UP, LEFT_UP_B),
    "prefix": (PROMPT_A, LEFT, LEFT_UP[:2]),
    "twin-0": (PROMPT_A, LEFT, LEFT_DOWN),
    "twin-1": (PROMPT_A, LEFT, LEFT_DOWN),
    "right": (PROMPT_A, RIGHT, RIGHT_UP),
    "masked": (PROMPT_A, RIGHT, RIGHT_DOWN),
    "token": (PROMPT_A[:1],),
    "warm-0": (PROMPT_A, LEFT, LEFT_DOWN),
    "warm-1": (PROMPT_A, LEFT, LEFT_UP),
    "beta-0": (PROMPT_B, (53, 24, 15), (34, 29)),
    "beta-1": (PROMPT_B, (53, 24, 15), (55,)),
    "beta-2": (PROMPT_B, (23,)),
    "gamma": ((2, 47, 39, 26), (42, 59, 32)),
}
PAIRS = (
    ("deep-a", "twin-0"),
    ("prefix", "deep-b"),
    ("right", "twin-1"),
    ("warm-1", "warm-0"),
    ("beta-0", "beta-1"),
    ("gamma", "beta-2"),
)
"""Chosen and rejected."""


def acceptance_batch() -> RolloutBatch:
    """The batch without log-probs: 14 rollouts, 3 groups."""
    rng = np.random.default_rng(5)
    rollouts = []
    for position, (name, parts) in enumerate(PATHS.items()):
        tokens = [token for part in parts for token in part]
        mask = np.arange(len(tokens)) >= len(parts[0])
        if name == "masked":
            mask[:] = False
        if name == "deep-b":  # a tool result to this rollout, sampled tokens to the others
            mask[len(PROMPT_A) + 1 : len(PROMPT_A) + 3] = False
        if name == "gamma":  # trained from its first edge on
            mask = np.arange(len(tokens)) >= 1
        advantage = rng.normal(size=len(tokens)) if position % 3 == 0 else float(rng.normal())
        rollouts.append(
            Rollout(
                tokens,
                mask,
                advantage,
                temperature=WARM if name.startswith("warm") else 1.0,
                group_id=name.split("-")[0] if name[:4] in ("beta", "gamm") else "alpha",
                rollout_id=name,
            )
        )
    return RolloutBatch(rollouts)


def paired_batch() -> RolloutBatch:
    """The rollouts that train anything as pairs of a chosen and a rejected one, for DPO."""
    given = {rollout.rollout_id: rollout for rollout in acceptance_batch()}
    return RolloutBatch(
        Rollout(
            given[name].token_ids,
            given[name].loss_mask,
            advantage,
            temperature=given[name].temperature,
            group_id=f"pair-{pair}",
            rollout_id=name,
        )
        for pair, names in enumerate(PAIRS)
        for name, advantage in zip(names, (1.0, 0.0), strict=True)
    )


def with_logprobs(
    batch: RolloutBatch, logprobs_T: Tensor, *, weighted: bool = False
) -> RolloutBatch:
    """The batch with old and reference log-probs scattered around a model's own.

    Owners of one shared token get different ones, and some ratios lie outside a clip of 0.2. With
    `weighted` every token has a weight too.
    """
    rng = np.random.default_rng(6)
    own = logprobs_T.detach().cpu().double().numpy()
    old, reference = (np.minimum(own + rng.normal(size=own.shape) * 0.2, 0) for _ in range(2))
    return RolloutBatch(
        Rollout(
            rollout.token_ids,
            rollout.loss_mask,
            rollout.advantage,
            old_logprobs=old[begin:end],
            reference_logprobs=reference[begin:end],
            weights=rng.uniform(0.5, 2.0, end - begin) if weighted else None,
            temperature=rollout.temperature,
            group_id=rollout.group_id,
            rollout_id=rollout.rollout_id,
        )
        for rollout, begin, end in zip(batch, batch.offsets, batch.offsets[1:], strict=False)
    )


def coupled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """A plain callable whose value and gradient depend on every trained token at once."""
    means_n = batch.rollout_mean(outputs.logprobs * batch.advantages)
    return means_n.logsumexp(0) + 0.1 * outputs.logprobs.sum() ** 2 / batch.denominators.tokens


class SureRollouts(Loss):
    """A rollout-additive loss of log-probs and entropies, to which untrained rollouts add too."""

    decomposition = "rollout"
    needs_entropy = True

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert outputs.entropies is not None
        sureness_n = batch.rollout_mean(-outputs.entropies).exp()
        likelihood_n = batch.rollout_mean(outputs.logprobs).exp()
        return (sureness_n * (1 + likelihood_n)).sum() / batch.denominators.rollouts


class CoupledEntropies(Loss):
    """A joint loss that differentiates the entropies too."""

    decomposition = "joint"
    needs_entropy = True

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert outputs.entropies is not None
        entropies_n = batch.rollout_mean(outputs.entropies)
        return coupled(outputs, batch) + (entropies_n * entropies_n.roll(1)).sum()


class EntropyGRPO(GRPO):
    """GRPO with a bonus for entropy: token-additive, and it differentiates the entropies."""

    needs_entropy = True

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert outputs.entropies is not None
        bonus = batch.total(outputs.entropies, "token")
        return super().__call__(outputs, batch) - 0.1 * bonus


LOSSES: dict[str, Loss | Callable[[LossOutputs, LossBatch], Tensor]] = {
    "grpo": GRPO(clip=0.2, clip_high=0.28, kl=0.05),
    "likelihood": LogLikelihood(normalize="rollout"),
    "entropy": EntropyGRPO(clip=0.2, kl=0.05, normalize="rollout"),
    "gspo": GSPO(clip=0.05, clip_high=0.06),
    "dpo": DPO(beta=0.3),
    "coupled": coupled,
    "rollout_entropy": SureRollouts(),
    "coupled_entropy": CoupledEntropies(),
}
