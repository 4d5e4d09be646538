"""Images on several ranks, which run an encoder unequally often, beside one process."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, Scenario, compared, replicated, sharded
from test_multimodal_ranks import qwen3_vl, with_tower

from forkpoint import RolloutBatch, UnsupportedError, wrap
from forkpoint.losses import GRPO, GSPO
from forkpoint.rollouts.rollout import Rollout
from media_scenes import group, image, rollout, texts, tool_tree, videos


def equal_prompts(*seeds: int) -> tuple[list[Rollout], ...]:
    """Groups of one long prompt, with an image of each rank's own seed."""
    before, after = texts(1)(30), texts(2)(9)
    return tuple(
        [
            rollout(
                "qwen3_vl",
                [before, image("qwen3_vl", seed), after],
                [texts(20 + 3 * rank + n)(3)],
                0.4 * n - 0.5 + rank,
            )
            for n in range(3)
        ]
        for rank, seed in enumerate(seeds)
    )


UNEQUAL = [*tool_tree("qwen3_vl"), *group("qwen3_vl", 4)], videos("qwen3_vl")
TEXT = tool_tree("qwen3_vl"), [rollout("qwen3_vl", [[3, 4, 5]], [[n, 7]], 1.0) for n in (8, 9)]
ONCE = Scenario(wrap=with_tower, make=qwen3_vl, gather="step", rollouts=UNEQUAL)
EXCHANGED = replace(ONCE, config=replace(DEEP, boundary="mixed", split="exchange"))
SCENARIOS = {
    "fully_shard": ONCE,
    "one group of weights": replace(ONCE, wrap=sharded, loss=GSPO(), steps=2),
    "a rank of text": replace(ONCE, rollouts=TEXT),
    "DistributedDataParallel": replace(ONCE, wrap=replicated, rollouts=TEXT),
    "one image on both": replace(EXCHANGED, rollouts=equal_prompts(0, 0)),
    "other images": replace(EXCHANGED, rollouts=equal_prompts(0, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared, SCENARIOS[name]):
        assert found["error"] < BAR and found["loss"] < BAR, found
        if name == "one image on both":
            assert found["exchanges"]


def in_lockstep() -> str:
    policy = wrap(with_tower(qwen3_vl()))
    batch = RolloutBatch(TEXT[dist.get_rank()])
    try:
        policy.forward_backward(batch, GRPO())
    except (UnsupportedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_lockstep_is_refused_on_all_ranks() -> None:
    for message in run_ranks(2, in_lockstep):
        assert "Config(gather='step')" in message
