"""Arguments of TRL and verl: the loss that the error names computes what they compute.

The formulas of TRL 1.16 (`GRPOTrainer._compute_loss`, `DPOTrainer`, `CPOTrainer`) and of verl 0.9.1
(`core_algos.agg_loss` and its policy losses) stand here on padded rows [N, W].
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from losses_by_loops import evaluate, make_batch, make_logprobs
from torch import Tensor

from forkpoint import losses
from forkpoint.errors import ArgumentError, ConfigError
from forkpoint.losses.arguments import CHOICES, NOTES, RENAMED, TAKES, meaning


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


# What a user of the other library writes: the loss of ours that it is tried on, its arguments,
# and what is computed there.
Case = tuple[str, dict[str, object], Callable[[Rows], Tensor]]
CASES: list[Case] = [
    (
        "GRPO",
        {"epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "grpo", "beta": 0.2},
        lambda r: r.rollout_mean(r.surrogate(0.1, 0.3) + 0.2 * r.kl()),
    ),
    ("GRPO", {"loss_type": "dapo"}, lambda r: r.token_mean(r.surrogate(0.2, 0.2))),
    ("GRPO", {"loss_type": "bnpo"}, lambda r: r.token_mean(r.surrogate(0.2, 0.2))),
    ("GRPO", {"delta": 1.3}, lambda r: r.token_mean(r.surrogate(0.2, 0.2, 1.3))),
    (
        "DrGRPO",
        {"max_completion_length": 12, "epsilon": 0.1},
        lambda r: r.constant(r.surrogate(0.1, 0.1), 12),
    ),
    (
        "CISPO",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.1},
        lambda r: r.token_mean(cispo(r, 0.8, 1.1)),
    ),
    (
        "SAPO",
        {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
        lambda r: r.rollout_mean(sapo(r, 0.5, 2.0)),
    ),
    ("GRPO", {"loss_type": "sapo"}, lambda r: r.rollout_mean(sapo(r, 1.0, 1.05))),
    (
        "GRPO",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.2},
        lambda r: r.token_mean(verl_dual(r, 0.1, 0.28, 1.2)),
    ),
    ("GRPO", {"loss_mode": "vanilla"}, lambda r: r.token_mean(verl_dual(r, 0.2, 0.2, 3.0))),
    (
        "DAPO",
        {"loss_agg_mode": "seq-mean-token-mean"},
        lambda r: r.rollout_mean(r.surrogate(0.2, 0.2)),
    ),
    (
        "GRPO",
        {"loss_agg_mode": "seq-mean-token-sum"},
        lambda r: r.constant(r.surrogate(0.2, 0.2), 1),
    ),
    (
        "GRPO",
        {"kl_loss_coef": 0.1, "kl_loss_type": "mse"},
        lambda r: r.token_mean(r.surrogate(0.2, 0.2) + 0.05 * (r.reference - r.logprobs) ** 2),
    ),
    (
        "GRPO",
        {"entropy_coeff": 0.1},
        # The tests' entropies.
        lambda r: r.token_mean(
            r.surrogate(0.2, 0.2) - 0.1 * (r.logprobs.square() + 0.3 * r.logprobs)
        ),
    ),
]


def follow(name: str, arguments: dict[str, object]) -> losses.Loss:
    """The loss that the message says to take, with the arguments that it says to give."""
    with pytest.raises(ArgumentError) as caught:
        getattr(losses, name)(**arguments)
    message = str(caught.value)
    taken = re.findall(r"take losses\.(\w+)", message)
    given = re.findall(r"(\w+)=([^\s,;()]+?)[.,)]*(?=[\s,;)]|$)", message)
    found = {key: eval(value, {"inf": np.inf}) for key, value in given}
    return getattr(losses, taken[0] if taken else name)(**found)


@pytest.mark.parametrize(("name", "arguments", "there"), CASES, ids=[str(c[:2]) for c in CASES])
def test_the_loss_that_is_named_is_the_loss_there(name, arguments, there) -> None:
    loss = follow(name, arguments)
    batch = make_batch()
    logprobs_T = make_logprobs(batch)
    value, grad_T = evaluate(loss, batch, logprobs_T)
    other = make_logprobs(batch)
    wanted = there(Rows(batch, other))
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grad_T, other.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("GRPO", {"importance_sampling_level": "sequence_token"}, losses.GSPO(level="token")),
        ("GSPO", {"importance_sampling_level": "token"}, losses.GRPO()),
        ("GRPO", {"loss_type": "cispo"}, losses.CISPO()),
        ("GRPO", {"loss_mode": "geo_mean"}, losses.GMPO()),
        ("DPO", {"loss_type": ["ipo"]}, losses.DPO(variant="ipo", length_normalized=True)),
        ("SimPO", {"simpo_gamma": 0.25}, losses.SimPO(gamma=0.25)),
        ("ValueLoss", {"cliprange_value": 0.5}, losses.ValueLoss(clip=0.5)),
        ("SAPO", {"loss_agg_mode": "token-mean"}, losses.SAPO(normalize="token")),
        ("GSPO", {"loss_agg_mode": "token-mean"}, losses.GRPO(normalize="token")),
        ("GSPO", {"loss_agg_mode": "seq-mean-token-mean"}, losses.GSPO()),
        ("SAPO", {"loss_type": "grpo"}, losses.GRPO(normalize="rollout")),
    ],
    ids=str,
)
def test_the_loss_that_is_named(name, arguments, expected) -> None:
    assert follow(name, arguments) == expected


def test_messages() -> None:
    """Several arguments are all named, and other libraries' come before a guess."""
    with pytest.raises(ArgumentError) as caught:
        losses.GRPO(epsilon=0.3, num_generations=8, clip_hihg=0.4, max_tokens=3)  # type: ignore[call-arg]
    said = str(caught.value)
    for part in (
        "GRPO has no argument epsilon: give clip=0.3.",
        "GRPO has no argument num_generations: the rollouts of a group",
        "GRPO has no argument clip_hihg; it takes kl,",
        "Perhaps clip_high is meant.",
        "GRPO has no argument max_tokens. Leave it out, or take a loss that has it: DrGRPO.",
    ):
        assert part in said
    with pytest.raises(ArgumentError, match="give epsilon_high - 1 as clip_high"):
        losses.CISPO(epsilon_high=1.25)  # type: ignore[call-arg]


def test_functions_explain_their_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"give cap=3\.0\."):
        losses.importance_weights(make_batch(), [], vllm_importance_sampling_clip_max=3.0)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"give lam=0\.9"):
        losses.gae(make_batch(), [], [], gae_lambda=0.9)  # type: ignore[call-arg]


def loss_classes() -> list[type[losses.Loss]]:
    found = {getattr(losses, name) for name in losses.__all__}
    concrete = [c for c in found if isinstance(c, type) and issubclass(c, losses.Loss)]
    bases = (losses.Loss, losses.PolicyLoss, losses.FunctionLoss)
    return sorted((c for c in concrete if c not in bases), key=str)


def test_every_loss_explains_its_arguments() -> None:
    """A loss without the decorator fails here, and so does a table that is out of date."""
    for cls in loss_classes():
        with pytest.raises(ArgumentError, match=f"{cls.__name__} has no argument nonsense; it"):
            cls(nonsense=1)  # type: ignore[call-arg]
    for choices in CHOICES.values():
        for take, give in choices.values():
            assert set(give) <= set(TAKES["LogLikelihood" if take == "SFT" else take or "GRPO"])
    names = {*CHOICES, *NOTES, *" ".join(RENAMED.values()).split()}
    for name in names:
        for value in (None, 0.2, "nonsense", [], object(), float("nan")):
            meant = meaning("GRPO", name, value, TAKES["GRPO"])
            assert meant is None or not meant.endswith(".")


def test_errors_are_of_every_kind() -> None:
    """Callers may catch the class of forkpoint, ValueError, or what Python itself raises."""
    for kind in (ArgumentError, ConfigError, ValueError, TypeError):
        with pytest.raises(kind):
            losses.GRPO(epsilon=0.2)  # type: ignore[call-arg]


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    from dataclasses import dataclass, replace

    @dataclass(frozen=True, kw_only=True)
    class Mine(losses.GRPO):
        epsilon: float = 0.5

    assert replace(Mine(epsilon=0.25, clip=0.1), clip=0.2) == Mine(epsilon=0.25)
