"""Groups at several temperatures: the body runs once, and all numbers are dense training's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scenarios import EVERY, LOSSES, with_logprobs
from steps import clear_gradients, forked_batch, gradients, with_options
from test_critics import critic, values_of, with_values
from yardstick import (
    BAR,
    Variant,
    faults_of_steps,
    label,
    measure,
    own_logprobs,
    value_faults,
)

from forkpoint import Config, RolloutBatch, losses, wrap
from forkpoint.engine.microbatches import PreparedMicrobatches
from forkpoint.losses.base import as_loss
from forkpoint.testing import lifted_upcasts

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample")

WARMER = float(np.nextafter(0.7, 1))
TEMPERATURES = (1.0, 0.7, WARMER, 0.7, 1.3, 1.0)
"""Of each group's members: the twins have two, others differ in their last bit alone."""
LIMIT = 12
CONFIGS: tuple[Config, ...] = (
    *EVERY,
    Config(sharing="group", boundary="mixed", max_microbatch_tokens=24),
    Config(sharing="group", boundary="across", max_microbatch_tokens=LIMIT),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=LIMIT, activations="recompute"),
    Config(sharing="tree", boundary="within", head_logits="keep", head_chunk_tokens=5),
)
MODEL = Variant("llama")


def at_temperatures(batch: RolloutBatch, *temperatures: float) -> RolloutBatch:
    """The batch with its rollouts at these temperatures, in turn."""
    return RolloutBatch(
        replace(rollout, temperature=temperatures[i % len(temperatures)])
        for i, rollout in enumerate(batch)
    )


def mixed_batch() -> RolloutBatch:
    """Two groups of six, in which one of two twins masks a token that the other trains."""
    rollouts = list(at_temperatures(forked_batch(), *TEMPERATURES))
    mask = rollouts[4].loss_mask.copy()
    mask[-1] = False
    return RolloutBatch([*rollouts[:4], replace(rollouts[4], loss_mask=mask), *rollouts[5:]])


def test_steps_scores_entropies_and_logprobs() -> None:
    model, loss = MODEL.build(), LOSSES["entropy"]
    batch = with_logprobs(mixed_batch(), own_logprobs(model, mixed_batch()))
    expected = measure(model, batch, as_loss(loss))
    faults, _ = faults_of_steps(model, expected, loss, CONFIGS)
    weights = torch.randn(expected.batch.logical_tokens, dtype=torch.float64)
    found: dict[str, Any] = {}
    with lifted_upcasts(model):
        policy = wrap(model)
        for config in CONFIGS:
            name = label(config, (set_to := with_options(policy, config)).plan(expected.batch))
            scores = set_to.score(expected.batch, entropy=True)
            clear_gradients(model)
            logprobs, entropies = set_to.logprobs(expected.batch, entropy=True)
            (logprobs * weights + entropies.square()).sum().backward()
            found[name] = gradients(model)
            assert scores.entropies is not None
            for what, values, dense in (
                ("scores", scores.logprobs, expected.dense.per_token["logprobs"]),
                ("entropies", scores.entropies, expected.dense.per_token["entropies"]),
                ("logprobs", logprobs.detach(), expected.dense.per_token["logprobs"]),
            ):
                faults += [f"{name}: {fault}" for fault in value_faults(what, values, dense)]
    assert not faults, "\n".join(faults)
    none, *others = found.values()
    norm = torch.stack([g.norm() for g in none.values()]).norm()
    for other in others:
        assert max((other[n] - g).norm() for n, g in none.items()) <= BAR * norm


def test_a_critic_ignores_temperatures() -> None:
    """Values, steps and entries are those of one temperature, to the last bit."""
    model = critic()
    found = []
    for batch in (mixed_batch(), at_temperatures(mixed_batch(), 1.0)):
        batch = with_values(batch, values_of(model, batch))
        policy = wrap(model, Config(sharing="group", boundary="across"))
        clear_gradients(model)
        stats = policy.forward_backward(batch, losses.ValueLoss(clip=0.5))
        inputs = PreparedMicrobatches(
            stats.plan, batch, torch.device("cpu"), uses_temperature=False
        )
        entries = [len(prepared.head_index) for prepared in inputs]
        assert entries == [microbatch.num_loss_entries for microbatch in stats.plan.microbatches]
        found.append((stats, gradients(model), stats.plan.num_loss_entries))
    (one, of_one, entries), (other, of_other, other_entries) = found
    assert entries == other_entries
    assert torch.equal(one.values, other.values) and one.loss == other.loss
    for name, gradient in of_one.items():
        assert gradient is not None and torch.equal(gradient, of_other[name]), name
