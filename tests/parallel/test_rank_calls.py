"""Calls of a policy on ranks: scores, log-probs, functions as losses, and what is refused."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    UNEQUAL,
    Failing,
    Scenario,
    distance,
    gradients,
    group,
    model_of,
    on_ranks,
    own_loss,
    replicated,
    sharded,
)
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.errors import ConfigError, RankError, RolloutError, UnsupportedError
from forkpoint.losses import GRPO, GSPO, Denominators, Loss
from forkpoint.testing import lifted_upcasts
from lanes import id_of

WRAPS = {"fully_shard": sharded, "DistributedDataParallel": replicated}
sharded_first = pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(sharded, id="fully_shard"),
        pytest.param(replicated, id="DistributedDataParallel", marks=pytest.mark.slow),
    ],
)
"""DistributedDataParallel in the slow lane."""


SPLIT = (group(2, 5, 30, 12)[:2], group(2, 5, 30, 12)[2:])
"""A group on two ranks."""


def policies(wrap: Any, config: Config = DEEP) -> tuple[forkpoint.Policy, forkpoint.Policy]:
    """A policy on ranks, and one of the same model alone."""
    scenario = Scenario()
    return (
        on_ranks(wrap(model_of(scenario)), config),
        forkpoint.wrap(model_of(scenario), config),
    )


def apart(policy: forkpoint.Policy, alone: forkpoint.Policy) -> float:
    names = [name for name, _ in alone.host.model.named_parameters()]
    return distance(gradients(policy.host.model), gradients(alone.host.model), names)


def mean_over_ranks(policy: forkpoint.Policy, step: Any, rollouts: Any) -> None:
    """Gradients of the mean over ranks of each rank's own loss, in one process."""
    for part in rollouts:
        if part:
            step(policy, RolloutBatch(part))
    for parameter in policy.host.model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(rollouts)


# Scores and log-probs
# ------------------------------------------------------------


def scored(wrap: Any, rollouts: Any) -> float:
    policy, alone = policies(wrap)
    batch = RolloutBatch(rollouts[dist.get_rank()])
    found = policy.score(batch, entropy=True)
    if not len(batch):
        return float(len(found.logprobs) + len(found.entropies))
    wanted = alone.score(batch, entropy=True)
    return float(
        (found.logprobs - wanted.logprobs).abs().max()
        + (found.entropies - wanted.entropies).abs().max()
    )


@sharded_first
@pytest.mark.parametrize("rollouts", [EMPTY, UNEQUAL])
@pytest.mark.slow
def test_scores_are_each_rank_s_own(wrap: Any, rollouts: Any) -> None:
    assert max(run_ranks(2, scored, wrap, rollouts)) < BAR


def through_logprobs(wrap: Any, rollouts: Any) -> float:
    policy, alone = policies(wrap)

    def step(each: forkpoint.Policy, batch: RolloutBatch) -> None:
        logprobs, entropies = each.logprobs(batch, entropy=True)
        weights = torch.as_tensor(batch.advantages * batch.loss_mask)
        ((weights * logprobs).sum() ** 2 - 0.01 * entropies.sum()).backward()

    step(policy, RolloutBatch(rollouts[dist.get_rank()]))
    mean_over_ranks(alone, step, rollouts)
    return apart(policy, alone)


@pytest.mark.slow
@sharded_first
@pytest.mark.parametrize("rollouts", [UNEQUAL, EMPTY])
def test_losses_of_logprobs_are_averaged(wrap: Any, rollouts: Any) -> None:
    assert max(run_ranks(2, through_logprobs, wrap, rollouts)) < BAR


def other_losses(wrap: Any) -> dict[str, float]:
    """How far off a function as a loss, denominators that are given, and a batch of zeros are."""
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    policy, alone = policies(wrap)
    loss = policy.forward_backward(own, own_loss).loss
    losses: list[float] = []
    mean_over_ranks(
        alone,
        lambda each, batch: losses.append(each.forward_backward(batch, own_loss).loss),
        UNEQUAL,
    )
    found = {"function": apart(policy, alone), "its loss": abs(loss - losses[dist.get_rank()])}
    for each in (policy.host.model, alone.host.model):
        each.zero_grad()
    given = Denominators(tokens=1000, rollouts=30, groups=4)
    policy.forward_backward(own, GRPO(), denominators=given, scale=0.5)
    whole = RolloutBatch([r for part in UNEQUAL for r in part])
    alone.forward_backward(whole, GRPO(), denominators=given, scale=0.5)
    found["denominators"] = apart(policy, alone)
    policy.host.model.zero_grad()
    policy.forward_backward(RolloutBatch([Rollout(list(range(9)), [0] * 9, 0.0)]), GRPO())
    zeros = gradients(policy.host.model).values()
    found["nothing trained"] = sum(1.0 if g is None else float(g.abs().sum()) for g in zeros)
    return found


@sharded_first
def test_losses_are_each_rank_s_own_or_of_all(wrap: Any) -> None:
    for found in run_ranks(2, other_losses, wrap):
        assert max(found.values()) < BAR, found
        assert found["nothing trained"] == 0


# Mixed precision
# ------------------------------------------------------------


def in_bfloat16(gather: Any) -> tuple[float, float]:
    """Errors against float64: of two ranks with bfloat16 parameters, and of one process."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    make = Scenario().make

    def made(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        model = make().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return model

    ranks = on_ranks(sharded(made(torch.float32), mp_policy=policy), DEEP, gather)
    ranks.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO())
    whole = RolloutBatch([r for part in UNEQUAL for r in part])
    narrow = forkpoint.wrap(made(torch.bfloat16), DEEP)
    narrow.forward_backward(whole, GRPO())
    exact = forkpoint.wrap(made(torch.float64), DEEP)
    exact.forward_backward(whole, GRPO())
    return apart(ranks, exact), apart(narrow, exact)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_parameters_in_bfloat16_reduced_in_float32(gather: str) -> None:
    for ranks, narrow in run_ranks(2, in_bfloat16, gather):
        assert ranks < 1.1 * narrow


# Refusals, the same on all ranks
# ------------------------------------------------------------


def raised(work: Any) -> str:
    try:
        work()
    except (ConfigError, RankError, RolloutError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bad_rollout(wrap: Any) -> tuple[str, bool, float]:
    policy, alone = policies(wrap)
    rollouts = UNEQUAL[dist.get_rank()]
    if dist.get_rank() == 1:
        rollouts = [Rollout([1, 2, 10**6], [0, 1, 1], 1.0)]
    found = raised(lambda: policy.forward_backward(RolloutBatch(rollouts), GRPO()))
    clean = all(p.grad is None for p in policy.host.model.parameters())
    policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO())
    alone.forward_backward(RolloutBatch([r for part in UNEQUAL for r in part]), GRPO())
    return found, clean, apart(policy, alone)


@sharded_first
@pytest.mark.slow
def test_a_bad_rollout_of_one_rank_is_an_error_on_all(wrap: Any) -> None:
    first, second = run_ranks(2, bad_rollout, wrap)
    assert first[0].startswith("RankError: rank 1 cannot run this step") and "1000000" in first[0]
    assert second[0].startswith("RolloutError") and "1000000" in second[0]
    for _, clean, error in (first, second):
        assert clean and error < BAR


class FailingTogether(Failing):
    decomposition = "rollout"


def failing_loss(wrap: Any, loss: Loss, accumulated: bool) -> tuple[str, str, float]:
    policy, alone = policies(wrap, Config(**{**vars(DEEP), "restore_grads": True}))
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    whole = RolloutBatch([r for part in UNEQUAL for r in part])
    if accumulated:
        policy.forward_backward(own, GRPO())
        alone.forward_backward(whole, GRPO())
    try:
        policy.forward_backward(own, loss)
    except (RankError, ZeroDivisionError) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = ""
    outcome = policy.last_step.gradients  # type: ignore[union-attr]
    policy.forward_backward(own, GRPO())
    alone.forward_backward(whole, GRPO())
    return found, outcome, apart(policy, alone)


FAILING = list(product(WRAPS, (Failing, FailingTogether), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "loss", "accumulated"), FAILING, ids=id_of)
def test_a_loss_that_fails_on_one_rank_ends_the_step_on_all(
    wrap: str, loss: type[Loss], accumulated: bool
) -> None:
    first, second = run_ranks(2, failing_loss, WRAPS[wrap], loss(), accumulated)
    assert "rank 1 failed in this step" in first[0] and "of the test" in first[0]
    assert second[0] == "ZeroDivisionError: of the test"
    for _, outcome, error in (first, second):
        assert outcome == "unchanged" and error < BAR


def other_calls() -> str:
    policy, _ = policies(sharded)
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    if dist.get_rank():
        return raised(lambda: policy.score(own))
    return raised(lambda: policy.forward_backward(own, GSPO()))


def test_ranks_that_call_something_else_are_told() -> None:
    for found in run_ranks(2, other_calls):
        assert found.startswith("RankError: the ranks do not call the same")
        assert "score" in found and "GSPO" in found


class OfGroups(Loss):
    """Couples the rollouts of a group."""

    decomposition = "joint"

    def coupling(self, batch: RolloutBatch) -> Any:
        return batch.group_index

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.logprobs.sum() ** 2


class OfAll(OfGroups):
    """Couples all rollouts."""

    def coupling(self, batch: RolloutBatch) -> Any:
        return 0 * batch.group_index


def coupled_over_ranks(loss: Loss, parts: Any) -> str:
    policy, _ = policies(sharded)
    return raised(lambda: policy.forward_backward(RolloutBatch(parts[dist.get_rank()]), loss))


@pytest.mark.parametrize("of_groups", [True, False])
def test_losses_that_couple_rollouts_of_two_ranks_are_refused(of_groups: bool) -> None:
    given = (OfGroups(), SPLIT) if of_groups else (OfAll(), UNEQUAL)
    what = "1 of the groups" if of_groups else "couples rollouts of different groups"
    for found in run_ranks(2, coupled_over_ranks, *given):
        assert what in found


def refused() -> list[str]:
    def blocks_alone() -> None:
        model = model_of(Scenario())
        fully_shard(model.model.layers[0])  # type: ignore[union-attr]
        forkpoint.wrap(model)

    def rounded() -> None:
        policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
        forkpoint.wrap(sharded(model_of(Scenario()), mp_policy=policy))

    def offloaded() -> None:
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        forkpoint.wrap(sharded(model_of(Scenario()), **options))

    def first_kind() -> None:
        model = model_of(Scenario())
        forkpoint.wrap(FullyShardedDataParallel(model, device_id=torch.device("cpu")))

    def wide_sums() -> None:
        config = Config(grad_accumulation_dtype="float32")
        forkpoint.wrap(sharded(model_of(Scenario())), config)

    return [raised(work) for work in (blocks_alone, rounded, offloaded, first_kind, wide_sums)]


def test_what_is_not_exact_is_refused_with_a_remedy() -> None:
    for found in run_ranks(2, refused):
        blocks, rounded, offloaded, first_kind, wide_sums = found
        assert "the model around it is not" in blocks and "fully_shard(model)" in blocks
        assert "output_dtype=torch.bfloat16 and param_dtype=None" in rounded
        assert "CPUOffloadPolicy" in offloaded
        assert "FullyShardedDataParallel" in first_kind and "fully_shard" in first_kind
        assert "reduce_dtype=torch.float32" in wide_sums


# Losses that couple rollouts of several ranks
# ------------------------------------------------------------


class Spread(Loss):
    """A loss of the spread of all rollouts' mean log-probs, wherever they are."""

    decomposition = "joint"
    across_ranks = True
    needs_entropy = True

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        assert len(set(batch.rollout_ids)) == len(batch.rollout_ids)
        means_n = batch.rollout_mean(outputs.logprobs * batch.advantages)
        groups = torch.zeros(int(batch.group_index.max()) + 1, dtype=means_n.dtype)
        by_group = groups.index_add(0, batch.group_index, means_n)
        entropy = batch.rollout_mean(outputs.entropies).logsumexp(0)
        return means_n.var() + by_group.logsumexp(0) - 0.1 * entropy + means_n.sum() ** 2


def spread_over_ranks(wrap: Any, parts: Any, config: Config) -> tuple[float, float, float]:
    policy, alone = policies(wrap, config)
    names = [f"rollout {n}" for n in range(20)]
    own = [replace(r, rollout_id=n) for r, n in zip(parts[dist.get_rank()], names, strict=False)]
    with lifted_upcasts(policy.host.model), lifted_upcasts(alone.host.model):
        stats = policy.forward_backward(RolloutBatch(own), Spread())
        wanted = alone.forward_backward(RolloutBatch([r for part in parts for r in part]), Spread())
    worst = float((stats.logprobs - stats.logprobs.clamp(max=0)).abs().sum())
    return apart(policy, alone), abs(stats.loss - wanted.loss), worst


GATHERED = list(product(WRAPS, ("unequal", "empty", "split"), ("across", "within")))


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "parts", "boundary"), GATHERED)
def test_log_probs_are_gathered_for_losses_that_ask(wrap: str, parts: str, boundary: str) -> None:
    rollouts = {"unequal": UNEQUAL, "empty": EMPTY, "split": SPLIT}[parts]
    config = DEEP if boundary == "across" else Config(boundary="within")
    for found in run_ranks(2, spread_over_ranks, WRAPS[wrap], rollouts, config):
        assert max(found) < BAR
