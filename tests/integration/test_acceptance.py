"""The acceptance test: however a batch is planned, the step is that of ordinary training.

One scenario (see scenarios.py) under every combination of sharing and boundary, in float64: loss,
log-probs, entropies and every parameter's gradient within 1e-10 of a dense run by the stock model.
Options of models, losses, plans and kernels are combined in pairs (see pairwise.py).
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scenarios import CHAIN, LOSSES, TIGHT, acceptance_batch, paired_batch
from steps import with_options
from yardstick import Variant, gradient_faults, label, measure, step_faults, truth, value_faults

from forkpoint import Config, Plan, PlanError, wrap
from forkpoint.config import Boundary, Sharing
from forkpoint.losses import GRPO, GSPO, Denominators
from forkpoint.losses.base import as_loss
from forkpoint.plan import make_plan
from forkpoint.testing import ReadOnlyHook, lifted_upcasts
from forkpoint.tree import Microbatch
from lanes import slow_besides, slow_besides_every
from pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample")

SHARINGS: tuple[Sharing, ...] = ("none", "group", "tree")
BOUNDARIES: tuple[Boundary, ...] = ("within", "across", "mixed")
EVERY = tuple(product(SHARINGS, BOUNDARIES))
CONFIGS: tuple[Config, ...] = (
    *(Config(sharing=s, boundary=b) for s, b in EVERY),
    *(Config(sharing=s, boundary="within", max_microbatch_tokens=TIGHT) for s in SHARINGS),
    *(Config(sharing=s, boundary="mixed", max_microbatch_tokens=TIGHT) for s in SHARINGS[1:]),
    *(Config(sharing=s, boundary="across", max_microbatch_tokens=CHAIN) for s in SHARINGS),
    *(Config(sharing=s, boundary="mixed", max_microbatch_tokens=CHAIN) for s in SHARINGS[1:]),
    Config(),
    Config(max_microbatch_tokens=CHAIN),
)
VARIANTS = [Variant(*v) for v in product(("llama", "qwen3"), (None, 7), (False, True))]
CHECKPOINTED = [replace(variant, checkpointed=True) for variant in VARIANTS]

Steps = dict[tuple[Variant, str], list[Config]]


def grouped(rows: list[tuple[str, int | None, bool, bool, str, Config, str]]) -> Steps:
    """The plans of each model and loss."""
    found: Steps = {}
    for *variant, loss, config, kernel in rows:
        found.setdefault((Variant(*variant), loss), []).append(
            replace(config, attention_kernel=kernel)
        )
    return found


MODELS = (("llama", "qwen3"), (None, 7), (False, True), (False, True))
STEPS = grouped(
    pairwise(
        *MODELS,
        ("grpo", "gspo", "dpo", "coupled"),
        CONFIGS,
        ("cpu_flash", "reference"),
    )
)
OF_ENTROPIES = grouped(
    pairwise(
        *MODELS,
        ("likelihood", "entropy", "rollout_entropy", "coupled_entropy"),
        CONFIGS,
        ("cpu_flash", "reference"),
        keep=lambda row: row[:4] in (("llama", None, False, False), ("qwen3", 7, True, True)),
    )
)
SCORED = {
    variant: configs
    for (variant, _), configs in grouped(
        pairwise(*MODELS, ("grpo",), CONFIGS, ("cpu_flash", "reference"))
    ).items()
}
WAYS = {"one microbatch", "microbatch by microbatch", "replayed"}
NEVER = {"grpo": {"replayed"}, "coupled": {"microbatch by microbatch"}}
"""A loss of single tokens is never replayed, one over the whole batch never goes microbatch by
microbatch."""


def check_steps(variant: Variant, loss: str, configs: list[Config]) -> set[str]:
    """A step under every configuration; returns the ways in which the loss met the microbatches."""
    expected, model = truth(replace(variant, checkpointed=False), loss), variant.build()
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    # Checkpointing runs what lies within a layer again, and this shows that it did.
    model.model.layers[0].mlp.register_forward_pre_hook(ReadOnlyHook(count))
    faults, ways = [], set()
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
            ways.add(
                "replayed"
                if replayed
                else "one microbatch"
                if microbatches == 1
                else "microbatch by microbatch"
            )
            assert forwards == microbatches * (1 + replayed + variant.checkpointed), name
    assert not faults, f"{len(faults)} differences from dense:\n" + "\n".join(faults[:20])
    return ways


@pytest.mark.parametrize(("variant", "loss"), slow_besides_every(3, STEPS), ids=str)
def test_steps_are_those_of_dense_training(variant: Variant, loss: str) -> None:
    ways = check_steps(variant, loss, STEPS[variant, loss])
    assert ways <= WAYS - NEVER.get(loss, set())


@pytest.mark.parametrize("loss", ["grpo", "gspo", "dpo", "coupled"])
def test_losses_meet_microbatches_in_every_way(loss: str) -> None:
    ways = check_steps(VARIANTS[0], loss, list(CONFIGS[::4]))
    assert ways == WAYS - NEVER.get(loss, set())


# Those of the model with everything at once take long.
OF_FEW_ENTROPIES = [row for row in OF_ENTROPIES if not row[0].sinks]


@pytest.mark.parametrize(("variant", "loss"), slow_besides(OF_FEW_ENTROPIES, OF_ENTROPIES), ids=str)
def test_weights_and_gradients_of_entropies(variant: Variant, loss: str) -> None:
    check_steps(variant, loss, OF_ENTROPIES[variant, loss])


@pytest.mark.parametrize("variant", slow_besides_every(3, SCORED), ids=str)
def test_scores_are_those_of_a_dense_forward(variant: Variant) -> None:
    expected, model = truth(replace(variant, checkpointed=False), "grpo"), variant.build()
    faults = []
    with lifted_upcasts(model):
        policy = wrap(model)
        for config in SCORED[variant]:
            scores = with_options(policy, config).score(expected.batch, entropy=True)
            assert scores.entropies is not None
            name = label(config, scores.plan)
            for found, dense in (
                (scores.logprobs, expected.dense.logprobs_T),
                (scores.entropies, expected.dense.entropies_T),
            ):
                faults += [f"{name}: {fault}" for fault in value_faults("scores", found, dense)]
                assert not found.requires_grad, name
            assert scores.events == scores.plan.events(backward=False), name
    assert not faults, "\n".join(faults)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("loss", [GRPO(clip=0.2, kl=0.05), GSPO(clip=0.05)], ids=["grpo", "gspo"])
def test_several_calls_add_up_to_one_dense_step(loss: GRPO | GSPO) -> None:
    variant, config = VARIANTS[4], Config(boundary="across", max_microbatch_tokens=CHAIN)
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


@pytest.mark.parametrize("loss", ["grpo", "gspo", "coupled"])
def test_scale_multiplies_gradients_and_not_the_loss(loss: str) -> None:
    expected, model = truth(VARIANTS[4], loss), VARIANTS[4].build()
    policy = wrap(model, Config(sharing="tree", boundary="across"))
    with lifted_upcasts(model):
        for scale in (0.25, 0.75):
            stats = policy.forward_backward(expected.batch, LOSSES[loss], scale=scale)
            assert stats.loss == pytest.approx(expected.dense.loss, abs=1e-10)
    assert not list(gradient_faults(model, expected))


def test_stats_say_what_ran() -> None:
    expected, model = truth(VARIANTS[0], "grpo"), VARIANTS[0].build()
    batch = expected.batch
    paths = [
        (group, tuple(rollout.token_ids[:end].tolist()))
        for rollout, group in zip(batch, batch.group_index.tolist(), strict=True)
        for end in range(1, len(rollout) + 1)
    ]
    # What runs of each rollout: up to its last trained token.
    ends = [int(r.loss_mask.nonzero()[0].max(initial=0)) + 1 for r in batch]
    edges = [
        (group, tuple(rollout.token_ids[:end].tolist()))
        for rollout, group, run in zip(batch, batch.group_index.tolist(), ends, strict=True)
        for end in range(2, run + 1)
    ]
    computed = {
        "none": len(edges),
        "group": len(set(edges)),
        "tree": len({tokens for _, tokens in edges}),
    }
    assert len(set(computed.values())) == 3
    for sharing in SHARINGS:
        policy = wrap(model, Config(sharing=sharing, boundary="across"))
        stats = policy.forward_backward(batch, LOSSES["grpo"])
        assert stats.computed_tokens == stats.plan.computed_tokens == computed[sharing]
        assert stats.logical_tokens == len(paths)
        assert stats.unique_tokens == len({tokens for _, tokens in paths})
        assert stats.logprobs.shape == (len(paths),) and stats.logprobs.dtype == torch.float64
        trained = torch.tensor(batch.loss_mask.copy())
        assert (stats.logprobs[~trained] == 0).all() and (stats.logprobs[trained] < 0).all()
        assert (
            sorted(stats.phase_ms) == ["leaf", "prefix backward", "prefix forward"]
            and min(stats.phase_ms.values()) >= 0
        )
        assert stats.peak_memory_bytes is None
        assert not stats.logprobs.requires_grad


# What follows keeps the scenario honest: it must hold everything that it is said to hold.


def external_parents(plan: Plan, microbatch: Microbatch) -> set[int]:
    """The segments of other microbatches right above a microbatch's own."""
    return {int(plan.forest.parent[s]) for s in microbatch.segments} - {-1, *microbatch.segments}


def nesting(plan: Plan) -> int:
    """How many microbatches are open at once, at most."""
    steps = [1 if event.startswith("forward") else -1 for event in plan.events()]
    return int(np.cumsum(steps).max())


def test_the_batch_has_every_feature() -> None:
    batch = acceptance_batch()
    tokens = {r.rollout_id: (r.temperature, *r.token_ids.tolist()) for r in batch}
    trained = {r.rollout_id: int(r.loss_mask.sum()) for r in batch}
    sizes = sorted(len(members) for members in batch.groups())
    assert sizes[0] == 1 and len([size for size in sizes if size > 1]) == 2
    assert len(set(batch.temperatures.tolist())) == 2
    assert tokens["warm-0"][1:] == tokens["twin-0"][1:] and tokens["warm-0"] != tokens["twin-0"]
    assert tokens["twin-0"] == tokens["twin-1"] and trained["twin-0"] and trained["twin-1"]
    prefix = tokens["prefix"]
    assert tokens["deep-a"][: len(prefix)] == prefix and len(tokens["deep-a"]) > len(prefix)
    assert batch.lengths.min() == 1 and trained["token"] == 0
    assert trained["masked"] == 0 and len(tokens["masked"]) > 2
    # Two groups share their first tokens, so that a tree holds both; the third is alone.
    shared = sum(a == b for a, b in zip(tokens["deep-a"], tokens["beta-0"], strict=False)) - 1
    assert shared >= 2 and tokens["gamma"][1] != tokens["deep-a"][1]

    for sharing in ("group", "tree"):
        forest = make_plan(batch, config=Config(sharing=sharing, boundary="within")).forest
        assert forest.depth.max() >= 3
        owners: dict[int, list[int]] = {}
        for token, edge in enumerate(forest.token_edges(batch.offsets).tolist()):
            owners.setdefault(edge, []).append(token)
        del owners[-1]
        masks = [batch.loss_mask[tokens] for tokens in owners.values()]
        assert any(mask.any() and not mask.all() for mask in masks)
        temperatures = np.repeat(batch.temperatures, batch.lengths)
        trained_at = [
            set(temperatures[t][mask]) for t, mask in zip(owners.values(), masks, strict=True)
        ]
        assert any(len(found) == 2 for found in trained_at)
        together = [t for t, mask in zip(owners.values(), masks, strict=True) if mask.sum() > 2]
        assert any(len(set(batch.advantages[tokens])) > 2 for tokens in together)
    assert any(np.ndim(rollout.advantage) for rollout in batch)


def test_the_plans_have_every_feature() -> None:
    batch = acceptance_batch()
    plans = {config: make_plan(batch, config=config) for config in CONFIGS}
    assert {(p.sharing, p.boundary) for c, p in plans.items() if c.sharing != "auto"} == set(EVERY)
    for sharing in SHARINGS:
        config = Config(sharing=sharing, boundary="within", max_microbatch_tokens=CHAIN)
        with pytest.raises(PlanError, match="cannot be cut"):
            make_plan(batch, config=config)

    tree = plans[Config(sharing="tree", boundary="across")]
    mixed = plans[Config(sharing="tree", boundary="mixed", max_microbatch_tokens=TIGHT)]
    assert any(len(external_parents(tree, microbatch)) >= 2 for microbatch in tree.microbatches)
    groups = [
        {int(batch.group_index[o]) for s in r.segments for o in tree.forest.owners(s)}
        for r in tree.microbatches
    ]
    assert any(len(found) >= 2 for found in groups)
    assert any(external_parents(mixed, microbatch) for microbatch in mixed.microbatches)
    assert any(
        set(mixed.forest.parent[list(microbatch.segments)]) & set(microbatch.segments)
        for microbatch in mixed.microbatches
    )

    for sharing in SHARINGS:
        plan = plans[Config(sharing=sharing, boundary="across", max_microbatch_tokens=CHAIN)]
        forest = plan.forest
        microbatch_of = {
            segment: microbatch.index
            for microbatch in plan.microbatches
            for segment in microbatch.segments
        }
        links = [
            (parent, segment)
            for segment, parent in enumerate(forest.parent.tolist())
            if parent >= 0 and forest.multiplicity[parent] == forest.multiplicity[segment]
        ]
        assert any(microbatch_of[parent] != microbatch_of[segment] for parent, segment in links), (
            "no chain"
        )
        if sharing != "none":
            assert nesting(plan) > 3
            assert any(len(microbatch.children) >= 2 for microbatch in plan.microbatches), (
                "no parent with leaves"
            )

    assert plans[Config(max_microbatch_tokens=CHAIN)].sharing == "tree"


@pytest.mark.parametrize("loss", ["gspo", "dpo", "coupled"])
def test_coupled_rollouts_lie_in_one_microbatch_and_in_several(loss: str) -> None:
    batch = paired_batch() if loss == "dpo" else acceptance_batch()
    coupling = as_loss(LOSSES[loss]).coupling(batch)
    plans = [make_plan(batch, config=config) for config in CONFIGS]
    split = [plan.splits(batch, coupling) for plan in plans]
    assert any(split) and not all(split)
