"""Every option of every loss where it binds: numbers by hand from the published definitions.

The expected numbers are written out, defaults too, and are not read from the loss. An option that
is ignored, or a default that is another number than is documented, fails here.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from losses_by_loops import evaluate, make_view

from forkpoint.errors import ConfigError
from forkpoint.losses import (
    BNPO,
    CISPO,
    DAPO,
    DPO,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    SFT,
    Denominators,
    Distillation,
    DrGRPO,
    LogLikelihood,
    Loss,
    LossBatch,
    SimPO,
    ValueLoss,
    as_loss,
    gae,
    importance_weights,
)
from forkpoint.losses.outputs import Head
from forkpoint.rollouts.batch import Rollout, RolloutBatch

LOGPROB = -8.0
"""Of every token under the policy, where a test does not say otherwise: small enough for old
log-probs of any ratio here to be below 0."""
INF = math.inf


def rollout(tokens: int, advantage: float = 1.0, **fields: object) -> Rollout:
    """One untrained token, then `tokens` trained ones."""
    ids, mask = [0] * (tokens + 1), [0] + [1] * tokens
    return Rollout(ids, mask, advantage, **fields)  # type: ignore[arg-type]


def value_and_gradients(
    loss: Loss, rollouts: Sequence[Rollout], outputs: Sequence[float] | float = LOGPROB
) -> tuple[float, list[float]]:
    """The loss, and its gradient by the output of each trained token."""
    batch = RolloutBatch(rollouts)
    loss.check(batch)
    values_T = torch.zeros(len(batch.token_ids), dtype=torch.float64)
    values_T[torch.tensor(batch.loss_mask)] = torch.tensor(outputs, dtype=torch.float64)
    value, grad_T = evaluate(loss, batch, values_T.requires_grad_())
    return float(value), grad_T[torch.tensor(batch.loss_mask)].tolist()


def of_ratio(loss: Loss, ratio: float, advantage: float = 1.0) -> tuple[float, float]:
    """The objective of one token of that ratio, and its gradient by the token's log-prob."""
    one = rollout(1, advantage, old_logprobs=[0, LOGPROB - math.log(ratio)])
    value, (gradient,) = value_and_gradients(loss, [one])
    return -value, -gradient


# PPO, arXiv 1707.06347, eq. 7: min(r A, clip(r, 1 - e, 1 + e) A). Where the clip is taken the
# gradient ends, elsewhere it is that of r A: r A. (GRPO, arXiv 2402.03300, eq. 3; DAPO, arXiv
# 2503.14476, eq. 8, with a larger upper bound; dual clip, arXiv 1912.09729, eq. 5.)

GRPO_LIKE = [GRPO(), PPO(), BNPO()]
CLIPPED = [
    # loss, ratio, advantage, ratio that counts, whether the gradient has ended
    *((loss, 1.19, 2.0, 1.19, False) for loss in GRPO_LIKE),
    *((loss, 1.21, 2.0, 1.2, True) for loss in GRPO_LIKE),
    *((loss, 0.81, -2.0, 0.81, False) for loss in GRPO_LIKE),
    *((loss, 0.79, -2.0, 0.8, True) for loss in GRPO_LIKE),
    *((loss, 0.1, 2.0, 0.1, False) for loss in GRPO_LIKE),
    *((loss, 9.0, -2.0, 9.0, False) for loss in GRPO_LIKE),
    (GRPO(clip=0.3), 1.29, 2.0, 1.29, False),
    (GRPO(clip=0.3), 1.31, 2.0, 1.3, True),
    (GRPO(clip=0.3), 0.69, -2.0, 0.7, True),
    (GRPO(clip=0.3, clip_high=0.5), 1.49, 2.0, 1.49, False),
    (GRPO(clip=0.3, clip_high=0.5), 1.51, 2.0, 1.5, True),
    (GRPO(clip=0.3, clip_high=0.5), 0.69, -2.0, 0.7, True),
    (GRPO(clip=INF), 40.0, 2.0, 40.0, False),
    (GRPO(clip=INF), 0.01, -2.0, 0.01, False),
    (DAPO(), 1.27, 2.0, 1.27, False),
    (DAPO(), 1.29, 2.0, 1.28, True),
    (DAPO(), 0.79, -2.0, 0.8, True),
    (DAPO(clip=0.1, clip_high=0.4), 1.41, 2.0, 1.4, True),
    (DAPO(clip=0.1, clip_high=0.4), 0.89, -2.0, 0.9, True),
    # Dual clip bounds the ratio of negative advantages alone.
    (GRPO(dual_clip=3.0), 2.99, -2.0, 2.99, False),
    (GRPO(dual_clip=3.0), 3.01, -2.0, 3.0, True),
    (GRPO(dual_clip=5.0), 3.01, -2.0, 3.01, False),
    (GRPO(dual_clip=5.0), 5.01, -2.0, 5.0, True),
    (GRPO(dual_clip=3.0, clip=INF), 8.0, 2.0, 8.0, False),
    (GRPO(dual_clip=3.0), 0.79, -2.0, 0.8, True),
    (GRPO(), 30.0, -2.0, 30.0, False),
]


@pytest.mark.parametrize(("loss", "ratio", "advantage", "counts", "ended"), CLIPPED, ids=str)
def test_clips_of_the_surrogate(
    loss: Loss, ratio: float, advantage: float, counts: float, ended: bool
) -> None:
    objective, gradient = of_ratio(loss, ratio, advantage)
    assert objective == pytest.approx(counts * advantage)
    assert gradient == pytest.approx(0.0 if ended else ratio * advantage)


# CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: sg(clip(r, 1 - e_low, 1 + e_high)) A log-prob.
# The weight has no gradient, and the gradient does not end. The paper leaves the lower side out.


@pytest.mark.parametrize(
    ("loss", "ratio", "weight"),
    [
        (CISPO(), 4.9, 4.9),
        (CISPO(), 5.1, 5.0),
        (CISPO(), 1000.0, 5.0),
        (CISPO(), 0.001, 0.001),
        (CISPO(clip_high=4.0), 5.5, 5.0),
        (CISPO(clip_high=5.0), 5.5, 5.5),
        (CISPO(clip_high=5.0), 6.5, 6.0),
        (CISPO(clip_high=0.28), 1.27, 1.27),
        (CISPO(clip_high=0.28), 1.3, 1.28),
        (CISPO(clip_high=INF), 1000.0, 1000.0),
        (CISPO(clip=0.2), 0.79, 0.8),
        (CISPO(clip=0.2), 0.81, 0.81),
        (CISPO(clip=0.2), 5.1, 5.0),
        (CISPO(clip=0.2, clip_high=None), 1.21, 1.2),
        (CISPO(clip=0.3, clip_high=None), 1.21, 1.21),
        (CISPO(clip_high=None), 1000.0, 1000.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_clips_of_cispo(loss: Loss, ratio: float, weight: float, advantage: float) -> None:
    objective, gradient = of_ratio(loss, ratio, advantage)
    assert objective == pytest.approx(weight * advantage * LOGPROB)
    assert gradient == pytest.approx(weight * advantage)


# SAPO, arXiv 2511.20347, eq. 5: 4 / tau sigmoid(tau (r - 1)) A, tau by the sign of A.


@pytest.mark.parametrize(
    ("loss", "advantage", "tau"),
    [
        (SAPO(), 2.0, 1.0),
        (SAPO(), -2.0, 1.05),
        (SAPO(tau_pos=0.5), 2.0, 0.5),
        (SAPO(tau_pos=0.5), -2.0, 1.05),
        (SAPO(tau_neg=3.0), 2.0, 1.0),
        (SAPO(tau_neg=3.0), -2.0, 3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
def test_temperatures_of_sapo(loss: Loss, advantage: float, tau: float, ratio: float) -> None:
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    objective, gradient = of_ratio(loss, ratio, advantage)
    assert objective == pytest.approx(4 / tau * gate * advantage)
    # Eq. 6 and 7 there: the weight is 4 p (1 - p) r, which is 1 at a ratio of 1.
    assert gradient == pytest.approx(4 * gate * (1 - gate) * ratio * advantage)


# GSPO, arXiv 2507.18071, eq. 5 and 7: s is the geometric mean of the rollout's ratios, clipped by
# 3e-4 and 4e-4 (section 5.1).


@pytest.mark.parametrize(
    ("loss", "mean", "advantage", "counts", "ended"),
    [
        (GSPO(), 1.00039, 2.0, 1.00039, False),
        (GSPO(), 1.00041, 2.0, 1.0004, True),
        (GSPO(), 0.99971, -2.0, 0.99971, False),
        (GSPO(), 0.99969, -2.0, 0.9997, True),
        (GSPO(clip=0.1), 0.91, -2.0, 0.91, False),
        (GSPO(clip=0.1), 0.89, -2.0, 0.9, True),
        (GSPO(clip_high=0.2), 1.19, 2.0, 1.19, False),
        (GSPO(clip_high=0.2), 1.21, 2.0, 1.2, True),
        (GSPO(clip=0.1, clip_high=None), 1.11, 2.0, 1.1, True),
        (GSPO(clip=0.1, clip_high=None), 1.09, 2.0, 1.09, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_clips_of_gspo(
    loss: GSPO, mean: float, advantage: float, counts: float, ended: bool, level: str
) -> None:
    loss = GSPO(clip=loss.clip, clip_high=loss.clip_high, level=level)  # type: ignore[arg-type]
    apart = np.array([0.4, -0.1, -0.3])  # log-ratios about their mean, beyond any clip themselves
    old = [0, *(LOGPROB - math.log(mean) - apart)]
    value, gradients = value_and_gradients(loss, [rollout(3, advantage, old_logprobs=old)])
    assert -value == pytest.approx(counts * advantage)
    # Each token's share of the mean over the rollout.
    assert gradients == pytest.approx([0.0 if ended else -mean * advantage / 3] * 3)


def test_levels_of_gspo() -> None:
    """Eq. 13 and 14: with "token" each token has its own advantage; "sequence" takes their mean."""
    own = Rollout([0] * 3, [0, 1, 1], [0.0, 1.0, 4.0], old_logprobs=[0, LOGPROB, LOGPROB])
    assert value_and_gradients(GSPO(), [own])[1] == pytest.approx([-2.5 / 2] * 2)
    assert value_and_gradients(GSPO(level="token"), [own])[1] == pytest.approx([-1 / 2, -4 / 2])


# GMPO, arXiv 2507.20673, algorithm 1: log-ratios are bounded by 0.4 before their mean is taken.


@pytest.mark.parametrize(
    ("loss", "advantage", "bounded"),
    [
        (GMPO(), 2.0, [0.4, -0.5]),
        (GMPO(), -2.0, [0.5, -0.4]),
        (GMPO(clip=0.1), 2.0, [0.1, -0.5]),
        (GMPO(clip=0.1, clip_high=0.6), 2.0, [0.5, -0.5]),
        (GMPO(clip=0.1, clip_high=0.6), -2.0, [0.5, -0.1]),
    ],
    ids=str,
)
def test_clips_of_gmpo(loss: GMPO, advantage: float, bounded: list[float]) -> None:
    """Each sign has one bound; a token beyond it has no gradient, the other one keeps its own."""
    log_ratios = [0.5, -0.5]
    old = [0, *(LOGPROB - log_ratio for log_ratio in log_ratios)]
    value, gradients = value_and_gradients(loss, [rollout(2, advantage, old_logprobs=old)])
    wanted = math.exp(sum(bounded) / 2) * advantage
    assert -value == pytest.approx(wanted)
    assert gradients == pytest.approx(
        [-wanted / 2 if own == given else 0 for own, given in zip(bounded, log_ratios, strict=True)]
    )


# What policy losses have in common: KL (J. Schulman, 2020), entropy, weights, means.

POLICY = [GRPO, PPO, DAPO, BNPO, CISPO, SAPO, GSPO, GMPO]
X = 0.6  # reference less log-prob
ESTIMATES = {"k1": -X, "k2": X**2 / 2, "k3": math.exp(X) - X - 1}
SLOPES = {"k1": 1.0, "k2": -X, "k3": 1 - math.exp(X)}


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("kind", POLICY)
def test_the_kl_term(kind: type[Loss], estimator: str | None) -> None:
    """By k3 unless another is named, with the coefficient, and without the token's weight."""
    one = [rollout(1, 0.0, reference_logprobs=[0, LOGPROB + X], weights=[1, 5.0])]
    options = {} if estimator is None else {"kl_estimator": estimator}
    for coefficient in (0.25, 3.0):
        value, (gradient,) = value_and_gradients(kind(kl=coefficient, **options), one)  # type: ignore[call-arg]
        assert value == pytest.approx(coefficient * ESTIMATES[estimator or "k3"])
        assert gradient == pytest.approx(coefficient * SLOPES[estimator or "k3"])
    assert value_and_gradients(kind(**options), one) == (0.0, [0.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", POLICY)
def test_the_entropy_bonus(kind: type[Loss]) -> None:
    """The tests' entropies are logprob**2 + 0.3 logprob."""
    one = [rollout(1, 0.0, weights=[1, 5.0])]
    for coefficient in (0.25, 3.0):
        value, (gradient,) = value_and_gradients(kind(entropy=coefficient), one)  # type: ignore[call-arg]
        assert value == pytest.approx(-coefficient * (LOGPROB**2 + 0.3 * LOGPROB))
        assert gradient == pytest.approx(-coefficient * (2 * LOGPROB + 0.3))
    assert value_and_gradients(kind(), one) == (0.0, [0.0])


def uneven() -> list[Rollout]:
    """On-policy rollouts of one and of three trained tokens, and one without any."""
    return [rollout(1, -2.0), rollout(3, -3.0), Rollout([0, 0], [0, 0], 9.0)]


TOKEN = [2 / 4, *[3 / 4] * 3]
ROLLOUT = [2 / 3, *[3 / 3 / 3] * 3]
NORMALIZED = [
    *((loss, TOKEN) for loss in (GRPO(), PPO(), DAPO(), BNPO(), CISPO(), SAPO(normalize="token"))),
    *((kind(normalize="rollout"), ROLLOUT) for kind in (GRPO, PPO, CISPO)),
    *((loss, ROLLOUT) for loss in (SAPO(), GSPO(), GMPO())),
    (DrGRPO(max_tokens=5), [2 / 15, *[3 / 15] * 3]),
    (DrGRPO(max_tokens=8), [2 / 24, *[3 / 24] * 3]),
]


@pytest.mark.parametrize(("loss", "expected"), NORMALIZED, ids=str)
def test_means_of_policy_losses(loss: Loss, expected: list[float]) -> None:
    """DAPO's eq. 8 is over tokens, GRPO's eq. 3, SAPO's eq. 5 and GSPO's eq. 5 over rollouts and
    their tokens; Dr. GRPO's constant (arXiv 2503.20783) stands for a rollout's tokens."""
    assert value_and_gradients(loss, uneven())[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        *((loss, [-1 / 4] * 4) for loss in (SFT(), LogLikelihood(normalize="token"))),
        (LogLikelihood(normalize="rollout"), [-1 / 3, *[-1 / 9] * 3]),
        (LogLikelihood(normalize="none"), [-1.0] * 4),
    ],
    ids=str,
)
def test_means_of_log_likelihood(loss: Loss, expected: list[float]) -> None:
    value, gradients = value_and_gradients(loss, uneven())
    assert gradients == pytest.approx(expected)
    assert value == pytest.approx(LOGPROB * sum(expected))


def test_on_policy_without_old_logprobs() -> None:
    assert of_ratio(GRPO(), 1.0, 2.0) == pytest.approx((2.0, 2.0))
    assert value_and_gradients(GRPO(), [rollout(1, 2.0)]) == (-2.0, [-2.0])


@pytest.mark.parametrize("loss", [GRPO(clip=INF), CISPO(clip_high=INF), Distillation()], ids=str)
def test_log_ratios_count_as_at_most_20(loss: Loss) -> None:
    for log_ratio, counts in ((19.9, 19.9), (20.1, 20.0), (90.0, 20.0)):
        one = rollout(
            1, 1.0, old_logprobs=[0, -100.0], reference_logprobs=[0, -100.0 + log_ratio + 1]
        )
        value, _ = value_and_gradients(loss, [one], -100.0 + log_ratio)
        worth = -100.0 + log_ratio if isinstance(loss, CISPO) else 1.0
        assert -value == pytest.approx(math.exp(counts) * worth)
    # The KL term's exponential, of a reference far above the policy.
    for x, counts in ((19.9, 19.9), (20.1, 20.0), (90.0, 20.0)):
        far = rollout(1, 0.0, reference_logprobs=[0, -1.0])
        value, _ = value_and_gradients(GRPO(kl=1.0), [far], -1.0 - x)
        assert value == pytest.approx(math.exp(counts) - counts - 1)


# Distillation: reverse KL by the policy gradient with the advantage reference - logprob, forward KL
# by the teacher's own tokens.


@pytest.mark.parametrize(
    ("loss", "ratio", "counts", "ended"),
    [
        (Distillation(), 40.0, 40.0, False),
        (Distillation(direction="reverse"), 0.01, 0.01, False),
        (Distillation(clip=0.2), 1.19, 1.19, False),
        (Distillation(clip=0.2), 1.21, 1.2, True),
        (Distillation(clip=0.2, clip_high=0.5), 1.49, 1.49, False),
        (Distillation(clip=0.2, clip_high=0.5), 1.51, 1.5, True),
        (Distillation(clip_high=0.5), 1.51, 1.5, True),
    ],
    ids=str,
)
def test_clips_of_distillation(loss: Loss, ratio: float, counts: float, ended: bool) -> None:
    one = rollout(
        1,
        9.0,
        old_logprobs=[0, LOGPROB - math.log(ratio)],
        reference_logprobs=[0, LOGPROB + X],
        weights=[1, 2.0],
    )
    value, (gradient,) = value_and_gradients(loss, [one])
    assert value == pytest.approx(-2 * counts * X)
    assert gradient == pytest.approx(0.0 if ended else -2 * ratio * X)


def test_the_lower_clip_of_distillation() -> None:
    """It binds where the teacher finds the token less likely."""
    for clip, counts in ((0.2, 0.8), (0.4, 0.7)):
        one = rollout(
            1, old_logprobs=[0, LOGPROB - math.log(0.7)], reference_logprobs=[0, LOGPROB - X]
        )
        value, (gradient,) = value_and_gradients(Distillation(clip=clip), [one])
        assert value == pytest.approx(counts * X)
        assert gradient == pytest.approx(0.0 if counts == 0.8 else 0.7 * X)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (Distillation(direction="forward"), [-1 / 4] * 4),
        (Distillation(direction="forward", normalize="rollout"), [-1 / 3, *[-1 / 9] * 3]),
        (Distillation(), [-X / 4] * 4),
        (Distillation(normalize="rollout"), [-X / 3, *[-X / 9] * 3]),
    ],
    ids=str,
)
def test_directions_and_means_of_distillation(loss: Distillation, expected: list[float]) -> None:
    given = [
        rollout(1, reference_logprobs=[0, LOGPROB + X]),
        rollout(3, reference_logprobs=[0, *[LOGPROB + X] * 3]),
        Rollout([0, 0], [0, 0], 9.0, reference_logprobs=[0, 0]),
    ]
    value, gradients = value_and_gradients(loss, given)
    assert gradients == pytest.approx(expected)
    # Every token's term is X or -X; of three rollouts two have terms.
    share = 1.0 if loss.normalize == "token" else 2 / 3
    assert value == pytest.approx(X * share if loss.direction == "forward" else -X * share)


# DPO, arXiv 2305.18290, eq. 7, and its variants; SimPO, arXiv 2405.14734, eq. 6.

CHOSEN, REJECTED = [-0.3, -0.5], [-1.0, -0.2, -0.9, -0.4]
REFERENCES = [-0.6, -0.7], [-0.9, -0.5, -0.3, -0.3]
SUMS = sum(CHOSEN) - sum(REFERENCES[0]) - (sum(REJECTED) - sum(REFERENCES[1]))
MEANS = (sum(CHOSEN) - sum(REFERENCES[0])) / 2 - (sum(REJECTED) - sum(REFERENCES[1])) / 4


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def pair_value(loss: Loss, *, swapped: bool = False, far: float = 0.0) -> float:
    """Of one pair; `far` is added to the chosen rollout's first log-prob."""
    chosen = rollout(2, 1.0, reference_logprobs=[0, *REFERENCES[0]], group_id="g")
    rejected = rollout(4, -1.0, reference_logprobs=[0, *REFERENCES[1]], group_id="g")
    outputs = [[CHOSEN[0] + far, CHOSEN[1]], REJECTED]
    if swapped:
        return value_and_gradients(loss, [rejected, chosen], [*outputs[1], *outputs[0]])[0]
    return value_and_gradients(loss, [chosen, rejected], [*outputs[0], *outputs[1]])[0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(), -log_sigmoid(0.1 * SUMS)),
        (DPO(beta=0.7), -log_sigmoid(0.7 * SUMS)),
        (DPO(length_normalized=True), -log_sigmoid(0.1 * MEANS)),
        # E. Mitchell, A note on DPO with noisy preferences, 2023, eq. 3.
        (
            DPO(beta=0.7, label_smoothing=0.1),
            -0.9 * log_sigmoid(0.7 * SUMS) - 0.1 * log_sigmoid(-0.7 * SUMS),
        ),
        # arXiv 2403.00409.
        (
            DPO(beta=0.7, label_smoothing=0.1, variant="robust"),
            (-0.9 * log_sigmoid(0.7 * SUMS) + 0.1 * log_sigmoid(-0.7 * SUMS)) / 0.8,
        ),
        # arXiv 2309.06657.
        (DPO(beta=0.7, variant="hinge"), 1 - 0.7 * SUMS),
        (DPO(beta=0.7, variant="hinge", length_normalized=True), 1 - 0.7 * MEANS),
        # arXiv 2310.12036, eq. 17.
        (DPO(variant="ipo"), (SUMS - 1 / 0.2) ** 2),
        (DPO(beta=0.7, variant="ipo"), (SUMS - 1 / 1.4) ** 2),
        (DPO(beta=0.7, variant="ipo", length_normalized=True), (MEANS - 1 / 1.4) ** 2),
        (SimPO(), -log_sigmoid(2.0 * (-0.8 / 2 + 2.5 / 4) - 0.5)),
        (SimPO(beta=3.0), -log_sigmoid(3.0 * (-0.8 / 2 + 2.5 / 4) - 0.5)),
        (SimPO(gamma=1.5), -log_sigmoid(2.0 * (-0.8 / 2 + 2.5 / 4) - 1.5)),
    ],
    ids=str,
)
def test_variants_of_pairs(loss: Loss, expected: float) -> None:
    assert abs(SUMS - MEANS) > 0.1
    for swapped in (False, True):
        assert pair_value(loss, swapped=swapped) == pytest.approx(expected)


def test_the_hinge_ends() -> None:
    far = 1 / 0.7 - SUMS
    assert pair_value(DPO(beta=0.7, variant="hinge"), far=far - 0.1) == pytest.approx(0.07)
    assert pair_value(DPO(beta=0.7, variant="hinge"), far=far + 0.1) == 0.0


def test_pairs_are_averaged_over_groups() -> None:
    references = {"reference_logprobs": [0, LOGPROB]}
    given = [rollout(1, a, group_id=g, **references) for g in "abc" for a in (1.0, 0.0)]
    for loss in (DPO(), SimPO(gamma=0.0)):
        value, gradients = value_and_gradients(loss, given)
        assert value == pytest.approx(math.log(2))
        slope = 0.1 / 2 / 3 if isinstance(loss, DPO) else 2.0 / 2 / 3
        assert gradients == pytest.approx([-slope, slope] * 3)


# The critic: OpenAI's baselines (ppo2), max((v - R)**2, (clip(v, v_old -+ e) - R)**2) / 2.


@pytest.mark.parametrize(
    ("loss", "value", "target", "expected", "slope"),
    [
        # The old value is 1. Within the clip, both squares are one.
        (ValueLoss(), 1.1, 3.0, 1.9**2 / 2, -1.9),
        # Towards the return beyond the clip: the clipped square is the larger, without a gradient.
        (ValueLoss(), 1.5, 3.0, 1.8**2 / 2, 0.0),
        (ValueLoss(clip=0.4), 1.5, 3.0, 1.6**2 / 2, 0.0),
        (ValueLoss(clip=0.6), 1.5, 3.0, 1.5**2 / 2, -1.5),
        (ValueLoss(), 0.5, -3.0, 3.8**2 / 2, 0.0),
        # Away from the return the unclipped square is the larger.
        (ValueLoss(), 1.5, -3.0, 4.5**2 / 2, 4.5),
        (ValueLoss(clip=INF), 1.5, 3.0, 1.5**2 / 2, -1.5),
    ],
    ids=str,
)
def test_the_clip_of_values(
    loss: Loss, value: float, target: float, expected: float, slope: float
) -> None:
    old = {} if loss == ValueLoss(clip=INF) else {"old_values": [0, 1.0]}
    found, (gradient,) = value_and_gradients(loss, [rollout(1, returns=target, **old)], value)
    assert found == pytest.approx(expected)
    assert gradient == pytest.approx(slope)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(ValueLoss(), TOKEN), (ValueLoss(normalize="rollout"), ROLLOUT)],
    ids=str,
)
def test_means_of_values(loss: Loss, expected: list[float]) -> None:
    given = [
        rollout(1, returns=-2.0, old_values=[0, 0]),
        rollout(3, returns=-3.0, old_values=[0] * 4),
        Rollout([0, 0], [0, 0], 9.0, returns=0.0, old_values=[0, 0]),
    ]
    value, gradients = value_and_gradients(loss, given, 0.0)
    assert gradients == pytest.approx(expected)
    assert value == pytest.approx((1.0 * expected[0] * 2 + 3 * expected[1] * 3) / 2)


@pytest.mark.parametrize(
    ("options", "gamma", "lam"),
    [
        ({}, 1.0, 1.0),
        ({"gamma": 0.9}, 0.9, 1.0),
        ({"lam": 0.8}, 1.0, 0.8),
        ({"gamma": 0.9, "lam": 0.8}, 0.9, 0.8),
    ],
    ids=str,
)
def test_gamma_and_lambda(options: dict[str, float], gamma: float, lam: float) -> None:
    """arXiv 1506.02438, eq. 16, three actions: A_0 = d_0 + g l d_1 + (g l)**2 d_2."""
    batch = RolloutBatch([Rollout([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], 0.0)])
    found = gae(batch, [9, 0.5, 9, -1.0, 2.0], [0, 0.1, 0, 0.2, 3.0], **options)
    deltas = [0.1 + gamma * -1.0 - 0.5, 0.2 + gamma * 2.0 + 1.0, 3.0 - 2.0]
    decay = gamma * lam
    first = deltas[0] + decay * deltas[1] + decay**2 * deltas[2]
    expected = [0, first, 0, deltas[1] + decay * deltas[2], deltas[2]]
    assert found.advantages.tolist() == pytest.approx(expected)
    values = [0, 0.5, 0, -1.0, 2.0]
    assert found.returns.tolist() == pytest.approx(np.add(expected, values).tolist())


# Importance weights: truncated (F. Yao et al., 2025) or masked (IcePop, arXiv 2510.18855, with a
# floor), by token or by the product over the rollout.

RATIOS = [0.4, 1.9, 2.1, 2.6]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 1.9, 2.0, 2.0]),
        ({"cap": 2.5}, [0.4, 1.9, 2.1, 2.5]),
        ({"cap": INF}, RATIOS),
        ({"floor": 0.5}, [0.5, 1.9, 2.0, 2.0]),
        ({"mode": "mask"}, [0.4, 1.9, 0, 0]),
        ({"mode": "mask", "cap": 2.5}, [0.4, 1.9, 2.1, 0]),
        ({"mode": "mask", "floor": 0.5, "cap": 5.0}, [0, 1.9, 2.1, 2.6]),
        ({"level": "token"}, [0.4, 1.9, 2.0, 2.0]),
        ({"level": "sequence", "cap": 5.0}, [math.prod(RATIOS)] * 4),
        ({"level": "sequence"}, [2.0] * 4),
        ({"level": "sequence", "mode": "mask"}, [0.0] * 4),
        ({"level": "sequence", "mode": "mask", "cap": 4.2}, [math.prod(RATIOS)] * 4),
    ],
    ids=str,
)
def test_bounds_of_importance_weights(options: dict[str, object], expected: list[float]) -> None:
    batch = RolloutBatch([rollout(4, old_logprobs=[0] + [LOGPROB] * 4)])
    sampler = [math.nan, *(LOGPROB - np.log(RATIOS))]
    found = importance_weights(batch, sampler, **options)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([1.0, *expected])


@pytest.mark.parametrize("bound", [2.0, 0.5])
def test_ratios_at_a_bound_are_kept(bound: float) -> None:
    log = math.log(bound)
    batch = RolloutBatch([rollout(1, old_logprobs=[0, min(log, 0)])])
    ratio = float(np.exp(log))
    options = {"cap": ratio} if bound > 1 else {"floor": ratio}
    found = importance_weights(batch, [0.0, min(-log, 0)], mode="mask", **options)  # type: ignore[arg-type]
    assert found[1] == ratio


# What an option may be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: DAPO(normalize="rollout"),  # type: ignore[call-arg]
        lambda: BNPO(normalize="rollout"),  # type: ignore[call-arg]
        lambda: DrGRPO(max_tokens=3, normalize="token"),  # type: ignore[call-arg]
        lambda: GSPO(normalize="token"),  # type: ignore[call-arg]
        lambda: Distillation(needs=()),  # type: ignore[call-arg]
        lambda: DPO(needs=()),  # type: ignore[call-arg]
        lambda: ValueLoss(needs=()),  # type: ignore[call-arg]
        lambda: GRPO(0.2),  # type: ignore[misc]
        lambda: DrGRPO(),  # type: ignore[call-arg]
    ],
)
def test_what_a_loss_fixes_is_no_option(build: Callable[[], Loss]) -> None:
    with pytest.raises(TypeError):
        build()


def test_a_loss_shows_its_options_alone() -> None:
    common = "kl=0.0, kl_estimator='k3', entropy=0.0"
    clips = "clip=0.2, clip_high=None, dual_clip=None"
    assert repr(GRPO()) == f"GRPO({common}, normalize='token', {clips})"
    assert repr(BNPO()) == f"BNPO({common}, {clips})"
    assert repr(DAPO()) == f"DAPO({common}, clip=0.2, clip_high=0.28, dual_clip=None)"
    assert repr(DrGRPO(max_tokens=3)) == f"DrGRPO({common}, {clips}, max_tokens=3)"
    assert repr(GSPO()) == f"GSPO({common}, clip=0.0003, clip_high=0.0004, level='sequence')"
    assert repr(ValueLoss()) == "ValueLoss(clip=0.2, normalize='token')"
    assert repr(SimPO()) == "SimPO(beta=2.0, gamma=0.5)"
    distillation = "direction='reverse', clip=inf, clip_high=None, normalize='token'"
    assert repr(Distillation()) == f"Distillation({distillation})"
    dpo = "beta=0.1, variant='sigmoid', label_smoothing=0.0, length_normalized=False"
    assert repr(DPO()) == f"DPO({dpo})"


@pytest.mark.parametrize(
    ("kind", "name", "refused", "allowed"),
    [
        *(
            (GRPO, name, (-0.1, INF, math.nan, "1", True), (0, 0.5, 7))
            for name in ("kl", "entropy")
        ),
        *(
            (kind, name, (-0.1, math.nan, "1", True), (0, 0.5, INF))
            for kind in (GRPO, CISPO, GSPO, Distillation)
            for name in ("clip", "clip_high")
        ),
        (GRPO, "dual_clip", (0, 0.5, 1, 1.0, INF, math.nan), (1.001, 3)),
        *((SAPO, name, (0, -1, INF, math.nan), (1e-3, 5)) for name in ("tau_pos", "tau_neg")),
        (DrGRPO, "max_tokens", (0, -1, INF, math.nan, None), (0.5, 4096)),
        (DPO, "beta", (0, -1, INF, math.nan), (1e-3, 5)),
        (DPO, "label_smoothing", (-0.1, 0.5, 0.7, INF, math.nan), (0, 0.499)),
        (SimPO, "beta", (0, -1, INF, math.nan), (1e-3, 5)),
        (SimPO, "gamma", (-0.1, INF, math.nan), (0, 5)),
        (ValueLoss, "clip", (0, -1, math.nan), (1e-3, INF)),
        *(
            (kind, "normalize", ("none", "mean", None), ("token", "rollout"))
            for kind in (GRPO, SAPO)
        ),
        *((kind, "normalize", ("none", None), ("token", "rollout")) for kind in (ValueLoss, CISPO)),
        (Distillation, "normalize", ("none", None), ("token", "rollout")),
        (LogLikelihood, "normalize", ("mean", None), ("token", "rollout", "none")),
        (GRPO, "kl_estimator", ("k4", None), ("k1", "k2", "k3")),
        (GSPO, "level", ("group", None), ("sequence", "token")),
        (Distillation, "direction", ("both", None), ("reverse", "forward")),
        (DPO, "variant", ("kto", None), ("sigmoid", "robust", "hinge", "ipo")),
    ],
    ids=str,
)
def test_what_options_take(
    kind: type[Loss], name: str, refused: Sequence[object], allowed: Sequence[object]
) -> None:
    required = {} if kind is not DrGRPO or name == "max_tokens" else {"max_tokens": 4}
    for value in allowed:
        assert getattr(kind(**{name: value}, **required), name) == value
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}"):
            kind(**{name: value}, **required)


@pytest.mark.parametrize("variant", ["hinge", "ipo"])
def test_label_smoothing_of_variants_without_any(variant: str) -> None:
    with pytest.raises(ConfigError, match=f"variant '{variant}' has none"):
        DPO(variant=variant, label_smoothing=0.1)  # type: ignore[arg-type]
    for other in ("sigmoid", "robust"):
        DPO(variant=other, label_smoothing=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokens", "rollouts", "groups"])
def test_what_denominators_take(name: str) -> None:
    counts = {"tokens": 1.0, "rollouts": 1.0, "groups": 1.0}
    for value in (0, 0.5, 1e9):
        assert getattr(Denominators(**(counts | {name: value})), name) == value
    for value in (-1, INF, math.nan, "1"):
        with pytest.raises(ConfigError, match=rf"^denominators\.{name} is "):
            Denominators(**(counts | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"gamma": 1.001}, {"gamma": 1}),
        ({"gamma": -0.001}, {"gamma": 0}),
        ({"lam": 1.001}, {"lam": 1}),
        ({"lam": -0.001}, {"lam": 0}),
    ],
    ids=str,
)
def test_what_gae_takes(changes: dict[str, float], allowed: dict[str, float]) -> None:
    batch = RolloutBatch([rollout(2)])
    gae(batch, [0, 1, 2], [1.0], **allowed)
    (name,) = changes
    with pytest.raises(ConfigError, match=f"^{name} is "):
        gae(batch, [0, 1, 2], [1.0], **changes)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"cap": 0}, {"cap": 1e-3}),
        ({"cap": math.nan}, {"cap": INF}),
        ({"floor": -0.1}, {"floor": 0}),
        ({"floor": INF}, {"floor": 2.0}),
        ({"floor": 2.1}, {"floor": 2.1, "cap": 2.1}),
        ({"mode": "clip"}, {"mode": "mask"}),
        ({"level": "group"}, {"level": "sequence"}),
    ],
    ids=str,
)
def test_what_importance_weights_take(
    changes: dict[str, object], allowed: dict[str, object]
) -> None:
    batch = RolloutBatch([rollout(1, old_logprobs=[0, LOGPROB])])
    importance_weights(batch, [0, LOGPROB], **allowed)  # type: ignore[arg-type]
    (name,) = changes
    with pytest.raises(ConfigError, match=f"^{name} is "):
        importance_weights(batch, [0, LOGPROB], **changes)  # type: ignore[arg-type]


def test_a_function_is_a_loss_of_either_model() -> None:
    loss = as_loss(lambda outputs, batch: outputs.logprobs.sum())
    loss.check_head("logprobs")
    loss.check_head("values")


@pytest.mark.parametrize(
    ("loss", "head", "wants"),
    [
        (GRPO(), "values", "a causal language model's logprobs"),
        (ValueLoss(), "logprobs", "a critic's values"),
    ],
    ids=str,
)
def test_a_loss_of_another_model_says_which(loss: Loss, head: Head, wants: str) -> None:
    with pytest.raises(ConfigError, match=f"is a loss of {wants}, but the model is"):
        loss.check_head(head)


def test_a_view_has_returns_and_old_values_only_where_the_batch_has() -> None:
    view, _ = make_view(RolloutBatch([rollout(1)]))
    fields = {name: value for name, value in vars(view).items() if value is not None}
    again = LossBatch(
        **{"old_logprobs": None, "reference_logprobs": None, "weights": None} | fields
    )
    assert again.returns is None and again.old_values is None
