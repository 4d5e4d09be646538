"""Losses on ranks that read trainable tensors besides log-probs."""

from dataclasses import replace
from pathlib import Path
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
    Scenario,
    distance,
    gradients,
    model_of,
    on_ranks,
    replicated,
    sharded,
)
from split_models import Split, load
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.engine.objective import LossGradients
from forkpoint.engine.objective import LossPart as LossPart
from forkpoint.errors import RankError, UnsupportedError
from forkpoint.losses import GRPO, Loss
from forkpoint.testing import lifted_upcasts
from versions import needs_splits

SCALE = 0.5
PULLED = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight")
UNTRAINED = (
    [replace(rollout, loss_mask=[0] * len(rollout.token_ids)) for rollout in UNEQUAL[0]],
    UNEQUAL[1],
)


def head_alone(model: Any) -> Any:
    fully_shard(model.lm_head)
    return sharded(model)


WRAPS = {
    "fully_shard": (sharded, "microbatch"),
    "fully_shard, gathered once": (sharded, "step"),
    "DistributedDataParallel": (replicated, "microbatch"),
}
HEAD_ALONE = {**WRAPS, "the head alone": (head_alone, "microbatch")}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


class Reading:
    """A loss of a rank's own: a policy gradient, a learned coefficient, a pull to the start."""

    def __init__(self, model: Any) -> None:
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        self.pulled = [(named[n], local(named[n]).detach() + 0.1) for n in PULLED]
        self.coefficient = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        value = -batch.total(batch.trained(outputs.logprobs * batch.advantages), "token")
        times, offset = self.coefficient
        # Each rank's value has its own part of the pull, where it holds shards.
        pull = sum((local(p) - start).square().sum() for p, start in self.pulled)
        return times.exp() * value + offset**2 + pull


class OfTheRank(Reading):
    """Its pull is another on each rank."""

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        times = 1 + batch.advantages.square().sum()
        return super().__call__(outputs, batch) + times * self.pulled[1][0].square().sum()


class Everyones(Reading, Loss):
    """The same as a part of one loss of all ranks, without the pull."""

    decomposition = "rollout"

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        value = -batch.total(batch.trained(outputs.logprobs * batch.advantages), "token")
        times, offset = self.coefficient
        return times.exp() * value + len(batch.rollout_ids) / batch.denominators.rollouts * offset


class Gathered(Everyones):
    """Computed on every rank from the log-probs of all; one rank counts."""

    decomposition = "joint"
    across_ranks = True


class PulledTogether(Gathered):
    """It reads parameters as well."""

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return Reading.__call__(self, outputs, batch)


class Pulling(Everyones):
    """It reads shards as well."""

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return Reading.__call__(self, outputs, batch)


def beside_one_process(wrap: str, rollouts: Any, kind: type[Reading]) -> tuple[float, float]:
    """Distances of parameters' gradients and the coefficient's."""
    around, gather = WRAPS[wrap]
    model, other = model_of(Scenario()), model_of(Scenario())
    names = [name for name, _ in model.named_parameters()]
    rank, mean = dist.get_rank(), not issubclass(kind, Loss)
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = on_ranks(around(model), DEEP, gather)  # type: ignore[arg-type]
        loss = kind(policy.host.model)
        policy.forward_backward(RolloutBatch(rollouts[rank]), loss, scale=SCALE)
        alone, wanted = forkpoint.wrap(other, DEEP), kind(other)
        parts = rollouts if mean else [[r for part in rollouts for r in part]]
        own = torch.zeros_like(wanted.coefficient)
        for number, part in enumerate(parts):
            wanted.coefficient.grad = None
            if part:
                alone.forward_backward(RolloutBatch(part), wanted, scale=SCALE)
            if number == rank or not mean:
                own = wanted.coefficient.grad
        for parameter in other.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(parts)
    found = loss.coefficient.grad
    if not mean:
        found = torch.zeros_like(own) if found is None else found
        dist.all_reduce(found)
    error = distance(gradients(policy.host.model), gradients(other), names)
    if found is None or own is None:
        return error, float(found is not own)
    return error, float((found - own).abs().max())


CASES = {
    "trained on both": (UNEQUAL, Reading),
    "trained on one": (UNTRAINED, Reading),
    "a loss of all ranks": (UNEQUAL, Everyones),
    "a loss of all ranks, of which one has none": (EMPTY, Everyones),
    "a loss that gathers": (UNEQUAL, Gathered),
}
IN_CORE = [("fully_shard", "trained on one")]


@pytest.mark.parametrize(
    ("wrap", "case"),
    [
        pytest.param(w, c, marks=() if (w, c) in IN_CORE else pytest.mark.slow)
        for w in WRAPS
        for c in CASES
    ],
)
def test_gradients_of_every_leaf_are_those_of_one_process(wrap: str, case: str) -> None:
    for errors in run_ranks(2, beside_one_process, wrap, *CASES[case]):
        assert max(errors) < BAR, errors


@pytest.mark.parametrize("rollouts", [UNEQUAL, pytest.param(EMPTY, marks=pytest.mark.slow)])
def test_parameters_that_a_wrapper_reduces_are_averaged(rollouts: Any) -> None:
    """A rank without rollouts does not call the loss."""
    found = run_ranks(2, beside_one_process, "DistributedDataParallel", rollouts, OfTheRank)
    assert max(map(max, found)) < BAR, found


@pytest.mark.slow
def test_parameters_in_a_loss_that_gathers_count_once() -> None:
    found = run_ranks(2, beside_one_process, "DistributedDataParallel", UNEQUAL, PulledTogether)
    assert max(map(max, found)) < BAR, found


def pulled_by_all(wrap: str) -> str:
    around, gather = WRAPS[wrap]
    policy = on_ranks(around(model_of(Scenario())), DEEP, gather)  # type: ignore[arg-type]
    loss = Pulling(policy.host.model)
    try:
        policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), loss)
    except UnsupportedError as error:
        assert all(p.grad is None for p in policy.host.model.parameters())
        assert loss.coefficient.grad is None
        return str(error)
    return ""


@pytest.mark.slow
def test_shards_in_a_loss_of_all_ranks_are_refused() -> None:
    for message in run_ranks(2, pulled_by_all, "fully_shard"):
        assert "holds a shard" in message and "as a function" in message


def of_a_split_model(folder: Path) -> tuple[float, float, str]:
    """Distances from one process, and what is said of a parameter whose gradients are parts."""
    found = []
    for options in ({"tp_size": 2}, {}):
        model = load(folder, Split(), **options)
        norm, q_norm = model.model.norm.weight, model.model.layers[0].self_attn.q_norm.weight
        coefficient = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def reading(outputs: Any, batch: Any, of: Any = norm, times: Any = coefficient) -> Tensor:
            terms = batch.trained(outputs.logprobs * batch.advantages)
            return times * -batch.total(terms, "token") + local(of).square().sum()

        policy = forkpoint.wrap(model, DEEP)
        policy.forward_backward(RolloutBatch(UNEQUAL[0]), reading, scale=SCALE)
        found.append((gradients(model), coefficient.grad))
        if options:
            with pytest.raises(UnsupportedError) as caught:
                policy.forward_backward(
                    RolloutBatch(UNEQUAL[0]), lambda o, b, of=q_norm: reading(o, b, of)
                )
    (one, own), (other, wanted) = found
    assert own is not None and wanted is not None
    error = distance(one, other, list(other))
    return error, float((own - wanted).abs()), str(caught.value)


@needs_splits
@pytest.mark.slow
def test_split_models(tmp_path: Path) -> None:
    for error, own, message in run_ranks(2, of_a_split_model, Split().save(tmp_path)):
        assert error < BAR and own < BAR
        assert "computes a part of the gradient" in message


def failing(wrap: str) -> list[bool]:
    """Whether each gradient is as before where a rank fails after its loss's backward."""
    around, gather = WRAPS[wrap]
    policy = on_ranks(around(model_of(Scenario())), DEEP, gather)  # type: ignore[arg-type]
    policy = policy.with_config(restore_grads=True)
    loss = Reading(policy.host.model)
    leaves = [*policy.host.model.parameters(), loss.coefficient]
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 0.3)

    def reading(outputs: Any, batch: Any) -> Tensor:
        if dist.get_rank():
            outputs.logprobs.register_hook(fail)  # the pull's gradients are there by then
        return loss(outputs, batch)

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if dist.get_rank() else RankError):
        policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), reading)
    return [leaf.grad is not None and bool((local(leaf.grad) == 0.3).all()) for leaf in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_failure_on_one_rank_leaves_every_gradient_on_all(wrap: str) -> None:
    for rank in run_ranks(2, failing, wrap):
        assert all(rank)


def verified(wrap: str, sabotage: bool) -> tuple[bool, list[str], bool]:
    around, gather = WRAPS[wrap]
    policy = on_ranks(around(model_of(Scenario())), DEEP, gather)  # type: ignore[arg-type]
    loss = Reading(policy.host.model)
    if sabotage and dist.get_rank():
        of = LossGradients._of_model
        LossGradients._of_model = lambda self, leaves: of(self, leaves[1:])  # type: ignore[method-assign]
    report = policy.verify(RolloutBatch(UNTRAINED[dist.get_rank()]), loss)
    clean = all(p.grad is None for p in (*policy.host.model.parameters(), loss.coefficient))
    return report.passed, [entry.name for entry in report.worst], clean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "sabotage"),
    [(w, s) for w in ("fully_shard", "DistributedDataParallel") for s in (False, True)],
)
def test_verify_compares_every_leaf_on_ranks(wrap: str, sabotage: bool) -> None:
    for passed, names, clean in run_ranks(2, verified, wrap, sabotage):
        assert passed is not sabotage and clean
        assert "leaf 0 of the loss, (2,)" in names


# Calls of the model within a step
# ------------------------------------------------------------


def calling(wrap: str) -> tuple[int, float]:
    """One rank's loss calls the model: how many calls were refused, and how far gradients are
    from those without calls."""
    around, gather = HEAD_ALONE[wrap]
    wrapped = around(model_of(Scenario()))
    inner: Any = wrapped.module if wrap == "DistributedDataParallel" else wrapped
    policy = on_ranks(wrapped, DEEP, gather)  # type: ignore[arg-type]
    batch, refused = RolloutBatch(UNEQUAL[dist.get_rank()]), 0
    policy.forward_backward(batch, GRPO())
    names = [name for name, _ in inner.named_parameters()]
    wanted = gradients(inner)
    inner.zero_grad()
    ids, hidden = torch.tensor([[1, 2, 3]]), torch.zeros(1, 3, 32, dtype=torch.float64)
    calls = (
        lambda: wrapped(input_ids=ids),
        lambda: inner(input_ids=ids),
        lambda: inner.model.layers[0](hidden, position_embeddings=(hidden[..., :8],) * 2),
        lambda: inner.lm_head(hidden),
    )

    class Calling(GRPO):
        def __call__(self, outputs: Any, view: Any) -> Tensor:
            nonlocal refused
            for call in calls if dist.get_rank() else ():
                try:
                    call()
                except UnsupportedError:
                    refused += 1
            return super().__call__(outputs, view)

    policy.forward_backward(batch, Calling())
    return refused, distance(gradients(inner), wanted, names)


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(w, marks=() if w == "fully_shard" else pytest.mark.slow) for w in HEAD_ALONE],
)
def test_calls_of_the_model_within_a_step_communicate_nothing(wrap: str) -> None:
    (none, one), (refused, other) = run_ranks(2, calling, wrap)
    assert none == 0 and refused and refused % 4 == 0
    assert max(one, other) < BAR
