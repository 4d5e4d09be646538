"""Steps whose leaves ranks of context parallelism run whole leave the gradients of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_split_stages as stages
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, group
from test_context_parallel import (
    CASES,
    COMPILED,
    COMPOSED,
    FOUR,
    ROUTERS,
    Balanced,
    Composed,
    Context,
    balanced,
    compared,
    compiled,
    composed,
    mesh_of,
    raised,
    verified,
)

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.losses import GSPO
from forkpoint.plan.builder import Builder
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing import meters
from versions import needs_splits


def branching(seed: int, turns: int, *, vocab: int = 60) -> list[Rollout]:
    """A prompt, two turns below it, and below each as many ends: forks at two depths."""
    rng = np.random.default_rng(seed)
    prompt = list(rng.integers(0, vocab, 30))
    found = []
    for _ in range(2):
        turn = prompt + list(rng.integers(0, vocab, 25))
        for _ in range(turns):
            ids = turn + list(rng.integers(0, vocab, int(rng.integers(4, 9))))
            mask = [0] * 33 + [1] * (len(ids) - 33)
            found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"branching {seed}"))
    return found


def always_deal() -> list[int]:
    """Let plans deal out all leaves that they can. Returns how many each plan has."""
    counts: list[int] = []

    def dealt(self: Builder, plan: Plan) -> Plan:
        if plan.shape is not None and plan.shape.context > 1:
            plan = self._deal(plan)
            counts.append(sum(bool(m.parts) for m in plan.microbatches))
        return plan

    Builder._dealt_if_faster = dealt  # type: ignore[method-assign]
    return counts


def compared_dealt(context: Context) -> dict[str, Any]:
    counts = always_deal()
    return {**compared(context), "dealt": max(counts)}


WIDE = group(7, 7, 40, 9)
NAMES = (
    *("GRPO", "DPO", "key heads that ranks do not divide", "a critic", "log-probs", "a function"),
    *("temperatures", "accumulated", "replicas", "replicas, log-probs", "recomputed", "offloaded"),
    *("full checkpoints", "selective checkpoints", "the model's checkpoints", "LoRA"),
    *("last layer alone", "first layer alone", "tied", "softcaps and windows", "experts"),
    *("latent attention", "sinks and windows", "replayed experts"),
)
DEALT = {
    **{name: CASES[name] for name in NAMES},
    "GSPO, one key head": replace(CASES["GSPO, one key head"], rollouts=(WIDE,)),
    "two depths": Context(rollouts=(branching(5, 5),)),
    "two depths, two passes": Context(rollouts=(branching(5, 5),), loss=GSPO()),
    "two depths, recomputed": Context(
        rollouts=(branching(5, 5),), config=replace(DEEP, activations="recompute")
    ),
    "no prompt": Context(config=Config(sharing="none", boundary="within")),
    "within microbatches": Context(config=Config(sharing="tree", boundary="within")),
    "a long chain": Context(rollouts=(group(4, 5, 150, 9),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEALT)
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared_dealt, DEALT[name]):
        assert found["error"] < BAR and found["dealt"], found
        assert found["loss"] < BAR and found["scores"] < BAR, found


def compiled_dealt(context: Context) -> dict[str, Any]:
    counts = always_deal()
    return {**compiled(context, None), "dealt": max(counts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["GRPO", "one key head, recomputed", "sinks and windows", "latent attention", "short rollouts"],
)
def test_compiled_blocks_leave_the_gradients_of_one_process(name: str) -> None:
    for found in run_ranks(2, compiled_dealt, COMPILED[name], limit_s=480):
        assert found["error"] < BAR and found["scores"] < BAR and found["dealt"], found
        assert found["graphs"] and not found["failed"], found


DEALT_TO_FOUR = {**FOUR, "four, two key heads": Context(cp=4, rollouts=(WIDE,))}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEALT_TO_FOUR)
def test_four_ranks_leave_the_gradients_of_one_process(name: str) -> None:
    found = run_ranks(4, compared_dealt, DEALT_TO_FOUR[name])
    assert any(each["dealt"] for each in found)
    for each in found:
        assert each["error"] < BAR and each["loss"] < BAR and each["scores"] < BAR, each


def balanced_dealt(case: Balanced) -> dict[str, float]:
    counts = always_deal()
    found = balanced(case)
    assert max(counts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "rollout, checkpointed", "recomputed", "data"])
def test_router_losses_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(ROUTERS[name][0], balanced_dealt, ROUTERS[name][1]):
        assert max(found.values()) < BAR, found


def composed_dealt(folder: Path, case: Composed) -> dict[str, float]:
    counts = always_deal()
    found = composed(folder, case)
    assert max(counts)
    return found


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "experts", "experts of context ranks, data"])
def test_split_models_and_context_ranks(name: str, tmp_path: Path) -> None:
    case = COMPOSED[name]
    size = int(np.prod(list(case.sizes.values())))
    for found in run_ranks(size, composed_dealt, case.split.save(tmp_path), case):
        assert max(found.values()) < BAR, found


def staged_dealt(folder: Path, case: stages.Case) -> dict[str, float]:
    counts = always_deal()
    found = stages.compared(folder, case)
    assert max(counts)
    return found


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", ["context", "context, two passes", "context, recomputed"])
def test_stages_of_context_ranks(name: str, tmp_path: Path) -> None:
    case = stages.CASES[name]
    for found in run_ranks(case.size, staged_dealt, case.split.save(tmp_path), case, limit_s=120):
        assert max(found.values()) < BAR, found


def verified_dealt(context: Context) -> tuple[str, float, str]:
    always_deal()
    return verified(context)


@pytest.mark.slow
def test_verify_compares_with_ordinary_training() -> None:
    for verdict, error, _ in run_ranks(2, verified_dealt, Context(rollouts=(branching(5, 5),))):
        assert verdict == "passed" and error < BAR


# The planner's choice
# ------------------------------------------------------------

LONG = Context(rollouts=(group(8, 8, 9, 40),), config=replace(DEEP, max_microbatch_tokens=512))


def chosen(context: Context, flops: float) -> tuple[dict[str, Any], str]:
    """A step at this price of a byte, and what its plan says; the plan serves again."""
    meters.EXCHANGE_FLOPS = flops
    found, dealing = compared(context), ""
    mesh, model = mesh_of(2), context.model()
    policy = forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh)
    batch = RolloutBatch(context.rollouts[0])
    first = policy.forward_backward(batch, context.loss)
    again = policy.forward_backward(batch, context.loss, plan=first.plan)
    assert again.loss == first.loss and again.plan.dealing == first.plan.dealing
    alone = forkpoint.wrap(context.model(), context.config)
    dealing = first.plan.dealing
    if any(m.parts for m in first.plan.microbatches):
        refusal = raised(lambda: alone.forward_backward(batch, context.loss, plan=first.plan))
        assert "this plan assigns leaves to 2 ranks" in refusal, refusal
    return found, dealing


@pytest.mark.slow
@pytest.mark.parametrize(
    "flops, taken", [(1e9, "leaves dealt out to ranks whole"), (0.0, "leaves run by heads")]
)
def test_plans_deal_leaves_where_sending_is_dear(flops: float, taken: str) -> None:
    for found, dealing in run_ranks(2, chosen, LONG, flops):
        assert found["error"] < BAR and found["loss"] < BAR and found["scores"] < BAR, found
        assert dealing.startswith(taken), dealing
