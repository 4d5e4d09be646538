"""The acceptance test: however a batch is planned, the step is that of ordinary training.

One scenario (see scenarios.py) under every combination of sharing and boundary, in float64: loss,
log-probs, entropies and every parameter's gradient within 1e-10 of a dense run by the stock model.
Options of models and kernels take turns over each pair of a loss and a plan.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from scenarios import CHAIN, EVERY, LOSSES, SHARINGS, TIGHT
from steps import with_options
from yardstick import Variant, gradient_faults, label, measure, step_faults, truth

from forkpoint import Config, wrap
from forkpoint.losses import GRPO, GSPO, Denominators
from forkpoint.testing import ReadOnlyHook, lifted_upcasts
from lanes import slow_besides, slow_besides_every

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample")

CONFIGS: tuple[Config, ...] = (
    *EVERY,
    *(Config(sharing=s, boundary="within", max_microbatch_tokens=TIGHT) for s in SHARINGS),
    *(Config(sharing=s, boundary="mixed", max_microbatch_tokens=TIGHT) for s in SHARINGS[1:]),
    *(Config(sharing=s, boundary="across", max_microbatch_tokens=CHAIN) for s in SHARINGS),
    *(Config(sharing=s, boundary="mixed", max_microbatch_tokens=CHAIN) for s in SHARINGS[1:]),
    Config(),
    Config(max_microbatch_tokens=CHAIN),
)
VARIANTS = [
    Variant(*v) for v in product(("llama", "qwen3"), (None, 7), (False, True), (False, True))
]
Steps = dict[tuple[Variant, str], list[Config]]


def in_turn(variants: list[Variant], losses: tuple[str, ...]) -> Steps:
    """The plans of each model and loss."""
    found: Steps = {}
    for n, (loss, config) in enumerate(product(losses, CONFIGS)):
        kernel = ("cpu_flash", "reference")[n // 3 % 2]
        plans = found.setdefault((variants[n % len(variants)], loss), [])
        plans.append(replace(config, attention_kernel=kernel))
    return found


STEPS = in_turn(VARIANTS, ("grpo", "gspo", "dpo", "coupled"))
OF_ENTROPIES = in_turn(
    [VARIANTS[0], VARIANTS[-1]], ("likelihood", "entropy", "rollout_entropy", "coupled_entropy")
)


def check_steps(variant: Variant, loss: str, configs: list[Config]) -> None:
    """A step under every configuration."""
    expected, model = truth(replace(variant, checkpointed=False), loss), variant.build()
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    # Checkpointing runs what lies within a layer again, and this shows that it did.
    model.model.layers[0].mlp.register_forward_pre_hook(ReadOnlyHook(count))
    faults = []
    with lifted_upcasts(model):
        policy = wrap(model)
        for config in configs:
            model.zero_grad()
            forwards = 0
            stats = with_options(policy, config).forward_backward(expected.batch, LOSSES[loss])
            name = label(config, stats.plan)
            faults += [f"{name}: {fault}" for fault in step_faults(model, stats, expected)]
            microbatches = len(stats.plan.microbatches)
            replayed = bool(stats.plan.program.scores)
            assert stats.events == stats.plan.events(), name
            assert forwards == microbatches * (1 + replayed + variant.checkpointed), name
    assert not faults, f"{len(faults)} differences from dense:\n" + "\n".join(faults[:20])


@pytest.mark.parametrize(("variant", "loss"), slow_besides_every(9, STEPS), ids=str)
def test_steps_are_those_of_dense_training(variant: Variant, loss: str) -> None:
    check_steps(variant, loss, STEPS[variant, loss])


# Those of the model with everything at once take long.
OF_FEW_ENTROPIES = [
    row for row in OF_ENTROPIES if not row[0].sinks and row[1] in ("entropy", "coupled_entropy")
]


@pytest.mark.parametrize(("variant", "loss"), slow_besides(OF_FEW_ENTROPIES, OF_ENTROPIES), ids=str)
def test_weights_and_gradients_of_entropies(variant: Variant, loss: str) -> None:
    check_steps(variant, loss, OF_ENTROPIES[variant, loss])


@pytest.mark.parametrize("loss", [GRPO(clip=0.2, kl=0.05), GSPO(clip=0.05)], ids=["grpo", "gspo"])
def test_several_calls_add_up_to_one_dense_step(loss: GRPO | GSPO) -> None:
    variant, config = VARIANTS[8], Config(boundary="across", max_microbatch_tokens=CHAIN)
    batch, model = truth(variant, "grpo").batch, variant.build()
    counts = Denominators(tokens=160.0, rollouts=32.0, groups=6.0)
    expected = measure(model, batch, loss, counts)
    torch.manual_seed(0)
    before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name].clone()
    policy, total = wrap(model, config), 0.0
    with lifted_upcasts(model):
        for members in (range(5), range(5, 11), range(11, 14)):
            part = batch.select(members)
            stats = policy.forward_backward(part, loss, denominators=counts)
            total += stats.loss
    assert total == pytest.approx(expected.dense.loss, abs=1e-10)
    assert not list(gradient_faults(model, expected, before))


def test_stats_say_what_ran() -> None:
    expected, model = truth(VARIANTS[0], "grpo"), VARIANTS[0].build()
    batch, trained = expected.batch, torch.tensor(expected.batch.loss_mask)
    stats = wrap(model, Config(boundary="across")).forward_backward(batch, LOSSES["grpo"])
    assert stats.computed_tokens == stats.plan.computed_tokens
    paths = {tuple(r.token_ids[:end].tolist()) for r in batch for end in range(1, len(r) + 1)}
    assert (stats.logical_tokens, stats.unique_tokens) == (batch.logical_tokens, len(paths))
    assert (stats.logprobs[~trained] == 0).all() and (stats.logprobs[trained] < 0).all()
    assert sorted(stats.phase_ms) == ["leaf", "prefix backward", "prefix forward"]
    assert min(stats.phase_ms.values()) >= 0 and stats.peak_memory_bytes is None
    assert not stats.logprobs.requires_grad
