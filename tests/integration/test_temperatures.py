"""Groups at several temperatures: the body runs once, and all numbers are dense training's."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scenarios import LOSSES, with_logprobs
from steps import clear_gradients, forked_batch, gradients, with_options
from test_critics import critic, values_of, with_values
from yardstick import (
    BAR,
    Truth,
    Variant,
    faults_of_steps,
    label,
    measure,
    own_logprobs,
    value_faults,
)

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.microbatches import MicrobatchInputs, prepare_microbatches
from forkpoint.losses.base import as_loss
from forkpoint.testing import lifted_upcasts, tiny_model
from lanes import slow_besides_every

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample")

WARMER = float(np.nextafter(0.7, 1))
TEMPERATURES = (1.0, 0.7, WARMER, 0.7, 1.3, 1.0)
"""Of each group's members: the twins have two, others differ in their last bit alone."""
LIMIT = 12
CONFIGS: tuple[Config, ...] = (
    *(
        Config(sharing=s, boundary=b)
        for s, b in product(("none", "group", "tree"), ("within", "across", "mixed"))
    ),
    Config(sharing="group", boundary="mixed", max_microbatch_tokens=24),
    Config(sharing="group", boundary="across", max_microbatch_tokens=LIMIT),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=LIMIT, activations="recompute"),
    Config(sharing="tree", boundary="within", head_logits="keep", head_chunk_tokens=5),
)
OBJECTIVES: dict[str, Any] = {
    **{name: LOSSES[name] for name in ("grpo", "gspo", "coupled", "entropy", "coupled_entropy")},
    "distillation": losses.Distillation(),
}
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


@cache
def truth(loss: str) -> Truth:
    """The dense run of the mixed batch, one rollout after the other."""
    built, batch = MODEL.build(), mixed_batch()
    return measure(
        built, with_logprobs(batch, own_logprobs(built, batch)), as_loss(OBJECTIVES[loss])
    )


@pytest.mark.parametrize("loss", slow_besides_every(5, OBJECTIVES))
def test_steps_are_those_of_dense_training(loss: str) -> None:
    faults, plans = faults_of_steps(MODEL.build(), truth(loss), OBJECTIVES[loss], CONFIGS)
    assert not faults, "\n".join(faults[:20])
    passes = {plan.program.has_scores for plan in plans}
    coupled = as_loss(OBJECTIVES[loss]).decomposition != "token"
    assert passes == {False, coupled}


def test_scores_entropies_and_logprobs() -> None:
    expected, model, faults = truth("entropy"), MODEL.build(), []
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
                ("scores", scores.logprobs, expected.dense.logprobs_T),
                ("entropies", scores.entropies, expected.dense.entropies_T),
                ("logprobs", logprobs.detach(), expected.dense.logprobs_T),
            ):
                faults += [f"{name}: {fault}" for fault in value_faults(what, values, dense)]
    assert not faults, "\n".join(faults)
    none, *others = found.values()
    norm = torch.stack([g.norm() for g in none.values()]).norm()
    for other in others:
        assert max((other[n] - g).norm() for n, g in none.items()) <= BAR * norm


# What runs ----------------------------------------------------------------------------------------


def inputs_of(batch: RolloutBatch, *, uses_temperature: bool = True) -> MicrobatchInputs:
    """The one microbatch of a batch."""
    plan = wrap(tiny_model("llama"), Config(sharing="group", boundary="within")).plan(batch)
    (inputs,) = prepare_microbatches(
        plan, batch, torch.device("cpu"), uses_temperature=uses_temperature
    )
    return inputs


def test_a_group_at_two_temperatures_runs_each_shared_token_once() -> None:
    """A prompt of 4 tokens, four responses that begin alike; two of them at each temperature."""
    prompt, answers = [1, 2, 3, 4], ([5, 6, 7], [5, 6, 8], [5, 6, 7], [5, 9, 7])
    batch = RolloutBatch(
        Rollout(prompt + answer, [0] * 4 + [1] * 3, 1.0, temperature=t, group_id="g")
        for answer, t in zip(answers, (1.0, 1.0, 0.5, 0.5), strict=True)
    )
    inputs = inputs_of(batch)
    assert sorted(inputs.input_ids[0].tolist()) == sorted([1, 2, 3, 4, 5, 6, 5, 6, 9])
    assert inputs.head_temperatures is not None
    entries = list(
        zip(
            inputs.head_index.tolist(),
            inputs.head_labels.tolist(),
            inputs.head_temperatures.tolist(),
            strict=True,
        )
    )
    assert len(entries) == len(set(entries)) == 9
    read = [(e[1], e[2]) for e in (entries[at] for at in inputs.trained_entry)]
    assert read == [
        *((5, 1.0), (6, 1.0), (7, 1.0)),
        *((5, 1.0), (6, 1.0), (8, 1.0)),
        *((5, 0.5), (6, 0.5), (7, 0.5)),
        *((5, 0.5), (9, 0.5), (7, 0.5)),
    ]
    first, second, third, fourth = inputs.trained_entry.reshape(4, 3).tolist()
    assert first[:2] == second[:2] and third[0] == fourth[0] and not set(first) & set(third)


def test_a_critic_ignores_temperatures() -> None:
    """Values, steps and entries are those of one temperature, to the last bit."""
    model = critic()
    found = []
    for batch in (mixed_batch(), at_temperatures(mixed_batch(), 1.0)):
        batch = with_values(batch, values_of(model, batch))
        policy = wrap(model, Config(sharing="group", boundary="across"))
        clear_gradients(model)
        stats = policy.forward_backward(batch, losses.ValueLoss(clip=0.5))
        inputs = prepare_microbatches(
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
