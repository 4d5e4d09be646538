"""Mixtures of experts: routes are recorded and held, and `policy.verify` measures with held ones.

That steps which are held to routes are exact: `test_replayed_routes.py`.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from experts import (
    FAMILIES,
    chosen_experts,
    expert_batch,
    expert_model,
    forced,
    found_routers,
)
from host_models import lora
from steps import forked_batch

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, VerifyReport, losses, wrap
from forkpoint.engine.microbatches import PreparedMicrobatches
from forkpoint.engine.route_replay import Routes
from forkpoint.hosts import routers as routers_module
from forkpoint.testing import dense_run, tiny_model
from lanes import slow_besides
from versions import skip_without_router_logits

ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=200)
WITHIN_CONFIG = Config(sharing="group", boundary="within")
TREE = Config(sharing="tree", boundary="mixed", max_microbatch_tokens=40)
LOSS = losses.GRPO()

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


# Routes that are held ----------------------------------------------------------------------------


@cache
def foreign_batch() -> RolloutBatch:
    return forked_batch(vocab=256)


@cache
def foreign_routes(family: str) -> Routes:
    """Routes of a model with other weights, for `foreign_batch`."""
    batch = foreign_batch()
    other, routes = expert_model(family, torch.float64, seed=7), Routes.to_record(batch)
    with forced(other, found_routers(other), routes, record=True) as run:
        dense_run(other, batch, LOSS, None, run.at)
    assert run.routes.decisions_L.all() and not run.routes.elsewhere
    return routes


@pytest.mark.parametrize("family", slow_besides(["deepseek_v3"], FAMILIES))
def test_experts_are_those_of_the_routes(family: str) -> None:
    skip_without_router_logits(family)
    batch, model = foreign_batch(), expert_model(family)
    routers, routes = found_routers(model), foreign_routes(family)
    with chosen_experts(model) as found, forced(model, routers, routes) as run, torch.no_grad():
        for n, rollout in enumerate(batch):
            begin = int(batch.offsets[n])
            run.at(np.arange(begin, begin + len(rollout) - 1))
            model(input_ids=torch.tensor(rollout.token_ids.copy())[None, :-1], use_cache=False)
    assert routers and len(found) == len(routers) * len(batch)
    for call, (_, indices) in enumerate(found):
        n = call // len(routers)
        keys = routes.keys_T[batch.offsets[n] : batch.offsets[n + 1] - 1]
        wanted = routes.chosen[call % len(routers)][torch.tensor(keys)].long()
        assert torch.equal(indices.sort(-1).values, wanted.sort(-1).values)


def test_tokens_of_microbatches_are_tokens_of_the_batch() -> None:
    """Every place runs the token that its key says, at its position."""
    batch = forked_batch(vocab=256)
    for config in (TREE, ACROSS, WITHIN_CONFIG):
        plan = wrap(tiny_model("llama"), config).plan(batch)
        prepared = PreparedMicrobatches(plan, batch, torch.device("cpu"))
        tokens = np.concatenate([inputs.tokens for inputs in prepared])
        assert len(tokens) == plan.computed_tokens
        keys = Routes.to_record(batch).keys_T
        assert keys[tokens].min() >= 0
        # Each shared edge once where the plan shares it all, and all of them in any case.
        assert set(keys[tokens]) == set(keys[keys >= 0])
    twins = RolloutBatch([Rollout([1, 2, 3, 4], [0, 0, 1, 1], 1.0, rollout_id=n) for n in "ab"])
    first, second = np.split(Routes.to_record(twins).keys_T, 2)
    assert (first == second).all() and sorted(first.tolist()) == [-1, 0, 1, 2]


# verify ------------------------------------------------------------------------------------------


@cache
def report_of(family: str, config: Config = ACROSS) -> VerifyReport:
    """That of a model and a library as they are."""
    return wrap(expert_model(family), config).verify(expert_batch(), LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_passes_with_routes_held(family: str) -> None:
    skip_without_router_logits(family)
    report = report_of(family, (ACROSS, WITHIN_CONFIG)[list(FAMILIES).index(family) % 2])
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.held
    shared, dense = report.nearest.routes.shared, report.nearest.routes.dense
    assert shared is not None and dense is not None
    routers = len(found_routers(expert_model(family)))
    batch = expert_batch()
    assert dense.decisions == routers * (batch.logical_tokens - len(batch))
    # A shared token counts once for every rollout through it; the last block's routers do not run
    # below prefixes that train nothing.
    assert 0 < shared.decisions <= dense.decisions
    assert dense.elsewhere and dense.fraction < 0.05
    assert shared.fraction < 0.05


@pytest.mark.slow
def test_routes_decide_what_is_measured() -> None:
    """Without holding them the errors of both sides are those of flips."""
    policy, held = wrap(expert_model("gpt_oss"), ACROSS), report_of("gpt_oss")
    free = policy.verify(expert_batch(), LOSS, hold_routes=False)
    routes = free.nearest.routes
    assert routes is not None and not routes.held and routes.shared is None
    assert "ROUTES NOT HELD: hold_routes is False" in " ".join(free.table().split())
    assert free.dense_error > 3 * held.dense_error
    assert free.nearest.shared_error > 3 * held.nearest.shared_error


@pytest.mark.slow
def test_recomputed_layers_take_the_same_routes() -> None:
    """Within a backward, after other microbatches have run."""
    config = replace(ACROSS, checkpointing="full", activations="recompute")
    report = wrap(expert_model("deepseek_v3"), config).verify(expert_batch(), LOSS)
    assert report.passed, report.table()
    plain = report_of("deepseek_v3")
    assert report.nearest.shared_error == pytest.approx(plain.nearest.shared_error, rel=1e-3)


@pytest.mark.slow
def test_float32_and_autocast_and_adapters() -> None:
    model = expert_model("qwen3_moe", torch.float32)
    assert wrap(model, ACROSS).verify(expert_batch(), LOSS).passed
    with torch.autocast("cpu", torch.bfloat16):
        report = wrap(model, ACROSS).verify(expert_batch(), LOSS)
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.dense is not None
    assert report.nearest.routes.dense.elsewhere
    adapted = lora(expert_model("gpt_oss"), target_modules=["q_proj", "o_proj"])
    report = wrap(adapted, ACROSS).verify(expert_batch(), losses.GSPO())
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.held


def test_float64_needs_no_holding_and_dense_models_have_no_routes() -> None:
    model = expert_model("qwen3_moe", torch.float64)
    report = wrap(model, ACROSS).verify(forked_batch(vocab=256), LOSS)
    assert report.passed and report.nearest.routes is None
    report = wrap(tiny_model("llama", dtype=torch.float32), ACROSS).verify(forked_batch(), LOSS)
    assert report.nearest.routes is None and report.to_dict()["routes"] is None


def test_grouped_products_of_experts() -> None:
    """They are transformers' default, and have no float64, which references of float32 are in."""
    model = expert_model("mixtral", torch.float32, eager=False)
    before = model.config._experts_implementation
    assert before != "eager"
    report = wrap(model, ACROSS).verify(expert_batch(), LOSS)
    assert report.passed, report.table()
    assert model.config._experts_implementation == before


@pytest.mark.slow
def test_rollouts_in_which_nothing_is_trained_choose_for_themselves() -> None:
    """Dense training does not run them, so that there are no routes to hold them to."""
    given = list(expert_batch())
    given[2] = replace(given[2], loss_mask=[0] * len(given[2]))
    report = wrap(expert_model("gpt_oss"), ACROSS).verify(RolloutBatch(given), LOSS)
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.held


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_compiled_blocks_are_held_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the compiler its first half alone: what decides whether compiled code is used again."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **_: compile_(f, dynamic=True, backend="aot_eager")
    )
    model = expert_model("gpt_oss", num_hidden_layers=1)
    policy = wrap(model, replace(ACROSS, compile_blocks=True))
    policy.forward_backward(expert_batch(), LOSS)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    report = policy.verify(expert_batch(), LOSS)
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.held
    model.zero_grad()
    policy.forward_backward(expert_batch(), LOSS)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# It disturbs nothing, and fails loudly -----------------------------------------------------------


def test_routers_that_cannot_be_forced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = expert_model("gpt_oss"), expert_batch()
    routers, routes = found_routers(model), Routes.to_record(batch)

    def step(tokens: int) -> None:
        with forced(model, routers, routes, record=True) as run, torch.no_grad():
            run.at(np.arange(tokens))
            model(input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=False)

    with pytest.raises(UnsupportedError, match=r"of shape \(5, 8\), and 3 tokens run"):
        step(3)
    monkeypatch.setattr(routers_module, "TOPK", ())
    with pytest.raises(UnsupportedError, match=r"called topk over its 8 experts 0 times"):
        step(5)
    assert all("forward" not in vars(module) for module in model.modules())
