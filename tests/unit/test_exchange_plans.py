"""Plans of ranks that exchange prompts: every edge on one rank, in programs that meet."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forkpoint import Config, Plan, Rollout, RolloutBatch
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.parallel.placement.lockstep import exchange_plans, predict_step
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import RankStep
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.align import align
from forkpoint.plan.gathering import RankCosts, choose_split, link_cost
from forkpoint.plan.program import (
    BACKWARD,
    FORWARD,
    IDLE,
    RECOMPUTE,
    RETURN,
    SCORE,
    SHARE,
    Instruction,
)
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import (
    SharedPrompt,
    cannot_exchange,
    prompts_of,
    shared_prompts,
    worth_pricing,
)
from forkpoint.tree.forest import build_forest, sort_rollouts
from programs import check_program

SHAPE = ModelShape.from_config(MODELS["qwen3-8b"])


def rollout(prompt: Sequence[int], response: Sequence[int], group: str) -> Rollout:
    mask = np.repeat([0, 1], [len(prompt), len(response)])
    return Rollout([*prompt, *response], mask, 1.0, group_id=group)


@st.composite
def dealt(draw: st.DrawFn) -> list[RolloutBatch]:
    """Batches of two to four ranks; groups lie on any of them."""
    ranks = draw(st.integers(2, 4))
    own: list[list[Rollout]] = [[] for _ in range(ranks)]
    for group in range(draw(st.integers(1, 5))):
        # A few tokens, so that prompts are prefixes of one another and rollouts share more.
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=30))
        for _ in range(draw(st.integers(1, 5))):
            response = draw(st.lists(st.integers(0, 1), max_size=6))
            place = draw(st.integers(0, ranks - 1))
            own[place].append(rollout(prompt, response, f"group {group}"))
    return [RolloutBatch(each) for each in own]


CONFIGS = st.builds(
    Config,
    sharing=st.sampled_from(("auto", "group", "tree")),
    max_microbatch_tokens=st.integers(3, 40),
    activations=st.sampled_from(("keep", "recompute")),
)


@given(batches=dealt(), config=CONFIGS, coupled=st.booleans())
@settings(max_examples=30, deadline=None)
def test_plans_of_ranks_that_exchange(
    batches: list[RolloutBatch], config: Config, coupled: bool
) -> None:
    coupling = [np.zeros(len(b), np.int64) if coupled else None for b in batches]
    of = {id(b): c for b, c in zip(batches, coupling, strict=True)}
    given_batches = [batch if len(batch) else None for batch in batches]
    before = [make_plan(batch, config=config) if batch else None for batch in given_batches]
    plans, prompts = exchange_plans(
        given_batches,
        before,
        lambda b, t: make_plan(b, config=config, prompts=t, coupling=of[id(b)]),
    )
    if not prompts:
        assert plans == before
        return
    spared = sum(trunk.edges * (len(trunk.ranks) - 1) for trunk in prompts)
    own = [plan for plan in plans if plan is not None]
    assert spared == sum(p.forest.edges - p.computed_tokens for p in own)
    for plan in own:
        check_program(plan)
        received = [m.index for m in plan.microbatches if m.shared_prompt == "received"]
        ran = {i.microbatch for i in plan.program.instructions}
        assert not ran & set(received)
        # Prompts lie around everything else, and train on nothing.
        assert all(m.num_loss_entries == 0 for m in plan.microbatches if m.shared_prompt)
    programs = [plan.program for plan in own]
    costs = [[float(m.tokens) for m in plan.microbatches] for plan in own]
    aligned = align(programs, costs)
    shapes = {
        tuple((i.operation, i.slot, i.ends_at, i.keeps_graph) for i in p.instructions)
        for p in aligned
    }
    assert len(shapes) == 1
    for plan, program in zip(own, aligned, strict=True):
        kinds = (FORWARD, BACKWARD, SCORE, SHARE, RETURN)
        mine = [
            (i.operation, i.microbatch)
            for i in program.instructions
            if i.operation in kinds and (i.exchanges or not i.idle)
        ]
        wanted = [
            (i.operation, i.microbatch)
            for i in plan.program.instructions
            if i.operation != RECOMPUTE
        ]
        assert sorted(mine) == sorted(wanted)
        assert [e for e in mine if e[1] < 0] == [e for e in wanted if e[1] < 0]
        assert program.instructions[-1].operation == BACKWARD
        # What slots add is idle: each own instruction waits for nothing that comes later.
        check_program(replace(plan, program=program))
    assert predict_step(plans, None, prompts).lockstep > 0


# What ranks have in common
# ------------------------------------------------------------


def test_prompts_of_a_batch() -> None:
    batch = RolloutBatch(
        [
            rollout([1, 2, 3], [4], "a"),
            rollout([1, 2, 3], [5], "a"),
            rollout([1, 2, 3], [6], "b"),  # of another group, and the same prompt
            rollout([9], [6], "c"),  # nothing to spare
            rollout([8, 8, 8], [], "d"),  # trains on nothing
        ]
    )
    (trunk,) = prompts_of(batch, run_lengths(batch)).values()
    assert trunk.edges == 2 and trunk.rollouts == (0, 1, 2)
    # Rollouts that a loss leaves out are not in it.
    zero = np.array([True, False, False, False, False])
    (trunk,) = prompts_of(batch, run_lengths(batch, zero)).values()
    assert trunk.edges == 2 and trunk.rollouts == (1, 2)


def test_owners_are_those_with_least_to_do() -> None:
    prompts = shared_prompts(
        [{"a": 10, "b": 4, "c": 2}, {"a": 10, "b": 4}, {"d": 5}], [20.0, 20.0, 5.0]
    )
    assert [(t.digest, t.owner, t.ranks) for t in prompts] == [("a", 0, (0, 1)), ("b", 1, (0, 1))]
    assert worth_pricing(prompts, [20.0, 20.0, 5.0])
    assert not worth_pricing(prompts, [20.0, 20.0, 5_000.0])


# Prices
# ------------------------------------------------------------


def group(number: int, prompt: int, response: int, count: int) -> list[Rollout]:
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 30_000, prompt)
    return [
        rollout(tokens.tolist(), rng.integers(0, 30_000, response).tolist(), f"group {number}")
        for _ in range(count)
    ]


def steps(groups: list[list[Rollout]]) -> tuple[float, float]:
    """Predicted steps of two ranks that each have half of every group: replicated, exchanged."""
    batches = [RolloutBatch([r for g in groups for r in g[rank::2]]) for rank in range(2)]
    plans: list[Plan | None] = [make_plan(batch, SHAPE) for batch in batches]
    others, prompts = exchange_plans(batches, plans, lambda b, t: make_plan(b, SHAPE, prompts=t))
    return predict_step(plans).lockstep, predict_step(others, None, prompts).lockstep


def test_prompts_of_several_groups_are_cheaper_to_exchange() -> None:
    replicated, exchanged = steps([group(0, 8192, 2048, 8), group(1, 8192, 2048, 8)])
    # Each rank runs one prompt of two: of 8192 + 4 * 2048 tokens a group, a quarter.
    assert 0.7 < exchanged / replicated < 0.85


def test_the_link_is_priced_by_the_busiest_rank() -> None:
    costs = [RankCosts(forward=(300.0,), tokens=300)] * 3
    # Gathering all weights takes 2,048 tokens, of one each.
    nbytes = 10 * SHAPE.exchanged_token_bytes + SHAPE.state_bytes
    one = 2048 * nbytes / (2 * SHAPE.linear_parameters)
    to_two = SharedPrompt("a", 10, 0, (0, 1, 2))
    both = [SharedPrompt("a", 10, 0, (0, 1)), SharedPrompt("b", 10, 1, (0, 1))]
    assert link_cost([to_two], SHAPE, costs) == pytest.approx(2 * one)
    assert link_cost(both, SHAPE, costs) == pytest.approx(one)
    assert link_cost([], SHAPE, costs) == 0


def test_the_cheaper_is_chosen() -> None:
    assert choose_split("auto", 10.0, 9.0).taken == "exchange"
    assert choose_split("auto", 10.0, 9.99).taken == "replicate"
    assert "1.11x faster" in choose_split("auto", 10.0, 9.0).reason
    assert choose_split("exchange", 1.0, 9.0) == choose_split("exchange", 9.0, 1.0)


@pytest.mark.parametrize("config", [Config(sharing="none"), Config(boundary="across")])
def test_options_that_keep_ranks_from_exchanging(config: Config) -> None:
    assert cannot_exchange(config)
    assert not cannot_exchange(Config()) and not cannot_exchange(Config(boundary="mixed"))


def test_a_forest_is_split() -> None:
    tokens, offsets = np.asarray([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]), np.asarray([0, 5, 10])
    forest = build_forest(sort_rollouts(tokens, offsets), 2)
    assert forest.length.tolist() == [3, 1, 1]
    split = forest.split({0: 2})
    assert split.length.tolist() == [2, 1, 1, 1] and split.start.tolist() == [0, 2, 3, 3]
    assert split.parent.tolist() == [-1, 0, 1, 1] and split.leaf.tolist() == [2, 3]
    assert forest.split({0: 3}).length.tolist() == [3, 1, 1]


def test_a_rank_without_exchanged_prompts_makes_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [SharedPrompt("", 3, 0, (0, 1))]
    step = RankStep(DataRanks(2, 3, (0, 1, 2)))
    layout = {("", "k"): (False, (2,), torch.float32)}
    monkeypatch.setattr(step, "gather", lambda _: [{"layout": layout}, {"layout": {}}, {}])
    monkeypatch.setattr(DataRanks, "group_of", lambda *_: None)
    plan = make_plan(RolloutBatch([rollout([1], [2], "a")]))
    exchange = PromptExchange(step, prompts, (), plan, nn.Identity(), torch.device("cpu"))
    cache = PrefixCache(4, gradients=True)
    exchange.begin_pass(cache)
    for operation in (SHARE, RETURN):
        exchange.before(Instruction(operation, 0, IDLE), cast(Any, None))
    assert not cache.layout()
