"""A rank that fails, is interrupted or is killed within a step ends it on all ranks."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_ranks import CAUSES, MESHES, Moment, tried
from processes import RankFailed, run_ranks
from scenarios_of_ranks import DEEP, UNEQUAL, Scenario, model_of, on_ranks, replicated, sharded

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.errors import ConfigError, ForkpointError
from forkpoint.losses import GRPO
from forkpoint.parallel import watch
from versions import needs_splits

pytestmark = pytest.mark.usefixtures("quick")


def interrupts() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


# Moments that tests/fuzz/run_rank_failures.py draws, one of each kind
# ------------------------------------------------------------


SLOW = (
    *(("forward", "fully_shard"), ("forward", "DDP"), ("loss", "fully_shard"), ("loss", "DDP")),
    *(("loss", "fully_shard, gathered once"), ("forward", "fully_shard, gathered once")),
    *(("interrupt", "fully_shard, gathered once"), ("interrupt", "DDP"), ("score", "DDP")),
    *(("backward", "fully_shard"), ("memory", "DDP"), ("logprobs", "fully_shard")),
    *(("kill", "fully_shard"), ("kill", "DDP")),
)


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("interrupt", "fully_shard"),
        *(pytest.param(*moment, marks=pytest.mark.slow) for moment in SLOW),
    ],
)
def test_a_rank_that_fails_at_a_random_moment(kind: str, wrap: str) -> None:
    """If the loss fails, the gradients of earlier steps are restored."""
    outcome = tried(Moment(kind, wrap, seed=5 if kind == "loss" else 4))
    assert not outcome.faults, outcome


@pytest.mark.slow
@needs_splits
@pytest.mark.parametrize("wrap", MESHES)
@pytest.mark.parametrize("kind", CAUSES)
def test_a_rank_of_two_stages_that_fails(kind: str, wrap: str) -> None:
    """If the loss fails, the gradients of earlier steps are restored."""
    outcome = tried(Moment(kind, wrap, seed=5 if kind == "loss" else 4))
    assert not outcome.faults, outcome


def settles_then_fails(failing: int) -> None:
    """An interrupt on one rank once all know that none has failed, before gradients are summed."""
    model = model_of(Scenario())
    policy = forkpoint.wrap(replicated(model), replace(DEEP, self_check=False))
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    policy.forward_backward(own, GRPO())
    model.zero_grad()
    group = policy.host.group
    assert group is not None
    if dist.get_rank() == failing:
        group.reduce = lambda *a, **k: interrupts()  # type: ignore[method-assign]
    try:
        policy.forward_backward(own, GRPO())
    except KeyboardInterrupt:
        assert all(p.grad is None for p in model.parameters())
        time.sleep(4)
        raise


@pytest.mark.slow
def test_an_interrupt_between_agreement_and_reduction_ends_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, settles_then_fails, 0)
    assert f"rank 1: ended with exit status {watch.EXIT_CODE}" in str(failed.value)
    assert "rank 0: KeyboardInterrupt" in capfd.readouterr().err


# The sample
# ------------------------------------------------------------


def mixes_tokens(x: torch.Tensor) -> torch.Tensor:
    """Adds to each token what other tokens of its sequence are."""
    return torch.sigmoid(x) * x + x.mean(-2, keepdim=True)


def refuses(x: torch.Tensor) -> torch.Tensor:
    raise ConfigError("of the test")


def sampled_with(wrap: Any, function: Any) -> tuple[str, str]:
    """A step for which rank 0 has patched a function that the model calls, and the step after
    it."""
    model: Any = model_of(Scenario())
    policy = on_ranks(wrap(model), DEEP)
    stock = torch.nn.functional.silu
    if dist.get_rank() == 0:
        torch.nn.functional.silu = function
    found = []
    for _ in range(2):
        try:
            policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO())
        except ForkpointError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
        torch.nn.functional.silu = stock
        if wrap is sharded and function is refuses:
            time.sleep(6)  # the other rank ends meanwhile
            break
    return found[0], found[-1]


@pytest.mark.parametrize("wrap", [sharded, pytest.param(replicated, marks=pytest.mark.slow)])
def test_a_rank_whose_sample_differs_ends_the_step_on_all(wrap: Any) -> None:
    first, second = run_ranks(2, sampled_with, wrap, mixes_tokens)
    assert first[0].startswith("UnsupportedError") and "differ from the model's" in first[0]
    assert "rank 0 failed before this step" in second[0] and "differ from the model's" in second[0]
    assert first[1] == second[1] == ""


@pytest.mark.slow
def test_a_rank_that_refuses_within_the_sample_ends_the_step_on_all() -> None:
    first, second = run_ranks(2, sampled_with, replicated, refuses)
    assert first[0] == "ConfigError: of the test"
    assert "rank 0 failed" in second[0] and "of the test" in second[0]
    assert first[1] == second[1] == ""


@pytest.mark.slow
def test_a_rank_that_refuses_within_the_sample_ends_others_that_gather() -> None:
    """The other rank waits in a gather of the next block's weights."""
    with pytest.raises(RankFailed, match="rank 1: ended with exit status 75"):
        run_ranks(2, sampled_with, sharded, refuses)
