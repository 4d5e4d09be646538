"""Calls of a policy on ranks: scores, log-probs, functions as losses, and what is refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import Case, check, named, over_all, over_replicas, through_function
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    UNEQUAL,
    Scenario,
    distance,
    gradients,
    group,
    model_of,
    on_ranks,
    own_loss,
    replicated,
    said,
    sharded,
    through_logprobs,
)
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.losses import GRPO, GSPO, Denominators, Loss
from forkpoint.testing import lifted_upcasts, tiny_model

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
    return (on_ranks(wrap(model_of(scenario)), config), forkpoint.wrap(model_of(scenario), config))


def apart(policy: forkpoint.Policy, alone: forkpoint.Policy) -> float:
    names = [name for name, _ in alone.host.model.named_parameters()]
    return distance(gradients(policy.host.model), gradients(alone.host.model), names)


# Scores, log-probs and functions, each rank's own
# ------------------------------------------------------------

CASES = {
    f"{what}, {name}": Case(rollouts=rollouts, step=call, hold=hold)
    for name, hold in (("fully_shard", over_all), ("DDP", over_replicas))
    for what, call, rollouts in (
        ("a function", through_function, UNEQUAL),
        ("log-probs", through_logprobs, UNEQUAL),
        ("log-probs, a rank without", through_logprobs, EMPTY),
    )
}


@named(CASES, "a function, fully_shard")
def test_gradients_are_means_over_ranks(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


def other_losses(wrap: Any) -> tuple[float, float]:
    """How far off denominators that are given are, and gradients of a batch of zeros."""
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    policy, alone = policies(wrap)
    given = Denominators(tokens=1000, rollouts=30, groups=4)
    policy.forward_backward(own, GRPO(), denominators=given, scale=0.5)
    whole = RolloutBatch([r for part in UNEQUAL for r in part])
    alone.forward_backward(whole, GRPO(), denominators=given, scale=0.5)
    off = apart(policy, alone)
    policy.host.model.zero_grad()
    policy.forward_backward(RolloutBatch([Rollout(list(range(9)), [0] * 9, 0.0)]), GRPO())
    zeros = gradients(policy.host.model).values()
    return off, sum(1.0 if g is None else float(g.abs().sum()) for g in zeros)


@sharded_first
def test_denominators_that_are_given_and_nothing_trained(wrap: Any) -> None:
    for off, zeros in run_ranks(2, other_losses, wrap):
        assert off < BAR and zeros == 0


# Refusals, the same on all ranks
# ------------------------------------------------------------


def bad_rollout(wrap: Any) -> tuple[str, bool, float]:
    policy, alone = policies(wrap)
    rollouts = UNEQUAL[dist.get_rank()]
    if dist.get_rank() == 1:
        rollouts = [Rollout([1, 2, 10**6], [0, 1, 1], 1.0)]
    found = said(lambda: policy.forward_backward(RolloutBatch(rollouts), GRPO()))
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


def other_calls() -> str:
    policy, _ = policies(sharded)
    own = RolloutBatch(UNEQUAL[dist.get_rank()])
    if dist.get_rank():
        return said(lambda: policy.score(own))
    return said(lambda: policy.forward_backward(own, GSPO()))


def test_ranks_that_call_something_else_are_told() -> None:
    for found in run_ranks(2, other_calls):
        assert found.startswith("RankError: the ranks make different calls")
        assert "score" in found and "GSPO" in found


def scaled_apart() -> tuple[str, bool, float]:
    """The error of a loss with another scale on each rank; that of a function, whose gradients are
    means over ranks, is taken."""
    policy, alone = policies(replicated)
    rank, parts = dist.get_rank(), [RolloutBatch(part) for part in UNEQUAL]
    error = said(lambda: policy.forward_backward(parts[rank], GRPO(), scale=1.0 + rank))
    clean = all(p.grad is None for p in policy.host.model.parameters())
    with lifted_upcasts(policy.host.model), lifted_upcasts(alone.host.model):
        policy.forward_backward(parts[rank], own_loss, scale=1.0 + rank)
        for n, part in enumerate(parts):
            alone.forward_backward(part, own_loss, scale=(1.0 + n) / 2)
    return error, clean, apart(policy, alone)


def test_a_loss_has_one_scale_on_all_ranks() -> None:
    for error, clean, difference in run_ranks(2, scaled_apart):
        assert error.startswith("RankError: the ranks scale one loss differently: rank 0 by 1, ")
        assert "rank 1 by 2." in error
        assert clean and difference < BAR


def trained_apart(wrap: Any) -> list[tuple[str, bool]]:
    """Errors of calls in which each rank trains another layer."""
    policy, _ = policies(wrap)
    model, own = policy.host.model, RolloutBatch(UNEQUAL[dist.get_rank()])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"layers.{dist.get_rank()}." in name)
    calls = (
        lambda: policy.forward_backward(own, GRPO()),
        lambda: policy.logprobs(own).sum().backward(),
        lambda: policy.score(own),
    )
    return [(said(call), all(p.grad is None for p in model.parameters())) for call in calls]


@pytest.mark.parametrize("wrap", WRAPS)
def test_ranks_that_train_other_parameters_are_told(wrap: str) -> None:
    """Reduced gradients would be sums over different layers, without an error where their sizes
    are equal."""
    for step, halves, score in run_ranks(2, trained_apart, WRAPS[wrap]):
        for error, clean in (step, halves):
            assert error.startswith("RankError: ranks 0 and 1 train different parameters")
            assert "same seed" in error and clean
        assert score == ("", True)


def of_two_sizes(wrap: Any, sizes: dict[str, tuple[int, int]]) -> str:
    """Error of a step in which each rank has another model."""
    own = {name: size[dist.get_rank()] for name, size in sizes.items()}
    policy = on_ranks(wrap(tiny_model("qwen3", **own)), DEEP)
    return said(lambda: policy.score(RolloutBatch(UNEQUAL[dist.get_rank()])))


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": (2, 3)}, {"intermediate_size": (48, 64)}])
def test_ranks_that_hold_different_models_are_told(sizes: dict[str, tuple[int, int]]) -> None:
    for found in run_ranks(2, of_two_sizes, sharded, sizes):
        assert found.startswith("RankError: ranks 0 and 1 hold different parameters")


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
    return said(lambda: policy.forward_backward(RolloutBatch(parts[dist.get_rank()]), loss))


@pytest.mark.parametrize("of_groups", [True, False])
def test_losses_that_couple_rollouts_of_two_ranks_are_refused(of_groups: bool) -> None:
    given = (OfGroups(), SPLIT) if of_groups else (OfAll(), UNEQUAL)
    what = "1 of the groups" if of_groups else "couples rollouts of different groups"
    for found in run_ranks(2, coupled_over_ranks, *given):
        assert what in found


def refused() -> list[str]:
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

    return [said(work) for work in (rounded, offloaded, first_kind, wide_sums)]


def test_what_is_not_exact_is_refused_with_a_remedy() -> None:
    for found in run_ranks(2, refused):
        rounded, offloaded, first_kind, wide_sums = found
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
