"""Rollouts without gradient are left out on ranks as well, and every rank joins what others do.

That one process leaves them out exactly: `tests/integration/test_left_out.py`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    UNEQUAL,
    OfAllRanks,
    Scenario,
    compared,
    group,
    replicated,
)
from test_prompt_exchange import MIXED, TWO
from test_ranks import lora, mamba, with_experts

from forkpoint import Config, Rollout
from forkpoint.losses import GRPO, GSPO
from lanes import slow_besides


def zero(rollouts: list[Rollout], *which: int) -> list[Rollout]:
    """The rollouts, those at these positions (or all) with an advantage of 0, and each with a tail
    that is not trained."""
    found = []
    for position, rollout in enumerate(rollouts):
        advantage = 0.0 if not which or position in which else rollout.advantage
        ids = np.append(rollout.token_ids, [3, 1, 4])
        mask = np.append(rollout.loss_mask, [False] * 3)
        found.append(replace(rollout, token_ids=ids, loss_mask=mask, advantage=advantage))
    return found


FIRST = (zero(UNEQUAL[0]), zero(UNEQUAL[1], 1, 2))
NOTHING = tuple(zero(part) for part in UNEQUAL)
UNTRAINED = ([replace(r, loss_mask=r.loss_mask & False) for r in UNEQUAL[0]], UNEQUAL[1])
SCENARIOS = {
    "fully_shard, a rank without": Scenario(rollouts=FIRST),
    "fully_shard, some on each": Scenario(rollouts=(zero(UNEQUAL[0], 0, 4, 5), FIRST[1])),
    "fully_shard, all": Scenario(rollouts=NOTHING),
    "fully_shard, nothing trained on one": Scenario(rollouts=UNTRAINED),
    "fully_shard, GSPO": Scenario(rollouts=FIRST, loss=GSPO()),
    "fully_shard, gathered once": Scenario(rollouts=FIRST, gather="step"),
    "fully_shard, experts": Scenario(rollouts=FIRST, make=with_experts),
    "fully_shard, Mamba-2": Scenario(rollouts=FIRST, make=mamba),
    "fully_shard, as the planner likes": Scenario(rollouts=FIRST, config=Config(), gather="auto"),
    "DistributedDataParallel, a rank without": Scenario(wrap=replicated, rollouts=FIRST),
    "DistributedDataParallel, all": Scenario(wrap=replicated, rollouts=NOTHING),
    "DistributedDataParallel, GSPO": Scenario(wrap=replicated, rollouts=FIRST, loss=GSPO()),
    "DistributedDataParallel, all, LoRA": Scenario(wrap=replicated, rollouts=NOTHING, make=lora),
}


@pytest.mark.parametrize("name", slow_besides(("fully_shard, a rank without",), SCENARIOS))
def test_gradients_are_those_of_one_process(name: str) -> None:
    scenario = SCENARIOS[name]
    for rank, found in enumerate(run_ranks(2, compared, scenario)):
        assert found["error"] < BAR and found["loss"] < BAR, (rank, found)
        assert found["same have none"], rank
        lengths = [len(r) for r in scenario.rollouts[rank]]
        away = found["left out"]
        assert away.tokens > 0 or scenario.rollouts[rank] is UNEQUAL[1]
        run = sum(lengths) - away.tokens - (len(lengths) - away.rollouts)
        assert found["computed"] <= run
        if scenario.rollouts in (NOTHING,) or (scenario.rollouts is FIRST and rank == 0):
            assert found["computed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fully_shard, a rank without", "fully_shard, all", "DistributedDataParallel, all"]
)
def test_gradients_that_are_there_are_kept(name: str) -> None:
    for found in run_ranks(2, compared, SCENARIOS[name], UNEQUAL):
        assert found["error"] < BAR and found["same have none"], found


@pytest.mark.slow
@pytest.mark.parametrize("loss", [GRPO(clip=0.2), GSPO()], ids=["one pass", "two passes"])
@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_prompts_are_exchanged_of_what_runs(loss: Any, gather: Any) -> None:
    """Rank 1 runs no rollout of one prompt, and one of another, of which rank 0 leaves out one."""
    first, second = zero(TWO[0], 3), zero(TWO[1], 0, 1, 3)
    assert [r.group_id for r in second] == ["group 0"] * 2 + ["group 1"] * 2 + ["group 4"]
    assert first[3].group_id == "group 1"
    scenario = Scenario(config=MIXED, rollouts=(first, second), loss=loss, gather=gather)
    for found in run_ranks(2, compared, scenario):
        assert found["split"] == "exchange"
        assert found["error"] < BAR and found["loss"] < BAR and found["same have none"], found


@pytest.mark.slow
def test_rollouts_coupled_over_ranks_all_run() -> None:
    """Of the first rank alone all terms would seem to be zero."""
    scenario = Scenario(rollouts=(zero(group(0, 2, 9, 5)), group(1, 2, 9, 5)), loss=OfAllRanks())
    for found in run_ranks(2, compared, scenario):
        assert found["error"] < BAR and found["loss"] < BAR, found
        assert found["left out"].rollouts == 0 and found["computed"] > 0
