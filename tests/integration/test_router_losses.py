"""Router losses and counts of experts, shared and in ordinary training."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from experts import expert_model
from router_losses import (
    VOCAB,
    Ordinary,
    gradient_error,
    ordinary_training,
    parts_of,
    ragged_batch,
    routed_model,
)
from steps import model_state, with_options
from torch import nn
from transformers import PreTrainedModel

from forkpoint import Config, Policy, Rollout, RolloutBatch, wrap
from forkpoint.errors import ConfigError, PlanError, UnsupportedError
from forkpoint.hosts.entry import ExpertCounts
from forkpoint.losses import DPO, GRPO, GSPO, RouterLoss
from forkpoint.losses.base import Loss
from forkpoint.testing import ReadOnlyHook, lifted_upcasts
from lanes import slow_besides
from versions import NOT_RECORDED, OLDER, checkpoint_blocks

BAR = 1e-10
LOAD_BALANCING, Z = 0.7, 0.05
BATCH = ragged_batch()
PARTS = [[0, 5, 2], [1, 3, 4, 6]]
ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=12)
MODES = {
    "dense": Config(sharing="none"),
    "within": Config(sharing="tree", boundary="within"),
    "cut trees": Config(sharing="group", boundary="within", max_microbatch_tokens=20),
    "across": ACROSS,
    "recompute": replace(ACROSS, sharing="group", activations="recompute"),
    "offload": replace(ACROSS, activations="offload", checkpointing="full"),
    "float32 sums": replace(ACROSS, grad_accumulation_dtype="float32"),
}
ACCOUNTS: list[tuple[Any, bool]] = [("batch", True), ("rollout", False), (PARTS, True)]
WITH_LOSS = (
    *("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"),
    *("granitemoe", "granitemoehybrid"),
)
BY_BIAS = ("glm4_moe", "deepseek_v3")


def ordinary(
    model: PreTrainedModel, scope: Any = "batch", *, last_token: bool = True, **changes: Any
) -> Ordinary:
    options: dict[str, Any] = {"load_balancing": LOAD_BALANCING, "z": Z, "loss": GRPO(), **changes}
    batch = options.pop("batch", BATCH)
    with lifted_upcasts(model):
        return ordinary_training(
            model,
            batch,
            options.pop("loss"),
            parts=parts_of(scope, batch),
            last_token=last_token,
            **options,
        )


@cache
def tiny() -> PreTrainedModel:
    return routed_model("qwen3_moe")


def step_faults(
    policy: Policy,
    model: nn.Module,
    wanted: Ordinary,
    router: RouterLoss,
    *,
    batch: RolloutBatch = BATCH,
    loss: Loss | None = None,
    **changes: Any,
) -> list[str]:
    """Differences of a step from ordinary training."""
    model.zero_grad()
    with lifted_upcasts(model):
        stats = policy.forward_backward(batch, loss or GRPO(), router=router, **changes)
    assert stats.router_loss is not None and stats.expert_counts is not None
    found = {
        "loss": abs(stats.loss - wanted.loss),
        "router loss": abs(stats.router_loss - wanted.router_loss) / max(1, wanted.router_loss),
        "gradient": gradient_error(model, wanted.gradients),
        "counts": 0.0 if torch.equal(stats.expert_counts, wanted.counts_LE) else math.inf,
    }
    model.zero_grad()
    return [f"{name} off by {error:.1e}" for name, error in found.items() if not error <= BAR]


@pytest.mark.parametrize("family", slow_besides(["qwen3_moe"], WITH_LOSS))
def test_router_losses_equal_ordinary_training(family: str) -> None:
    model = routed_model(family)
    faults = []
    policy = wrap(model)
    truth: dict[int, Ordinary] = {}
    for number, mode in enumerate(MODES):
        account = number % len(ACCOUNTS)
        scope, last_token = ACCOUNTS[account]
        if account not in truth:
            truth[account] = ordinary(model, scope, last_token=last_token)
        router = RouterLoss(LOAD_BALANCING, Z, scope=scope, last_token=last_token)
        found = step_faults(with_options(policy, MODES[mode]), model, truth[account], router)
        faults += [f"{mode}, {scope}, last {last_token}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("loss", slow_besides([GSPO()], [GSPO(), DPO()]), ids=type)
def test_with_losses_that_couple_rollouts(loss: Loss) -> None:
    batch = BATCH
    if isinstance(loss, DPO):
        pairs = [(0, 1), (4, 6), (2, 5)]
        batch = RolloutBatch(
            Rollout(
                BATCH[i].token_ids,
                BATCH[i].loss_mask,
                1.0 - side,
                reference_logprobs=[-3.0] * len(BATCH[i].token_ids),
                group_id=group,
            )
            for group, pair in enumerate(pairs)
            for side, i in enumerate(pair)
        )
    wanted = ordinary(tiny(), loss=loss, batch=batch)
    router = RouterLoss(LOAD_BALANCING, Z)
    policy = wrap(tiny(), ACROSS)
    assert not step_faults(policy, tiny(), wanted, router, loss=loss, batch=batch)


def frozen_routers(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        frozen = "gate.weight" in name or "embed" in name or "layers.0" in name
        parameter.requires_grad_(not frozen)


def checkpointed(model: PreTrainedModel) -> None:
    checkpoint_blocks(model, use_reentrant=False)


def nothing(model: PreTrainedModel) -> None:
    """Leave the model as it is."""


@pytest.mark.parametrize(
    ("change", "sizes"),
    slow_besides(
        [(checkpointed, {})],
        [
            (frozen_routers, {}),
            (checkpointed, {}),
            (nothing, {"mlp_only_layers": [1]}),
            (nothing, {"mlp_only_layers": [0]}),
        ],
    ),
)
def test_models_in_other_states(
    change: Callable[[PreTrainedModel], None], sizes: dict[str, Any]
) -> None:
    model = routed_model("qwen3_moe", **sizes)
    change(model)
    wanted = ordinary(model)
    assert not step_faults(wrap(model, ACROSS), model, wanted, RouterLoss(LOAD_BALANCING, Z))


@pytest.mark.parametrize("mode", ["across", "offload"])
def test_nothing_of_the_model_is_changed(mode: str) -> None:
    model = routed_model("qwen3_moe", output_router_logits=True)
    policy = wrap(model, MODES[mode])
    model(torch.tensor([[1, 2]]))  # transformers adds hooks at a model's first forward
    before = model_state(model)
    policy.forward_backward(BATCH, GRPO(), router=RouterLoss())
    policy.score(BATCH, expert_counts=True)
    assert model_state(model) == before
    model.zero_grad()
    with pytest.raises(ConfigError, match="choices in layer 0"):
        policy.forward_backward(
            BATCH, GRPO(), router=RouterLoss(), router_counts=torch.ones(2, 8).long()
        )
    assert model_state(model) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not OLDER, reason="a version of transformers that records them")
@pytest.mark.parametrize("family", NOT_RECORDED)
def test_models_whose_routers_are_not_recorded_are_refused(family: str) -> None:
    model = expert_model(family, torch.float64, vocab_size=VOCAB)
    with pytest.raises(UnsupportedError, match="no routers whose logits this transformers"):
        wrap(model).forward_backward(BATCH, GRPO(), router=RouterLoss(load_balancing=0.1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("config", [Config(), ACROSS], ids=["within", "across"])
def test_the_loss_without_gradients(config: Config) -> None:
    model, router = tiny(), RouterLoss(LOAD_BALANCING, Z, scope=PARTS)
    wanted, policy = ordinary(model, PARTS).router_loss, wrap(model, config)
    with lifted_upcasts(model):
        scores = policy.score(BATCH, router=router)
    assert scores.router_loss == pytest.approx(wanted, rel=BAR)
    assert policy.score(BATCH, expert_counts=True).router_loss is None


# Counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_besides(["deepseek_v3"], (*WITH_LOSS, *BY_BIAS)))
def test_counts_are_those_of_ordinary_training(family: str) -> None:
    """Microbatches that run once, and those that run again for their activations."""
    model = routed_model(family)
    wanted = ordinary(model, load_balancing=0.0, z=0.0)
    policy = wrap(model)
    for config in (MODES["within"], MODES["recompute"], MODES["dense"]):
        here = with_options(policy, config)
        with lifted_upcasts(model):
            stats = here.forward_backward(BATCH, GRPO(), expert_counts=True)
            scores = here.score(BATCH, expert_counts=True)
        assert stats.router_loss is None
        for found in (stats, scores):
            assert found.expert_counts is not None and found.computed_expert_counts is not None
            assert torch.equal(found.expert_counts, wanted.counts_LE)
            assert found.rollout_expert_counts is not None
            assert torch.equal(found.rollout_expert_counts.sum(0), wanted.counts_LE)
            computed = found.computed_expert_counts.sum(-1) // 2
            assert (computed == found.plan.computed_tokens).all()
        assert (stats.plan.computed_tokens < BATCH.logical_tokens) == (config.sharing != "none")
    model.zero_grad()


@pytest.mark.parametrize("family", slow_besides(["deepseek_v3"], BY_BIAS))
def test_updates_of_biases_are_those_of_ordinary_training(family: str) -> None:
    models = [routed_model(family) for _ in range(2)]
    start = [router.clone() for router in biases_of(models[0])]
    ours, stock = models
    policy = wrap(ours, ACROSS)
    rounding = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    with lifted_upcasts(ours):
        for seed in range(2):
            batch = ragged_batch(seed)
            stats = policy.forward_backward(batch, GRPO(), expert_counts=True)
            rounding[0].step()
            rounding[0].zero_grad()
            assert stats.expert_counts is not None
            policy.update_router_biases(stats.expert_counts, rate=0.01)
            every = [list(range(len(batch)))]
            wanted = ordinary_training(stock, batch, GRPO(), load_balancing=0, z=0, parts=every)
            for name, parameter in stock.named_parameters():
                parameter.grad = wanted.gradients[name]
            rounding[1].step()
            for bias, counts_E in zip(biases_of(stock), wanted.counts_LE.double(), strict=True):
                bias += 0.01 * torch.sign(counts_E.mean() - counts_E)
    for before, mine, theirs in zip(start, biases_of(ours), biases_of(stock), strict=True):
        assert torch.equal(mine, theirs) and not torch.equal(mine, before)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < BAR
    counts = torch.arange(8).expand(len(start), 8)
    policy.update_router_biases(counts, rate=0.5, centered=True)
    for mine, theirs in zip(biases_of(ours), biases_of(stock), strict=True):
        assert torch.allclose(mine - theirs, torch.tensor([0.5] * 4 + [-0.5] * 4).double())
    policy.update_router_biases(counts.clamp(max=1), rate=0.5, centered=True)
    for mine, theirs in zip(biases_of(ours), biases_of(stock), strict=True):
        assert abs(float((mine - theirs).sum())) < BAR
        assert float(mine[0] - theirs[0]) == pytest.approx(0.5 + 0.875)


def biases_of(model: nn.Module) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True], ids=["asked", "always"])
def test_a_plan_for_counts(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that count experts in training count in any step, without last tokens."""
    monkeypatch.setattr(ExpertCounts, "kept", kept)
    rollouts = [Rollout([5, 8, 3, 9, 4, n], [0, 0, 0, 1, 0, 0], float(n)) for n in range(2)]
    policy, asked = wrap(tiny()), not kept
    plan = policy.plan(rollouts, GRPO(), expert_counts=asked)
    stats = policy.forward_backward(rollouts, GRPO(), plan=plan, expert_counts=asked)
    assert stats.expert_counts is not None
    assert stats.expert_counts.sum(1).tolist() == [2 * 2 * (6 - kept)] * 2
    with pytest.raises(PlanError, match="this plan "):
        policy.forward_backward(rollouts, GRPO(), plan=policy.plan(rollouts), expert_counts=asked)


def test_counts_that_are_given_take_no_pass() -> None:
    policy = wrap(tiny(), ACROSS)
    for scope, last_token in ACCOUNTS[:2]:
        router = RouterLoss(LOAD_BALANCING, Z, scope=scope, last_token=last_token)
        own = policy.plan(BATCH, GRPO(), router=router)
        assert own.program.has_scores
        with lifted_upcasts(tiny()):
            scores = policy.score(BATCH, router=router)
        counts = scores.expert_counts if scope == "batch" else scores.rollout_expert_counts
        given = policy.plan(BATCH, GRPO(), router=router, router_counts=counts)
        assert own.counts_first and not given.counts_first
        assert "with the pass that counts experts" in own.explain()
        assert "counts experts" not in given.explain()
        assert not given.program.has_scores
        assert given.cost < own.cost
        wanted = ordinary(tiny(), scope, last_token=last_token)
        assert not step_faults(policy, tiny(), wanted, router, router_counts=counts)
        assert not step_faults(policy, tiny(), wanted, router, plan=own)


def test_statistics_of_one_microbatch_take_no_pass() -> None:
    within = wrap(tiny(), MODES["within"])
    assert not within.plan(BATCH, GRPO(), router=RouterLoss(1.0)).program.has_scores
    cut = wrap(tiny(), MODES["cut trees"])
    assert cut.plan(BATCH, GRPO(), router=RouterLoss(1.0)).program.has_scores
    by_rollout = RouterLoss(1.0, scope="rollout")
    assert not cut.plan(BATCH, GRPO(), router=by_rollout).program.has_scores
    across = wrap(tiny(), ACROSS)
    assert not across.plan(BATCH, GRPO(), router=RouterLoss(0.0, z=1.0)).program.has_scores


def test_prefixes_end_in_the_router_of_the_last_block() -> None:
    model = routed_model("qwen3_moe")
    ran: list[int] = []
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    experts.register_forward_hook(ReadOnlyHook(lambda *_: ran.append(1)))
    rng = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 61, (11,), generator=rng).tolist()
    batch = RolloutBatch(
        [Rollout([*prompt, i, i + 1], [0] * 11 + [1, 1], 1.0, group_id=0) for i in range(3)]
    )
    policy = wrap(model, Config(sharing="group", boundary="across", max_microbatch_tokens=10))
    plan = policy.plan(batch, GRPO(), router=RouterLoss(1.0))
    assert [m.num_loss_entries for m in plan.microbatches].count(0) == 1
    policy.forward_backward(batch, GRPO(), router=RouterLoss(1.0))  # with the sample's own runs
    ran.clear()
    policy.forward_backward(batch, GRPO(), router=RouterLoss(1.0))
    forwards = sum(not event.startswith("backward") for event in plan.events())
    assert len(ran) == forwards - 2  # the prefix's score and its forward


def test_scale_multiplies_its_gradients_and_not_its_value() -> None:
    model, policy, router = tiny(), wrap(tiny(), ACROSS), RouterLoss(LOAD_BALANCING, Z)
    wanted = ordinary(model)
    model.zero_grad()
    with lifted_upcasts(model):
        stats = policy.forward_backward(BATCH, GRPO(), router=router, scale=0.25)
    assert stats.router_loss is not None and abs(stats.router_loss - wanted.router_loss) < BAR
    quarter = {n: None if g is None else g / 4 for n, g in wanted.gradients.items()}
    assert gradient_error(model, quarter) < BAR
    model.zero_grad()


def test_the_model_s_own_coefficient() -> None:
    model = routed_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    wanted = ordinary(model, load_balancing=0.3, z=0.0)
    policy = wrap(model, ACROSS)
    assert not step_faults(policy, model, wanted, RouterLoss())
    assert model.config.output_router_logits is True
    # Without the flag there is none.
    with lifted_upcasts(tiny()):
        stats = wrap(tiny()).forward_backward(BATCH, GRPO(), router=RouterLoss())
    assert stats.router_loss == 0.0
    tiny().zero_grad()


def test_rollouts_of_one_token() -> None:
    model, policy = tiny(), wrap(tiny(), ACROSS)
    ones = [Rollout([token], [0], 1.0, group_id=0) for token in (5, BATCH[0].token_ids[0])]
    batch = RolloutBatch([*BATCH, *ones])
    router = RouterLoss(LOAD_BALANCING, Z, scope="rollout")
    wanted = ordinary(model, "rollout", batch=batch)
    assert not step_faults(policy, model, wanted, router, batch=batch)
