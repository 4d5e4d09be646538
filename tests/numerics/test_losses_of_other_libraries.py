"""Losses of TRL and verl: those that docs/reference/losses.md names for them compute the same.

The formulas of TRL 1.16 (`GRPOTrainer._compute_loss`, `DPOTrainer`, `CPOTrainer`) and of verl 0.9.1
(`core_algos.agg_loss` and its policy losses) stand here on padded rows [N, W].
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from losses_by_loops import evaluate, make_batch, make_logprobs
from torch import Tensor

from forkpoint import losses


def padded(batch, values_T) -> Tensor:
    """Flat values as rows, zero behind each rollout's end."""
    values_T = values_T if isinstance(values_T, Tensor) else torch.tensor(values_T)
    rows = values_T.split(np.diff(batch.offsets).tolist())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).double()


class Rows:
    """A batch on padded rows: log-probs, ratios, advantages and the mask."""

    def __init__(self, batch, logprobs_T: Tensor) -> None:
        self.mask = padded(batch, batch.loss_mask.astype(float))
        self.logprobs = padded(batch, logprobs_T)
        self.old = padded(batch, np.nan_to_num(batch.old_logprobs))
        self.reference = padded(batch, np.nan_to_num(batch.reference_logprobs))
        self.advantages = padded(batch, batch.advantages)
        self.weights = padded(batch, batch.weights)
        self.log_ratios = (self.logprobs - self.old) * self.mask

    def surrogate(self, low: float, high: float, most: float | None = None) -> Tensor:
        """TRL's clipped terms; `most` is its delta."""
        ratios = self.log_ratios.exp()
        bounded = ratios if most is None else ratios.clamp(max=most)
        clipped = ratios.clamp(1 - low, 1 + high) * self.advantages
        return -torch.min(bounded * self.advantages, clipped) * self.weights

    def token_mean(self, terms: Tensor) -> Tensor:
        return (terms * self.mask).sum() / self.mask.sum()

    def rollout_mean(self, terms: Tensor) -> Tensor:
        return ((terms * self.mask).sum(-1) / self.mask.sum(-1).clamp(min=1)).mean()

    def constant(self, terms: Tensor, length: int) -> Tensor:
        return (terms * self.mask).sum() / (len(terms) * length)

    def kl(self) -> Tensor:
        x = (self.reference - self.logprobs) * self.mask
        return x.exp() - x - 1


def verl_dual(rows: Rows, low: float, high: float, c: float) -> Tensor:
    """The terms of verl's `compute_policy_loss_vanilla`."""
    ratios, advantages = rows.log_ratios.exp(), rows.advantages
    first = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - low, 1 + high))
    second = torch.minimum(-advantages * c, first)
    return torch.where(advantages < 0, second, first) * rows.weights


def cispo(rows: Rows, low: float, most: float) -> Tensor:
    weights = rows.log_ratios.exp().clamp(low, most).detach()
    return -weights * rows.advantages * rows.logprobs * rows.weights


def sapo(rows: Rows, positive: float, negative: float) -> Tensor:
    both = torch.tensor([positive, negative], dtype=torch.float64)
    tau = torch.where(rows.advantages > 0, both[0], both[1])
    gate = torch.sigmoid(tau * (rows.log_ratios.exp() - 1)) * 4 / tau
    return -gate * rows.advantages * rows.weights


# What a user of the other library writes, the loss of ours, and what is computed there.
Case = tuple[str, losses.Loss, Callable[[Rows], Tensor]]
CASES: list[Case] = [
    (
        "TRL epsilon=0.1, epsilon_high=0.3, loss_type='grpo', beta=0.2",
        losses.GRPO(clip=0.1, clip_high=0.3, normalize="rollout", kl=0.2),
        lambda r: r.rollout_mean(r.surrogate(0.1, 0.3) + 0.2 * r.kl()),
    ),
    (
        "TRL loss_type='dapo'",
        losses.GRPO(normalize="token"),
        lambda r: r.token_mean(r.surrogate(0.2, 0.2)),
    ),
    ("TRL loss_type='bnpo'", losses.BNPO(), lambda r: r.token_mean(r.surrogate(0.2, 0.2))),
    (
        "TRL delta=1.3",
        losses.GRPO(dual_clip=1.3),
        lambda r: r.token_mean(r.surrogate(0.2, 0.2, 1.3)),
    ),
    (
        "TRL loss_type='dr_grpo', max_completion_length=12, epsilon=0.1",
        losses.DrGRPO(max_tokens=12, clip=0.1),
        lambda r: r.constant(r.surrogate(0.1, 0.1), 12),
    ),
    (
        "verl loss_mode='cispo', clip_ratio_low=0.2, clip_ratio_high=0.1",
        losses.CISPO(clip=0.2, clip_high=0.1),
        lambda r: r.token_mean(cispo(r, 0.8, 1.1)),
    ),
    (
        "TRL loss_type='sapo', sapo_temperature_pos=0.5, sapo_temperature_neg=2.0",
        losses.SAPO(tau_pos=0.5, tau_neg=2.0),
        lambda r: r.rollout_mean(sapo(r, 0.5, 2.0)),
    ),
    ("TRL loss_type='sapo'", losses.SAPO(), lambda r: r.rollout_mean(sapo(r, 1.0, 1.05))),
    (
        "verl clip_ratio_low=0.1, clip_ratio_high=0.28, clip_ratio_c=1.2",
        losses.GRPO(clip=0.1, clip_high=0.28, dual_clip=1.2),
        lambda r: r.token_mean(verl_dual(r, 0.1, 0.28, 1.2)),
    ),
    (
        "verl loss_mode='vanilla'",
        losses.PPO(dual_clip=3.0),
        lambda r: r.token_mean(verl_dual(r, 0.2, 0.2, 3.0)),
    ),
    (
        "verl loss_agg_mode='seq-mean-token-mean'",
        losses.GRPO(normalize="rollout"),
        lambda r: r.rollout_mean(r.surrogate(0.2, 0.2)),
    ),
    (
        "verl loss_agg_mode='seq-mean-token-sum'",
        losses.DrGRPO(max_tokens=1),
        lambda r: r.constant(r.surrogate(0.2, 0.2), 1),
    ),
    (
        "verl kl_loss_coef=0.1, kl_loss_type='mse'",
        losses.GRPO(kl=0.1, kl_estimator="k2"),
        lambda r: r.token_mean(r.surrogate(0.2, 0.2) + 0.05 * (r.reference - r.logprobs) ** 2),
    ),
    (
        "verl entropy_coeff=0.1",
        losses.GRPO(entropy=0.1),
        # The tests' entropies.
        lambda r: r.token_mean(
            r.surrogate(0.2, 0.2) - 0.1 * (r.logprobs.square() + 0.3 * r.logprobs)
        ),
    ),
]


@pytest.mark.parametrize(("loss", "there"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_loss_is_that_of_the_other_library(loss, there) -> None:
    batch = make_batch()
    logprobs_T = make_logprobs(batch)
    value, grad_T = evaluate(loss, batch, logprobs_T)
    other = make_logprobs(batch)
    wanted = there(Rows(batch, other))
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grad_T, other.grad, atol=1e-12, rtol=1e-12)
