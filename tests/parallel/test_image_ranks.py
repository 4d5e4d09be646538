"""Multimodal models on several ranks, which run an encoder unequally often or never."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cases_of_ranks import Case, check, named, over_replicas
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    Scenario,
    compared,
    replicated,
    said,
    sharded,
    through_logprobs,
)
from test_dealt_leaves import dealt
from torch import nn
from torch.distributed.fsdp import fully_shard

from forkpoint import Config, RolloutBatch, wrap
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.losses import GSPO
from forkpoint.rollouts.rollout import Rollout
from media_scenes import equal_tokens, group, image, rollout, texts, tool_tree, videos
from multimodal_models import tiny_multimodal


def by_blocks(model: Any, **options: Any) -> nn.Module:
    """fully_shard of each block, also of the encoder, as accelerate and verl do."""
    blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


qwen3_vl = partial(tiny_multimodal, "qwen3_vl")


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
ONCE = Scenario(wrap=by_blocks, make=qwen3_vl, gather="step", rollouts=UNEQUAL)
EXCHANGED = replace(ONCE, config=replace(DEEP, boundary="mixed", split="exchange"))


def frozen_tower(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def frozen_text(model: Any) -> None:
    model.requires_grad_(False)
    model.model.visual.requires_grad_(True)


def tower_and_last_layer(model: Any) -> None:
    frozen_text(model)
    model.model.language_model.layers[-1].requires_grad_(True)


LOCKSTEP = replace(ONCE, gather="microbatch")
SCENARIOS = {
    "in lockstep": LOCKSTEP,
    "in lockstep, a rank of text": replace(LOCKSTEP, rollouts=TEXT, steps=2),
    "in lockstep, two passes": replace(LOCKSTEP, rollouts=TEXT, loss=GSPO()),
    "in lockstep, a frozen tower": replace(LOCKSTEP, rollouts=TEXT, alone=frozen_tower),
    "in lockstep, tower and last layer": replace(
        LOCKSTEP, rollouts=TEXT, alone=tower_and_last_layer
    ),
    "in lockstep, the tower alone": replace(LOCKSTEP, rollouts=TEXT, alone=frozen_text),
    "in lockstep, nothing on a rank": replace(LOCKSTEP, rollouts=(TEXT[0], [])),
    "in lockstep, the tower alone, nothing on a rank": replace(
        LOCKSTEP, rollouts=(TEXT[0], []), alone=frozen_text
    ),
    **{
        f"in lockstep, a rank of text, {family}": replace(
            LOCKSTEP,
            wrap=sharded,  # fully_shard warns of outputs of SmolVLM's blocks
            make=partial(tiny_multimodal, family),
            rollouts=(tool_tree(family), TEXT[1]),
        )
        for family, known in MULTIMODAL.items()
        if known.kinds
    },
    "in lockstep, one image on both": replace(
        EXCHANGED, rollouts=equal_prompts(0, 0), gather="microbatch"
    ),
    "fully_shard": ONCE,
    "one group of weights": replace(ONCE, wrap=sharded, loss=GSPO(), steps=2),
    "a rank of text": replace(ONCE, rollouts=TEXT),
    "a rank of text, the tower alone": replace(ONCE, rollouts=TEXT, alone=frozen_text),
    "DistributedDataParallel": replace(ONCE, wrap=replicated, rollouts=TEXT),
    "DistributedDataParallel, the tower alone": replace(
        ONCE, wrap=replicated, rollouts=TEXT, alone=frozen_text
    ),
    "one image on both": replace(EXCHANGED, rollouts=equal_prompts(0, 0)),
    "other images": replace(EXCHANGED, rollouts=equal_prompts(0, 1)),
}


WITHOUT_IMAGES = {
    **{
        family: Scenario(wrap=by_blocks, make=partial(tiny_multimodal, family))
        for family in MULTIMODAL
    },
    "weights gathered once": Scenario(wrap=by_blocks, make=qwen3_vl, gather="step", steps=2),
    "a rank without rollouts": Scenario(wrap=by_blocks, make=qwen3_vl, rollouts=EMPTY),
    "two passes, tied head": Scenario(
        wrap=by_blocks,
        make=partial(tiny_multimodal, "gemma3", tie_word_embeddings=True),
        loss=GSPO(),
    ),
    **{
        f"{family}, replicated": Scenario(wrap=replicated, make=partial(tiny_multimodal, family))
        for family in ("qwen3_vl", "gemma4", "llama4")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", {**SCENARIOS, **WITHOUT_IMAGES})
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared, {**SCENARIOS, **WITHOUT_IMAGES}[name]):
        assert found["error"] < BAR and found["loss"] < BAR, found
        assert name in SCENARIOS or found["same have none"]  # those of encoders, in one process
        if "one image on both" in name:
            assert found["exchanges"]
        if "lockstep" in name:
            assert found["gather"] == "microbatch"


def text_below_a_frozen_model() -> str:
    model = qwen3_vl()
    frozen_text(model)
    policy = wrap(by_blocks(model))
    return said(lambda: policy.forward_backward(RolloutBatch(TEXT[1]), GSPO()))


@pytest.mark.slow
def test_text_on_every_rank_needs_a_language_model_that_trains() -> None:
    for message in run_ranks(2, text_below_a_frozen_model):
        assert "no parameter that these rollouts run requires a gradient" in message, message


def untrained_tower() -> list[str]:
    model = qwen3_vl()
    policy = wrap(by_blocks(model))
    batch = RolloutBatch(Scenario().rollouts[dist.get_rank()])
    policy.forward_backward(batch, GSPO())
    assert policy.verify(batch, GSPO()).passed
    return [n for n, p in model.named_parameters() if p.grad is None]


@pytest.mark.slow
def test_gradients_of_the_tower_stay_none() -> None:
    first, second = run_ranks(2, untrained_tower)
    assert first == second
    assert first and all(name.startswith("model.visual.") for name in first)


# Microbatches that lie on several ranks: each encodes all images
# ------------------------------------------------------------


def tower_over_all(model: Any, mesh: Any) -> nn.Module:
    return by_blocks(model, mesh=mesh._flatten("data"))


def in_parts(family: str, *rollouts: list[Rollout], **options: Any) -> Case:
    return Case(make=partial(tiny_multimodal, family), rollouts=rollouts, cp=2, **options)


PARTS = {
    **{
        family: in_parts(family, tool_tree(family))
        for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "internvl")
    },
    "video": in_parts("qwen3_vl", videos("qwen3_vl"), hold=over_replicas),
    "equal tokens": in_parts("qwen2_5_vl", equal_tokens("qwen2_5_vl"), hold=over_replicas),
    "text": in_parts("qwen3_vl", TEXT[1]),
    "log-probs": in_parts("qwen3_vl", group("qwen3_vl"), step=through_logprobs),
    "sharded tower, two passes": in_parts(
        "qwen3_vl", group("qwen3_vl"), hold=tower_over_all, loss=GSPO(), steps=2
    ),
    "the tower alone": in_parts("qwen3_vl", tool_tree("qwen3_vl"), alone=frozen_text),
    "two batches": in_parts("qwen3_vl", *TEXT, hold=tower_over_all),
}


@named(PARTS)
def test_dealt_places_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    check(PARTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3"])
def test_images_in_leaves_that_ranks_run_whole(name: str, tmp_path: Path) -> None:
    assert all(found["dealt"] for found in check(PARTS[name], tmp_path, dealt))


def images_in_responses() -> list[Rollout]:
    """A long prompt, and eight responses of unequal lengths, each with an image of its own."""
    text = texts(7)
    prompt = [text(30)]
    return [
        rollout("qwen3_vl", prompt, [text(n + 1), image("qwen3_vl", n), text(2)], 0.3 * n - 1)
        for n in range(8)
    ]


def test_images_of_leaves_that_exchange_responses(tmp_path: Path) -> None:
    config = Config(sharing="tree", boundary="across", max_microbatch_tokens=48)
    case = in_parts("qwen3_vl", images_in_responses(), config=config)
    assert all(found["dealt"] > 1 for found in check(case, tmp_path, dealt))
