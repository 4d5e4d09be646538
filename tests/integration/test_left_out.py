"""Rollouts and tails without gradient do not run, and gradients are those of ordinary training."""

import dataclasses
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from experts import expert_model
from host_models import lora, quiet_peft
from scenarios import EVERY as PLANS
from steps import clear_gradients, relative_distance, small_model
from test_zero_gradients import faults
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import Config, Plan, Rollout, RolloutBatch, StepStats, losses, wrap
from forkpoint.errors import ConfigError, PlanError
from forkpoint.losses import GRPO, GSPO, FunctionLoss, Loss, RouterLoss
from forkpoint.losses.zeros import zero_rollouts
from forkpoint.testing import DenseRun, dense_run, lifted_upcasts
from lanes import slow_besides

pytestmark = quiet_peft
BAR = 1e-10
PROMPTS = ([7, 22, 30, 4, 18, 51, 9], [7, 22, 30, 4, 40, 2], [7, 22, 5, 12, 33])
ZERO = {"g0": (0, 1, 2), "g1": (1,), "g2": ()}
"""By group, the rollouts whose advantages are 0."""


def batch_of(zero: str = "advantage") -> RolloutBatch:
    """Three groups that begin alike. Of the first all rollouts are zero, of the second one is.

    All but the first of a group have tails that are not trained, one a hole in its mask. The last
    group has a rollout without trained tokens, which goes on where another ends, and one of a
    single token. `zero` is what is zero, "advantage" or "weights".
    """
    rng = np.random.default_rng(3)
    rollouts = []
    for group, prompt in enumerate(PROMPTS):
        name, common = f"g{group}", rng.integers(0, 61, 2).tolist()
        for member in range(3):
            ids = prompt + common + rng.integers(0, 61, 3 + member).tolist()
            mask = np.arange(len(ids)) >= len(prompt)
            mask[len(ids) - 2 * member :] = False
            mask[len(prompt) + 1] = member < 2
            is_zero = member in ZERO[name]
            given: dict[str, Any] = {"advantage": float(rng.normal())}
            if zero == "weights":
                given["weights"] = rng.uniform(0.5, 2, len(ids))
            if is_zero:
                given[zero] = 0.0
            rollouts.append(
                Rollout(
                    ids,
                    mask,
                    old_logprobs=np.minimum(rng.normal(-4, 0.3, len(ids)), 0),
                    reference_logprobs=np.minimum(rng.normal(-4, 0.3, len(ids)), 0),
                    group_id=name,
                    rollout_id=f"{name}r{member}",
                    **given,
                )
            )
    last = rollouts[-1]
    longer = np.append(last.token_ids, [1, 2])
    for ids in (longer, longer[:1]):
        zeros = np.zeros(len(ids))
        weights = None if last.weights is None else zeros + 1
        name = f"untrained {len(ids)}"
        rollouts.append(
            Rollout(ids, zeros, 0.3, zeros, zeros, weights, group_id="g2", rollout_id=name)
        )
    return RolloutBatch(rollouts)


ADVANTAGES, WEIGHTS = batch_of(), batch_of("weights")
LEFT_OUT = ("g0r0", "g0r1", "g0r2", "g1r1")


@cache
def model() -> PreTrainedModel:
    return small_model("qwen3")


@cache
def dense_of(loss: Loss, batch: RolloutBatch) -> DenseRun:
    with lifted_upcasts(model()):
        return dense_run(model(), batch, loss)


def left_out(plan: Plan, batch: RolloutBatch) -> tuple[str, ...]:
    """Ids of rollouts that have trained tokens, of which none runs."""
    found = []
    for rollout, runs in zip(batch, plan.run_lengths.tolist(), strict=True):
        last = int(rollout.loss_mask.nonzero()[0].max(initial=0))
        assert runs in (0, last), "a rollout runs up to its last trained token"
        if runs < last:
            found.append(str(rollout.rollout_id))
    return tuple(found)


def step(loss: Any, batch: RolloutBatch, config: Config, **options: Any) -> StepStats:
    """A step that is held to ordinary training of the whole batch."""
    dense = dense_of(loss, batch)
    clear_gradients(model())
    with lifted_upcasts(model()):
        stats = wrap(model(), config).forward_backward(batch, loss, **options)
    found = {name: p.grad for name, p in model().named_parameters()}
    assert relative_distance(found, dense.gradients) < BAR
    assert abs(stats.loss - dense.loss) < BAR
    away = np.repeat(np.isin(batch.rollout_ids, left_out(stats.plan, batch)), batch.lengths)
    away_T = torch.from_numpy(away & batch.loss_mask)
    assert torch.equal(stats.logprobs.isnan(), away_T)
    assert float((stats.logprobs - dense.per_token["logprobs"])[~away_T].abs().max()) < BAR
    return stats


CONFIGS = {
    (c.sharing, c.boundary): replace(c, max_microbatch_tokens=16, self_check=False) for c in PLANS
}
TREE = CONFIGS["tree", "across"]
OF_ADVANTAGES = {
    "GRPO": GRPO(clip=0.05),
    "dual clip": GRPO(dual_clip=1.5, normalize="rollout"),
    "no clip": GRPO(clip=inf, clip_high=inf),
    "PPO": losses.PPO(),
    "DAPO": losses.DAPO(),
    "BNPO": losses.BNPO(),
    "DrGRPO": losses.DrGRPO(max_tokens=9),
    "CISPO": losses.CISPO(),
    "SAPO": losses.SAPO(),
    "GSPO": GSPO(clip=0.1, clip_high=0.2),
    "GMPO": losses.GMPO(clip=0.1, clip_high=0.2),
    "GSPO by token": GSPO(level="token", clip=0.1, clip_high=0.2),
}
OF_WEIGHTS = {
    **OF_ADVANTAGES,
    "likelihood": losses.LogLikelihood(),
    "likelihood, summed": losses.SFT(normalize="none"),
    "distillation": losses.Distillation(clip=0.2),
    "distillation, forward": losses.Distillation(direction="forward"),
}
CASES = [
    *((name, loss, ADVANTAGES) for name, loss in OF_ADVANTAGES.items()),
    *((f"{name}, weights", loss, WEIGHTS) for name, loss in OF_WEIGHTS.items()),
]
IN_CORE = {
    "GRPO": ("tree", "across"),
    "GSPO": ("tree", "mixed"),
    "GSPO by token": ("group", "within"),
    "CISPO": ("group", "across"),
    "likelihood, weights": ("none", "across"),
    "distillation, weights": ("group", "mixed"),
}
WAYS = list(CONFIGS)
EVERY = {(name, WAYS[n % len(WAYS)]) for n, (name, _, _) in enumerate(CASES)}
EVERY = sorted({*EVERY, *IN_CORE.items()})
"""Each loss with one way, and each way with several losses."""


@pytest.mark.parametrize(("name", "way"), slow_besides([*IN_CORE.items()], EVERY))
def test_gradients_are_those_of_ordinary_training(name: str, way: Any) -> None:
    _, loss, batch = next(case for case in CASES if case[0] == name)
    stats = step(loss, batch, CONFIGS[way])
    assert left_out(stats.plan, batch) == LEFT_OUT
    away = stats.plan.left_out
    assert (away.rollouts, away.groups) == (len(LEFT_OUT) + 1, 1)
    edges = batch.lengths - 1
    assert away.tokens - away.rollouts == int((edges - stats.plan.run_lengths).sum())
    # Training without sharing leaves out the same, so that this is no gain of sharing.
    assert stats.plan.dense.tokens == edges.sum() + away.rollouts - away.tokens
    assert stats.plan.bound == 1 or way[0] != "none"


# Terms that are not zero -------------------------------------------------------------------------

KEPT = {
    "a KL divergence": (GRPO(kl=0.1), ADVANTAGES),
    "an entropy bonus": (GSPO(entropy=0.1), ADVANTAGES),
    "likelihood": (losses.LogLikelihood(), ADVANTAGES),
    "distillation": (losses.Distillation(), ADVANTAGES),
    "a KL divergence beside weights": (losses.CISPO(kl=0.1), WEIGHTS),
}


@pytest.mark.parametrize("name", slow_besides(["a KL divergence", "an entropy bonus"], KEPT))
def test_terms_that_are_not_zero_run(name: str) -> None:
    loss, batch = KEPT[name]
    assert left_out(step(loss, batch, TREE).plan, batch) == ()


def some_zero(loss: Loss) -> RolloutBatch:
    """Single tokens without advantage, tokens without weight beside others without advantage, and
    advantages that cancel."""
    rng = np.random.default_rng(7)
    found = []
    for n, rollout in enumerate(ADVANTAGES):
        length = len(rollout)
        advantage, weights = rng.normal(size=length), rng.uniform(0.5, 2, length)
        even = np.cumsum(rollout.loss_mask) % 2 == 0
        if n % 4 == 0:
            advantage[even], weights[~even] = 0, 0
        elif n % 4 == 1:
            advantage[rollout.loss_mask.nonzero()[0][1:]] = 0
        elif n % 4 == 2:
            advantage = np.where(even, 1.0, -1.0)
        else:
            advantage[even] = 0
        found.append(replace(rollout, advantage=advantage, weights=weights))
    return RolloutBatch(found)


def test_tokens_of_which_some_are_zero() -> None:
    """A token's objective is its own in GRPO; in GSPO it has the advantages of all."""
    batch = some_zero(GRPO())
    mixed = tuple(str(r.rollout_id) for r in batch.rollouts[:9:4])
    assert left_out(step(GRPO(), batch, TREE).plan, batch) == mixed
    assert left_out(step(GSPO(level="token"), batch, TREE).plan, batch) == mixed
    assert left_out(step(GSPO(), batch, TREE).plan, batch) == ()


def test_pairs_are_not_left_out() -> None:
    rollouts = [r for r in ADVANTAGES if r.group_id == "g0"][:2]
    batch = RolloutBatch(
        replace(r, advantage=float(n), group_id="pair") for n, r in enumerate(rollouts)
    )
    for loss in (losses.DPO(), losses.SimPO()):
        assert not zero_rollouts(loss, batch).any()
    stats = step(losses.DPO(), batch, TREE)
    assert stats.plan.left_out.rollouts == 0 and stats.plan.left_out.tail_tokens > 0


def test_values_of_a_critic_are_not_left_out() -> None:
    critic = small_model("llama", critic=True)
    rng = np.random.default_rng(4)
    batch = RolloutBatch(
        replace(r, returns=rng.normal(size=len(r)), old_values=np.zeros(len(r)), old_logprobs=None)
        for r in ADVANTAGES
    )
    loss = losses.ValueLoss()
    with lifted_upcasts(critic):
        dense = dense_run(critic, batch, loss)
        stats = wrap(critic, TREE).forward_backward(batch, loss)
    found = {name: p.grad for name, p in critic.named_parameters()}
    assert relative_distance(found, dense.gradients) < BAR
    assert left_out(stats.plan, batch) == () and stats.plan.left_out.tail_tokens > 0
    assert not bool(stats.values.isnan().any())


# Declarations ------------------------------------------------------------------------------------


class Extra(GRPO):
    """GRPO with one term more, which knows nothing of what GRPO declares."""

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return super().__call__(outputs, batch) + batch.total(outputs.logprobs, "token")


class Renamed(GRPO):
    """GRPO."""


@dataclass(frozen=True, kw_only=True)
class TooMany(GRPO):
    """GRPO that declares rollouts of which it has terms."""

    everything: bool = False

    def zero_rollouts(self, batch: RolloutBatch) -> Any:
        return batch.where_all_trained((batch.advantages <= 0) | self.everything)


def test_a_subclass_with_terms_of_its_own_declares_for_itself() -> None:
    assert zero_rollouts(Renamed(), ADVANTAGES).any()
    assert not zero_rollouts(Extra(), ADVANTAGES).any()
    assert left_out(step(Extra(), ADVANTAGES, TREE).plan, ADVANTAGES) == ()


def test_nothing_is_known_of_a_function() -> None:
    def objective(outputs: Any, batch: Any) -> Tensor:
        return -batch.total(batch.advantages * outputs.logprobs, "token")

    loss = FunctionLoss(objective, decomposition="token")
    assert left_out(step(loss, ADVANTAGES, TREE).plan, ADVANTAGES) == ()


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_finds_a_wrong_declaration(everything: bool) -> None:
    """Also where it leaves nothing over that could be shared, and without sharing."""
    for config in (Config(), Config(sharing="none")):
        policy = wrap(small_model("qwen3"), config)
        report = policy.verify(ADVANTAGES, TooMany(everything=everything))
        assert report.verdict == "failed" and "FAILED" in report.table()
        report = policy.verify(ADVANTAGES, GRPO())
        assert report.verdict == "passed" and report.nearest.logprob_difference < BAR
        assert all(plan.counts.left_out_tokens for plan in report.plans)
        assert "left out" in report.table()


@pytest.mark.parametrize("change", [lambda found: found.astype(int), lambda found: found[1:]])
def test_what_a_loss_declares_is_checked(change: Any) -> None:
    class Wrong(GRPO):
        def zero_rollouts(self, batch: RolloutBatch) -> Any:
            return change(np.zeros(len(batch), bool))

    with pytest.raises(ConfigError, match="zero_rollouts of the loss"):
        zero_rollouts(Wrong(), ADVANTAGES)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda found: found.tolist(), "returned \\[0, 0"),
        (lambda found: found[1:], "int64 of shape"),
        (lambda found: np.append(found, 0), "int64 of shape"),
        (lambda found: found.astype(str), "of shape"),
        (lambda found: torch.tensor(found), "returned tensor"),
    ],
)
def test_what_a_loss_couples_is_checked(change: Any, what: str) -> None:
    class Wrong(Groups):
        def coupling(self, batch: RolloutBatch) -> Any:
            return change(batch.group_index)

    with pytest.raises(ConfigError, match=f"coupling of the loss .* {what}"):
        step(Wrong(), ADVANTAGES, TREE)


def test_numbers_of_coupled_rollouts_may_be_large() -> None:
    class Large(Groups):
        def coupling(self, batch: RolloutBatch) -> Any:
            return batch.group_index * 2**61 - 2**62

        zero_rollouts = Groups.zero_rollouts

    plans = [step(loss, ADVANTAGES, TREE).plan for loss in (Groups(), Large())]
    assert plans[0].events() == plans[1].events()


class Groups(Loss):
    """The square of each group's sum of advantages times log-probs, joint over groups."""

    decomposition = "joint"

    def coupling(self, batch: RolloutBatch) -> Any:
        return batch.group_index

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        sums_n = batch.rollout_sum(batch.trained(outputs.logprobs * batch.advantages))
        groups = sums_n.new_zeros(3).index_add(0, batch.group_index, sums_n)
        return groups.square().sum()

    def zero_rollouts(self, batch: RolloutBatch) -> Any:
        return batch.where_all_trained(batch.advantages == 0)


@pytest.mark.parametrize(("sharing", "boundary"), slow_besides([("tree", "across")], CONFIGS))
def test_of_coupled_rollouts_all_or_none_are_left_out(sharing: str, boundary: str) -> None:
    """In one pass and in two: where microbatches are long, and where they are short."""
    loss, batch, short = Groups(), ADVANTAGES, CONFIGS[sharing, boundary]
    for config in (short, replace(short, max_microbatch_tokens=None)):
        stats = step(loss, batch, config)
        assert left_out(stats.plan, batch) == LEFT_OUT[:3], "g1r1 is coupled with others"


# Gradients that are None, or were there before ---------------------------------------------------


NOTHING = [replace(rollout, advantage=0.0) for rollout in ADVANTAGES]


@pytest.mark.parametrize("rollouts", [NOTHING, ADVANTAGES.rollouts], ids=["all", "some"])
@pytest.mark.parametrize("loss", [GRPO(), GSPO()], ids=["GRPO", "GSPO"])
def test_parameters_get_the_zeros_of_ordinary_training(rollouts: Any, loss: Loss) -> None:
    made = small_model("llama")
    made.model.layers[0].requires_grad_(False)
    for config in (TREE, replace(TREE, grad_accumulation_dtype="float32")):
        assert not faults(made, list(rollouts), config, loss)
    stats = wrap(made, TREE).forward_backward(RolloutBatch(NOTHING), loss)
    assert stats.loss == 0 and stats.events == () and stats.computed_tokens == 0
    assert stats.plan.bound == 1 and "no rollout gives a gradient" in stats.plan.explain()


@pytest.mark.parametrize("kind", ["eager", "batched_mm", "adapters"])
def test_experts_that_only_others_choose_and_adapters(kind: str) -> None:
    """Experts lie in one parameter: those that no token chose have zeros there, in both ways."""
    made: Any = lora(small_model("qwen3"))
    if kind != "adapters":
        made = expert_model("qwen3_moe", torch.float64, num_experts=16)
        made.set_experts_implementation(kind)
    for rollouts in (ADVANTAGES.rollouts, NOTHING):
        assert not faults(made, list(rollouts), TREE)


# What needs all rollouts -------------------------------------------------------------------------


def test_log_probs_that_are_asked_for() -> None:
    stats = step(GRPO(), ADVANTAGES, replace(TREE, all_logprobs=True))
    assert left_out(stats.plan, ADVANTAGES) == () and stats.plan.left_out.tail_tokens > 0


def test_statistics_of_routers_are_of_all_tokens() -> None:
    policy = wrap(expert_model("qwen3_moe", torch.float64), TREE)
    batch, loss = ADVANTAGES, GRPO()
    assert left_out(policy.forward_backward(batch, loss).plan, batch) == LEFT_OUT
    stats = policy.forward_backward(batch, loss, expert_counts=True)
    assert stats.plan.left_out.tokens == 0 and stats.expert_counts is not None
    assert int(stats.expert_counts[0].sum()) == 2 * batch.logical_tokens
    router = RouterLoss(load_balancing=0.01, last_token=True)
    stats = policy.forward_backward(batch, loss, router=router)
    assert stats.plan.left_out.tokens == 0
    # Experts that are given are held to for all tokens, and counted for all.
    routed = RolloutBatch(
        replace(r, routed_experts=np.full((len(r), 2, 2), -1, np.int16)) for r in batch
    )
    stats = policy.forward_backward(routed, loss)
    assert stats.plan.left_out.tokens == 0 and stats.routes is not None


# Plans -------------------------------------------------------------------------------------------


def test_a_plan_is_of_what_its_loss_needs() -> None:
    policy, batch = wrap(model(), TREE), ADVANTAGES
    small, whole = policy.plan(batch, GRPO()), policy.plan(batch)
    assert left_out(small, batch) == LEFT_OUT and left_out(whole, batch) == ()
    step(GRPO(), batch, TREE, plan=small)
    # One that runs more than a call needs is exact as well.
    assert left_out(step(GRPO(), batch, TREE, plan=whole).plan, batch) == ()
    more = policy.plan(batch, GSPO(kl=0.1))
    assert left_out(step(GSPO(), batch, TREE, plan=more).plan, batch) == ()
    refused = "this plan runs 0 tokens of rollout 'g0r0', and this call needs"
    for loss in (GRPO(kl=0.1), losses.LogLikelihood()):
        with pytest.raises(PlanError, match=refused):
            policy.forward_backward(batch, loss, plan=small)
    for call in (policy.score, policy.logprobs):
        with pytest.raises(PlanError, match=f"{refused}.* and more of 3 others"):
            call(batch, plan=small)
    with pytest.raises(PlanError, match=refused):
        policy.with_config(all_logprobs=True).forward_backward(batch, GRPO(), plan=small)


def test_a_plan_says_what_gives_no_gradient() -> None:
    plan = wrap(model(), TREE).plan(ADVANTAGES, GRPO())
    text = plan.explain()
    assert "rollouts (whole groups) without gradient, not run" in text and "5 (1)" in text
    stats = step(GRPO(), ADVANTAGES, TREE)
    assert f"({plan.left_out.tokens} without gradient left out)" in repr(stats)


def test_every_policy_loss_says_when_it_is_zero() -> None:
    """One that is added has to decide, and stand above."""
    known = {type(loss) for loss in OF_ADVANTAGES.values()}
    made = {getattr(losses, name) for name in losses.__all__}
    policies = {
        kind for kind in made
        if dataclasses.is_dataclass(kind) and issubclass(kind, losses.PolicyLoss)
    }  # fmt: skip
    assert policies - {losses.PolicyLoss} == known
