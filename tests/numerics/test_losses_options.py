"""Options of losses: their defaults, what they take, and bounds that no formula has.

`test_losses.py` compares each loss with its formula where its options bind.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from losses_by_loops import evaluate

from forkpoint.errors import ConfigError
from forkpoint.losses import (
    CISPO,
    DAPO,
    DPO,
    GRPO,
    GSPO,
    SAPO,
    SFT,
    Denominators,
    Distillation,
    DrGRPO,
    LogLikelihood,
    Loss,
    RouterLoss,
    SimPO,
    ValueLoss,
)
from forkpoint.rollouts.batch import Rollout, RolloutBatch

INF = math.inf


def rollout(advantage: float = 1.0, **fields: object) -> Rollout:
    """An untrained token, then a trained one."""
    return Rollout([0, 0], [0, 1], advantage, **fields)  # type: ignore[arg-type]


def value_of(loss: Loss, rollouts: Sequence[Rollout], logprob: float) -> float:
    """The loss where each trained token has this log-prob."""
    batch = RolloutBatch(rollouts)
    loss.check(batch)
    logprobs_T = torch.tensor(np.where(batch.loss_mask, logprob, 0.0), requires_grad=True)
    return float(evaluate(loss, batch, logprobs_T)[0])


@pytest.mark.parametrize("loss", [GRPO(clip=INF), CISPO(clip_high=INF), Distillation()], ids=str)
def test_log_ratios_count_as_at_most_20(loss: Loss) -> None:
    for log_ratio, counts in ((19.9, 19.9), (20.1, 20.0), (90.0, 20.0)):
        reference = [0, -100.0 + log_ratio + 1]
        one = rollout(old_logprobs=[0, -100.0], reference_logprobs=reference)
        value = value_of(loss, [one], -100.0 + log_ratio)
        worth = -100.0 + log_ratio if isinstance(loss, CISPO) else 1.0
        assert -value == pytest.approx(math.exp(counts) * worth)
    # The KL term's exponential, of a reference far above the policy.
    for x, counts in ((19.9, 19.9), (20.1, 20.0), (90.0, 20.0)):
        far = rollout(0.0, reference_logprobs=[0, -1.0])
        value = value_of(GRPO(kl=1.0), [far], -1.0 - x)
        assert value == pytest.approx(math.exp(counts) - counts - 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DAPO(normalize="rollout"),  # type: ignore[call-arg]
        lambda: DrGRPO(max_tokens=3, normalize="token"),  # type: ignore[call-arg]
        lambda: GSPO(normalize="token"),  # type: ignore[call-arg]
        lambda: Distillation(needs=()),  # type: ignore[call-arg]
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
    assert repr(DAPO()) == f"DAPO({common}, clip=0.2, clip_high=0.28, dual_clip=None)"
    assert repr(DrGRPO(max_tokens=3)) == f"DrGRPO({common}, {clips}, max_tokens=3)"
    assert SFT is LogLikelihood and repr(SFT()) == "LogLikelihood(normalize='token')"


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


def test_router_losses_take_numbers_of_numpy() -> None:
    assert RouterLoss(load_balancing=np.float32(0.5), z=np.int64(2)).z == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["hinge", "ipo"])
def test_label_smoothing_of_variants_without_any(variant: str) -> None:
    with pytest.raises(ConfigError, match=f"variant '{variant}' has none"):
        DPO(variant=variant, label_smoothing=0.1)  # type: ignore[arg-type]
    for other in ("sigmoid", "robust"):
        DPO(variant=other, label_smoothing=0.1)  # type: ignore[arg-type]
