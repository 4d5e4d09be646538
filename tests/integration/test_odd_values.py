"""Values that a step, a loss or a rollout cannot use: refused before anything changes, in few
lines."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, small_model
from torch import Tensor, nn

from forkpoint import (
    Config,
    ConfigError,
    Rollout,
    RolloutBatch,
    RolloutError,
    losses,
    save_rollouts,
    wrap,
)
from forkpoint.errors import UnsupportedError
from forkpoint.parallel.agreement import group_digests
from forkpoint.policy import Policy

HUGE = 10**400
LONGEST = 600
"""Most characters of a message."""


def odd(value: object) -> Any:
    """A value of a type that a signature does not allow."""
    return value


@pytest.fixture(scope="module")
def policy() -> Policy:
    return wrap(small_model("qwen3"), ACROSS)


@pytest.mark.parametrize("scale", [HUGE, -HUGE, 1e39, "0.5", b"2", True, float("nan")])
def test_a_scale_is_a_number_that_float32_holds(policy: Policy, scale: Any) -> None:
    clear_gradients(policy.host.model)
    with pytest.raises(ConfigError, match=r"scale is .*; it takes a finite number"):
        policy.forward_backward(forked_batch(), losses.GRPO(), scale=scale)
    assert all(x is None for x in gradients(policy.host.model).values())


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: losses.GRPO(kl=HUGE), r"an integer of 1329 bits; .* at most 3.4e[+]38"),
        (lambda: losses.GRPO(kl=-HUGE), r"an integer of 1329 bits; .* of at least 0[.]"),
        (lambda: losses.GRPO(clip=1e300), r"1e[+]300; it takes a number .* at most 3.4e[+]38"),
        (lambda: losses.SAPO(tau_pos=1e300), "1e[+]300; it takes a finite number above 0 and"),
        (lambda: losses.Denominators(tokens=HUGE, rollouts=1, groups=1), "1329 bits"),
        (lambda: losses.GRPO(clip=odd(torch.ones(1000))), r"clip.* is "),
        (lambda: losses.GRPO(kl_estimator=odd("x" * 10**5)), "kl_estimator is 'x"),
        (lambda: losses.GRPO(normalize=odd(np.array(["token", "x"]))), "normalize is array"),
        (lambda: Config(max_microbatch_tokens=-(10**5000)), r"below minus .* 16610 bits"),
    ],
)
def test_options_of_losses_are_refused_in_few_lines(make: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as refused:
        make()
    assert len(str(refused.value)) < LONGEST
    assert losses.GRPO(clip=float("inf")).clip == float("inf"), "no limit is no large number"


def in_place(outputs: losses.LossOutputs, batch: losses.LossBatch) -> Tensor:
    logprobs_T = outputs.logprobs
    logprobs_T *= 2
    return -logprobs_T.sum()


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (lambda o, b: 0, "returned 0; it must return a floating-point scalar"),
        (lambda o, b: o.logprobs, "returned torch.float64 of shape"),
        (lambda o, b: (o.logprobs.sum(), o.logprobs), "it must return a floating-point scalar"),
        (lambda o, b: list(range(5000)), "it must return a floating-point scalar"),
        (lambda o, b: o.logprobs.detach().sum(), "a scalar without a graph"),
    ],
)
def test_verify_refuses_the_losses_that_a_step_refuses(
    policy: Policy, loss: Any, wanted: str
) -> None:
    for call in (policy.forward_backward, policy.verify):
        with pytest.raises(ConfigError, match=wanted) as refused:
            call(forked_batch(), loss)
        assert len(str(refused.value)) < LONGEST


def test_verify_runs_a_loss_that_changes_its_inputs_in_place(policy: Policy) -> None:
    assert policy.verify(forked_batch(), in_place).passed


def test_a_loss_is_an_object_of_few_characters(policy: Policy) -> None:
    with pytest.raises(ConfigError, match=r"The loss is \[0.0, ") as refused:
        policy.forward_backward(forked_batch(), odd([0.0] * 2000))
    assert len(str(refused.value)) < LONGEST


def test_a_step_that_would_train_nothing_is_refused() -> None:
    """As ordinary training refuses it, because no output requires a gradient."""
    model = small_model("qwen3").requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    policy = wrap(model, ACROSS)
    for call in (
        lambda: policy.forward_backward(forked_batch(), losses.SFT()),
        lambda: policy.logprobs(forked_batch()).sum().backward(),
    ):
        with pytest.raises(UnsupportedError, match="the step would train nothing"):
            call()
    assert policy.score(forked_batch()).logprobs.isfinite().all()


def test_a_plan_is_refused_for_a_loss_that_does_not_fit(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="values"):
        policy.plan(forked_batch(), losses.ValueLoss())
    with pytest.raises(RolloutError, match="DPO takes exactly two rollouts a group"):
        policy.plan(forked_batch(), losses.DPO())


def test_long_doubles_are_checked_as_the_floats_that_they_become(tmp_path: Any) -> None:
    ids, mask = [1, 2], [0, 1]
    for text in ("1e4000", "-1e4000"):
        with pytest.raises(RolloutError, match="advantage is"):
            Rollout(ids, mask, odd(np.longdouble(text)))
    for text in ("1e4000", "1e-4000"):
        with pytest.raises(RolloutError, match="temperature is"):
            Rollout(ids, mask, 1.0, temperature=odd(np.longdouble(text)))
    save_rollouts(tmp_path / "x.jsonl", [Rollout(ids, mask, odd(np.longdouble("0.5")))])


def test_a_group_id_may_be_half_a_surrogate_pair() -> None:
    rollouts = [Rollout([1, 2], [0, 1], 1.0, group_id=name) for name in ("\ud800", "\ud801")]
    assert len(set(group_digests(RolloutBatch(rollouts)).tolist())) == 2


def test_select_names_the_index_and_the_size() -> None:
    batch = forked_batch()
    with pytest.raises(IndexError, match=f"index 99, and the batch has {len(batch)} rollouts"):
        batch.select([0, 99])
    assert len(batch.select([-1, 0])) == 2
