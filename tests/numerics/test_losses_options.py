"""Every option of every loss where it binds: numbers by hand from the published definitions.

The expected numbers are written out, defaults too, and are not read from the loss. An option that
is ignored, or a default that is another number than is documented, fails here.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from losses_by_loops import evaluate

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
    Denominators,
    Distillation,
    DrGRPO,
    LogLikelihood,
    Loss,
    SimPO,
    ValueLoss,
)
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

CLIPPED = [
    # loss, ratio, advantage, ratio that counts, whether the gradient has ended
    *((loss, 1.21, 2.0, 1.2, True) for loss in (GRPO(), PPO(), BNPO())),
    *((loss, 0.79, -2.0, 0.8, True) for loss in (GRPO(), PPO(), BNPO())),
    (GRPO(), 1.19, 2.0, 1.19, False),
    (GRPO(), 0.81, -2.0, 0.81, False),
    (GRPO(), 0.1, 2.0, 0.1, False),
    (GRPO(), 30.0, -2.0, 30.0, False),
    (GRPO(clip=0.3, clip_high=0.5), 1.49, 2.0, 1.49, False),
    (GRPO(clip=0.3, clip_high=0.5), 1.51, 2.0, 1.5, True),
    (GRPO(clip=0.3, clip_high=0.5), 0.69, -2.0, 0.7, True),
    (GRPO(clip=INF), 40.0, 2.0, 40.0, False),
    (GRPO(clip=INF), 0.01, -2.0, 0.01, False),
    (DAPO(), 1.27, 2.0, 1.27, False),
    (DAPO(), 1.29, 2.0, 1.28, True),
    (DAPO(), 0.79, -2.0, 0.8, True),
    # Dual clip bounds the ratio of negative advantages alone.
    (GRPO(dual_clip=3.0), 2.99, -2.0, 2.99, False),
    (GRPO(dual_clip=3.0), 3.01, -2.0, 3.0, True),
    (GRPO(dual_clip=3.0, clip=INF), 8.0, 2.0, 8.0, False),
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
        (CISPO(), 0.001, 0.001),
        (CISPO(clip_high=0.28), 1.3, 1.28),
        (CISPO(clip_high=INF), 1000.0, 1000.0),
        (CISPO(clip=0.2), 0.79, 0.8),
        (CISPO(clip=0.2, clip_high=None), 1.21, 1.2),
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
        (GSPO(), 0.99969, -2.0, 0.9997, True),
        (GSPO(clip=0.1), 0.91, -2.0, 0.91, False),
        (GSPO(clip=0.1, clip_high=None), 1.11, 2.0, 1.1, True),
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


@pytest.mark.parametrize("kind", POLICY)
def test_the_kl_term_and_the_entropy_bonus(kind: type[Loss]) -> None:
    """By k3 unless another is named, with the coefficient, and without the token's weight. The
    tests' entropies are logprob**2 + 0.3 logprob."""
    one = [rollout(1, 0.0, reference_logprobs=[0, LOGPROB + X], weights=[1, 5.0])]
    for estimator in (None, *ESTIMATES):
        options: dict[str, Any] = {} if estimator is None else {"kl_estimator": estimator}
        value, (gradient,) = value_and_gradients(kind(kl=0.25, **options), one)
        assert value == pytest.approx(0.25 * ESTIMATES[estimator or "k3"])
        assert gradient == pytest.approx(0.25 * SLOPES[estimator or "k3"])
    value, (gradient,) = value_and_gradients(kind(entropy=3.0), one)
    assert value == pytest.approx(-3 * (LOGPROB**2 + 0.3 * LOGPROB))
    assert gradient == pytest.approx(-3 * (2 * LOGPROB + 0.3))
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


# What an option may be ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["tokens", "rollouts", "groups"])
def test_what_denominators_take(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^denominators\.{name} is -1"):
        Denominators(**{"tokens": 1, "rollouts": 1, "groups": 1, name: -1})


@pytest.mark.parametrize("variant", ["hinge", "ipo"])
def test_label_smoothing_of_variants_without_any(variant: str) -> None:
    with pytest.raises(ConfigError, match=f"variant '{variant}' has none"):
        DPO(variant=variant, label_smoothing=0.1)  # type: ignore[arg-type]
    for other in ("sigmoid", "robust"):
        DPO(variant=other, label_smoothing=0.1)  # type: ignore[arg-type]
