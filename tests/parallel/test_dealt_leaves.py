"""Steps whose leaves ranks of context parallelism run whole leave the gradients of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_router_ranks as routers
import test_stages_of_ranks as stages
from cases_of_ranks import Case, check, compared, named, on_rank, on_ranks_of
from scenarios_of_ranks import BAR, DEEP, group, said
from test_context_parallel import CASES, COMPILED, compiled, of

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.losses import GSPO
from forkpoint.plan.builder import Builder
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing import meters


def branching() -> list[Rollout]:
    """A prompt, two turns below it, and below each five ends: forks at two depths."""
    rng = np.random.default_rng(5)
    prompt = list(rng.integers(0, 60, 30))
    found = []
    for _ in range(2):
        turn = prompt + list(rng.integers(0, 60, 25))
        for _ in range(5):
            ids = turn + list(rng.integers(0, 60, int(rng.integers(4, 9))))
            mask = [0] * 33 + [1] * (len(ids) - 33)
            found.append(Rollout(ids, mask, float(rng.normal()), group_id="branching"))
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


def dealt(folder: Path, case: Case, work: Callable[..., Any] = compared, *more: Any) -> Any:
    counts = always_deal()
    return {**work(folder, case, *more), "dealt": max(counts)}


WIDE = group(7, 7, 40, 9)
NAMES = (
    *("key heads that ranks do not divide", "a critic", "log-probs", "temperatures", "replicas"),
    *("selective checkpoints", "the model's checkpoints", "LoRA", "last layer alone"),
    *("first layer alone", "tied", "softcaps and windows", "latent attention"),
    *("sinks and windows", "replayed experts", "data, a function", "data, coupled over ranks"),
    *("data, a rank without rollouts", "tensor", "experts of several ranks"),
)
DEALT: dict[str, Case] = {
    **{name: CASES[name] for name in NAMES},
    "GSPO, one key head": replace(CASES["GSPO, one key head"], rollouts=(WIDE,)),
    "two depths": of(rollouts=(branching(),)),
    "two depths, two passes": of(rollouts=(branching(),), loss=GSPO()),
    "two depths, recomputed": of(
        rollouts=(branching(),), config=replace(DEEP, activations="recompute")
    ),
    "no prompt": of(config=Config(sharing="none", boundary="within")),
    "within microbatches": of(config=Config(sharing="tree", boundary="within")),
    "a long chain": of(rollouts=(group(4, 5, 150, 9),)),
    "four, two key heads": Case(cp=4, rollouts=(WIDE,)),
    "stages": stages.CASES["context, two passes"],
    "stages, recomputed": stages.CASES["context, recomputed"],
}


@named(DEALT)
def test_gradients_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    found = check(DEALT[name], tmp_path, dealt)
    assert any(each["dealt"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["one key head, recomputed", "sinks and windows", "blocks recomputed"]
)
def test_compiled_blocks_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    for found in on_ranks_of(COMPILED[name], tmp_path, dealt, compiled, None):
        assert found["error"] < BAR and found["scores"] < BAR and found["dealt"], found
        assert found["graphs"] and not found["failed"], found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context, rollout, checkpointed", "context, data"])
def test_router_losses_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    routed = routers.CASES[name]
    for found in on_ranks_of(routed.case, tmp_path, dealt, routers.compared, routed):
        assert max(found["differences"].values()) < BAR and found["dealt"], found


# The planner's choice
# ------------------------------------------------------------

LONG = of(rollouts=(group(8, 8, 9, 40),), config=replace(DEEP, max_microbatch_tokens=512))


def chosen(folder: Path, case: Case, flops: float) -> tuple[dict[str, Any], str]:
    """A step at this price of a byte, and what its plan says; the plan serves again."""
    meters.EXCHANGE_FLOPS = flops
    found, batch = compared(folder, case), RolloutBatch(case.rollouts[0])
    policy, _ = on_rank(folder, case)
    first = policy.forward_backward(batch, case.loss)
    again = policy.forward_backward(batch, case.loss, plan=first.plan)
    assert again.loss == first.loss and again.plan.dealing == first.plan.dealing
    alone = forkpoint.wrap(case.made(), case.config)
    if any(m.parts for m in first.plan.microbatches):
        refusal = said(lambda: alone.forward_backward(batch, case.loss, plan=first.plan))
        assert "splits leaves by responses over 2 context-parallel ranks" in refusal, refusal
    return found, first.plan.dealing


@pytest.mark.slow
@pytest.mark.parametrize(
    "flops, taken", [(1e9, "leaves split by responses"), (0.0, "leaves split by heads")]
)
def test_plans_deal_leaves_where_sending_is_dear(flops: float, taken: str, tmp_path: Path) -> None:
    for found, dealing in on_ranks_of(LONG, tmp_path, chosen, flops):
        assert found["error"] < BAR and found["loss"] < BAR and found["scores"] < BAR, found
        assert dealing.startswith(taken), dealing
