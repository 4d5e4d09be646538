"""Losses that read trainable tensors besides log-probs, against one ordinary backward.

A pull to the start weights reads parameters of the model, a learned coefficient is a leaf of no
model. Each leaf gets its gradient once, whatever lies in which microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from router_losses import ragged_batch, routed_model
from steps import (
    ACROSS,
    clear_gradients,
    forked_batch,
    gradients,
    relative_distance,
    small_model,
    with_options,
)
from test_logprobs import stock_values
from torch import Tensor, nn

from forkpoint import Config, Policy, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.objective import LossGradients, LossPart
from forkpoint.engine.timing import Event
from forkpoint.errors import ConfigError
from forkpoint.losses import FunctionLoss, LossBatch, LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.testing import lifted_upcasts
from lanes import slow_besides, slow_besides_every
from pairwise import pairwise

BAR = 1e-10
SCALE = 0.5
PULLED = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight")


def untrained(rollouts: Any) -> list[Rollout]:
    return [replace(rollout, loss_mask=[False] * len(rollout.token_ids)) for rollout in rollouts]


TRAINED = list(forked_batch())
BATCHES = {
    "some trained": RolloutBatch([*TRAINED[:8], *untrained(TRAINED[8:])]),
    "none trained": RolloutBatch(untrained(TRAINED)),
}
MODES = {
    "dense": Config(sharing="none", boundary="within"),
    "dense, several microbatches": Config(
        sharing="none", boundary="within", max_microbatch_tokens=40
    ),
    "within": Config(sharing="tree", boundary="within"),
    "across": ACROSS,
    "recomputed": replace(ACROSS, activations="recompute"),
    "offloaded": replace(ACROSS, activations="offload"),
    "float32 sums": replace(ACROSS, grad_accumulation_dtype="float32"),
}
READS = {"pull": (1.0, 0.0), "coefficient": (0.0, 1.0), "both": (1.0, 1.0)}


@dataclass(eq=False)
class Reading:
    """A loss of log-probs and of other tensors, additive as its decomposition says."""

    model: nn.Module
    decomposition: Any
    pull: float
    learned: float

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self.pulled: list[tuple[Tensor, Tensor]] = [
            (named[name], named[name].detach() + 0.1) for name in PULLED
        ]
        self.coefficient: Tensor = torch.tensor([0.7, -0.4], dtype=torch.float64)
        self.coefficient.requires_grad_()

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        terms = batch.trained(outputs.logprobs * batch.advantages)
        part: Any = 1.0
        if self.decomposition == "rollout":
            part = len(batch.rollout_ids) / batch.denominators.rollouts
        elif self.decomposition == "token":
            part = batch.loss_mask.double().sum() / max(1.0, batch.denominators.tokens)
        value = -batch.total(terms, "token")
        if self.learned:
            times, offset = self.coefficient
            value = times.exp() * value + part * offset**2
        if self.pull:
            value = value + part * sum((p - start).square().sum() for p, start in self.pulled)
        return value

    @property
    def as_loss(self) -> FunctionLoss:
        return FunctionLoss(self, self.decomposition)


def ordinary(loss: Reading, batch: RolloutBatch, scale: float = SCALE) -> float:
    """Leaves the gradients of one backward from the stock model's log-probs; the loss."""
    views = LossViews(batch, batch_denominators(batch), torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    value = loss(LossOutputs(logprobs=stock_values(loss.model, batch)[0]), view)
    (scale * value).backward()
    return float(value.detach())


@cache
def wrapped(family: str = "qwen3", dtype: torch.dtype = torch.float64) -> Policy:
    return wrap(small_model(family, dtype=dtype))


def distances(loss: Reading, batch: RolloutBatch, step: Callable[[], float]) -> list[float]:
    """How far a step and ordinary training are apart: parameters, the coefficient, the loss.

    Both begin with gradients from before.
    """
    model, found = loss.model, []
    for run in (step, lambda: ordinary(loss, batch)):
        for leaf in (*model.parameters(), loss.coefficient):
            leaf.grad = torch.full_like(leaf, 0.3)
        found.append((run(), gradients(model), loss.coefficient.grad))
    (one, step_gradients, step_own), (other, wanted, own) = found
    assert step_own is not None and own is not None
    return [
        relative_distance(step_gradients, wanted),
        float((step_own - own).abs().max()),
        abs(one - other),
    ]


@pytest.mark.parametrize(
    ("mode", "reads", "decomposition", "which"),
    slow_besides_every(
        2, pairwise(list(MODES), list(READS), ["joint", "rollout", "token"], list(BATCHES))
    ),
)
def test_every_leaf_gets_its_gradient_once(
    mode: str, reads: str, decomposition: str, which: str
) -> None:
    policy = with_options(wrapped(), MODES[mode])
    loss, batch = Reading(policy.host.model, decomposition, *READS[reads]), BATCHES[which]
    with lifted_upcasts(policy.host.model):
        found = distances(
            loss,
            batch,
            lambda: policy.forward_backward(batch, loss.as_loss, scale=SCALE).loss,
        )
    assert max(found) < BAR, found


class HalfDetached(Reading):
    """Log-probs of every second rollout are constants; views of these alone reach none."""

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        kept = (batch.rollout_index % 2 == 0)[batch.token_rollout]
        logprobs = outputs.logprobs.detach()
        if bool(kept.any()):
            logprobs = torch.where(kept, outputs.logprobs, logprobs)
        return super().__call__(LossOutputs(logprobs=logprobs), batch)


def test_views_that_reach_no_log_prob() -> None:
    """A microbatch whose loss reads only other tensors still passes on what others have left."""
    policy = with_options(wrapped(), ACROSS)
    loss = HalfDetached(policy.host.model, "rollout", 1.0, 1.0)
    # In segments of their own, and one within another's path.
    batch = RolloutBatch([TRAINED[n] for n in (0, 1, 2, 5, 6, 7, 11)])
    with lifted_upcasts(policy.host.model):
        found = distances(
            loss,
            batch,
            lambda: policy.forward_backward(batch, loss.as_loss, scale=SCALE).loss,
        )
    assert max(found) < BAR, found


def test_a_reward_head_of_its_own() -> None:
    """Leaves without gradients from before, one of which the loss does not reach."""
    policy = with_options(wrapped(), ACROSS)
    head = nn.Linear(1, 1, dtype=torch.float64)
    unread = torch.zeros(2, requires_grad=True)

    def rewarded(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        rewards = head(batch.rollout_mean(outputs.logprobs)[:, None])[:, 0]
        return -(rewards.sigmoid().log()).mean()

    batch = RolloutBatch(TRAINED)
    views = LossViews(batch, batch_denominators(batch), torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    with lifted_upcasts(policy.host.model):
        for part in (policy.host.model, head):
            clear_gradients(part)
        policy.forward_backward(batch, rewarded)
        found = gradients(policy.host.model), gradients(head)
        for part in (policy.host.model, head):
            clear_gradients(part)
        logprobs = stock_values(policy.host.model, batch)[0]
        rewarded(LossOutputs(logprobs=logprobs), view).backward()
    assert relative_distance(found[0], gradients(policy.host.model)) < BAR
    assert relative_distance(found[1], gradients(head)) < BAR
    assert unread.grad is None


def test_beside_a_loss_of_routers() -> None:
    model = routed_model("qwen3_moe")
    batch, router = ragged_batch(), losses.RouterLoss(load_balancing=0.7, z=0.05)
    weight = model.get_submodule("model.layers.0.mlp.gate").weight
    assert isinstance(weight, nn.Parameter)
    start, coefficient = weight.detach() + 0.1, torch.tensor(0.2, requires_grad=True)

    def pulled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return losses.GRPO()(outputs, batch) + coefficient * (weight - start).square().sum()

    policy = wrap(model, ACROSS)
    with lifted_upcasts(model):
        policy.forward_backward(batch, losses.GRPO(), router=router, scale=SCALE)
        wanted = gradients(model)
        name = "model.layers.0.mlp.gate.weight"
        wanted[name] = wanted[name] + SCALE * 0.2 * 2 * (weight.detach() - start)  # type: ignore[operator]
        clear_gradients(model)
        policy.forward_backward(batch, pulled, router=router, scale=SCALE)
    assert relative_distance(gradients(model), wanted) < 1e-7  # the coefficient is in float32
    assert coefficient.grad is not None
    assert float(coefficient.grad) == pytest.approx(
        SCALE * float((weight.detach() - start).square().sum())
    )


# A step that fails
# ------------------------------------------------------------


class Failed(Exception):
    pass


FAILING = {
    "plain": ACROSS,
    "restoring": replace(ACROSS, restore_grads=True),
    "float32 sums": MODES["float32 sums"],
}


@pytest.mark.parametrize(
    ("decomposition", "mode", "before"),
    slow_besides_every(3, product(["joint", "token"], FAILING, [True, False])),
)
def test_a_failed_step_takes_every_gradient_back(
    decomposition: str, mode: str, before: bool
) -> None:
    policy = with_options(wrapped(), FAILING[mode])
    loss = Reading(policy.host.model, decomposition, 1.0, 1.0)
    leaves = [*policy.host.model.parameters(), loss.coefficient]
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 0.3) if before else None
    held = loss.coefficient.grad

    def fail(event: Event) -> None:
        if event.text == "backward prefix 0":  # the last one
            raise Failed

    policy.observer = fail
    with pytest.raises(Failed):
        policy.forward_backward(RolloutBatch(TRAINED), loss.as_loss)
    assert policy.last_step is not None
    lost = before and mode == "plain"
    assert policy.last_step.gradients == ("cleared" if lost else "unchanged")
    for leaf in leaves:
        if before and not lost:
            assert leaf.grad is not None and bool((leaf.grad == 0.3).all())
        else:
            assert leaf.grad is None
    if before and not lost:
        assert loss.coefficient.grad is held


def test_gradients_are_added_to_the_tensors_that_are_there() -> None:
    policy = with_options(wrapped(), ACROSS)
    loss = Reading(policy.host.model, "joint", 0.0, 1.0)
    loss.coefficient.grad = torch.zeros_like(loss.coefficient)
    held = loss.coefficient.grad
    policy.forward_backward(RolloutBatch(TRAINED), loss.as_loss)
    assert loss.coefficient.grad is held and bool(held.any())


def test_a_loss_without_any_graph_is_refused_still() -> None:
    with pytest.raises(ConfigError, match="without a graph"):
        wrapped().forward_backward(RolloutBatch(TRAINED), lambda outputs, batch: torch.zeros(()))


# Verify
# ------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only log-probs are differentiated by."""

    def of(self: LossGradients, loss: Any, per_token: Any, *, counts: bool = True) -> LossPart:
        copies = {n: x.detach().requires_grad_(x.requires_grad) for n, x in per_token.items()}
        value = loss(copies)
        tensors = [x for x in copies.values() if x.requires_grad]
        found = torch.autograd.grad(value, tensors, allow_unused=True) if tensors else ()
        named = {n: g for n, g in zip(copies, found, strict=False) if g is not None}
        return LossPart(value.detach(), named)

    monkeypatch.setattr(LossGradients, "of", of)


COMPARED = [(torch.float64, "pull"), (torch.float64, "coefficient"), (torch.float32, "both")]


@pytest.mark.parametrize(
    ("dtype", "reads", "sabotage"),
    slow_besides(
        [(torch.float32, "both", False), (torch.float64, "pull", True)],
        [(*case, sabotage) for case in COMPARED for sabotage in (False, True)],
    ),
)
def test_verify_compares_the_gradients_of_every_leaf(
    dtype: torch.dtype, reads: str, sabotage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = wrapped(dtype=dtype).with_config(max_microbatch_tokens=40)
    loss = Reading(policy.host.model, "joint", *READS[reads])
    loss.coefficient.grad = torch.full_like(loss.coefficient, 0.3)
    clear_gradients(policy.host.model)
    if sabotage:
        broken(monkeypatch)
    report = policy.verify(BATCHES["some trained"], loss.as_loss)
    assert report.passed is not sabotage, report.table()
    assert all(p.grad is None for p in policy.host.model.parameters())
    assert bool((loss.coefficient.grad == 0.3).all())
    names = [entry.name for entry in report.worst]
    assert ("leaf 0 of the loss, (2,)" in names) == (reads != "pull")
    if sabotage:
        assert names[0] in (*PULLED, "leaf 0 of the loss, (2,)")
