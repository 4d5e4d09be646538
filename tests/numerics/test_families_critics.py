"""Critics of every supported family that has a token classifier, exact in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_families import BAR, batch, build, drawn_ways, given, paired
from transformers import CONFIG_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from forkpoint import RolloutBatch, wrap
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.losses import ValueLoss
from forkpoint.testing import dense_run, lifted_upcasts
from lanes import slow_besides

# More ways of sharing for families that differ in what a layer reads, chains and a tree for others.
WAYS_OF = drawn_ways("llama", "qwen3", "mistral", "gemma2", "qwen3_next")
SOME_WAYS = [("tree", "across", "packed", 17), ("tree", "within", "packed", None)]


def with_returns() -> RolloutBatch:
    rng = np.random.default_rng(1)
    return RolloutBatch(
        replace(
            rollout,
            returns=3 * rng.normal(size=len(rollout)),
            old_values=3 * rng.normal(size=len(rollout)),
        )
        for rollout in batch()
    )


@pytest.mark.parametrize("family", slow_besides(["gemma2"], FAMILIES))
def test_gradients_of_critics_equal_dense(family: str) -> None:
    if (
        family not in CONFIG_MAPPING
        or CONFIG_MAPPING[family] not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    ):
        pytest.skip(f"this transformers has no token classifier of {family}")
    model, loss, rollouts = build(family, critic=True), ValueLoss(clip=1.0), with_returns()
    with lifted_upcasts(model):
        wrapped = wrap(model)
        dense = dense_run(model, rollouts, loss)
        norm = math.sqrt(sum(float(g.square().sum()) for g in given(dense.gradients)))
        assert norm > 0
        some = [*((False, way) for way in SOME_WAYS), (True, SOME_WAYS[0])]
        for checkpointed, way in WAYS_OF.get(family, some):
            if checkpointed:
                names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
                enable = next(getattr(model, name) for name in names if hasattr(model, name))
                enable({"use_reentrant": False})
            model.zero_grad()
            names = ("sharing", "boundary", "max_microbatch_tokens")
            policy = wrapped.with_config(**dict(zip(names, way, strict=True)))
            stats = policy.forward_backward(rollouts, loss)
            where = f"{family}, {way}, checkpointed {checkpointed}"
            assert abs(stats.loss - dense.loss) <= BAR * max(1.0, abs(dense.loss)), where
            found = {name: p.grad for name, p in model.named_parameters()}
            error = math.sqrt(
                sum(float((a - b).square().sum()) for a, b in paired(found, dense.gradients, where))
            )
            assert error / norm <= BAR, where
            difference = (stats.values - dense.values_T).abs().max() / dense.values_T.abs().max()
            assert float(difference) <= BAR, where
