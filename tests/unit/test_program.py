"""Programs: what each instruction waits for, other orders, and common shapes for ranks."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.errors import PlanError
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.program import BACKWARD, FORWARD, mark_last_backward
from strategies import batches


def three_levels(**config: object) -> Plan:
    """A system prompt over two prompts, each over two responses, in microbatches of 4 tokens."""
    lists = [
        [1, 1, 1, 1, 1, prompt, prompt, prompt, answer, answer]
        for prompt in (2, 3)
        for answer in (4, 5)
    ]
    batch = RolloutBatch(Rollout(ids, [0] * 8 + [1, 1], 1.0) for ids in lists)
    given = {"sharing": "tree", "boundary": "across", "max_microbatch_tokens": 4, **config}
    return make_plan(batch, config=Config(**given), coupling=np.zeros(4, np.int64))  # type: ignore[arg-type]


def test_the_program_of_a_coupled_loss_by_hand() -> None:
    plan = three_levels(activations="recompute")
    text = [
        f"{i.operation} {i.microbatch} {i.ends_at}{'' if i.keeps_graph else ' dropped'}"
        for i in plan.program.instructions
    ]
    assert text == [
        *("score 0 boundary dropped", "score 1 boundary dropped", "score 2 head dropped"),
        *("score 3 boundary dropped", "score 4 head dropped"),
        *("forward 0 boundary dropped", "forward 1 boundary dropped"),
        *("forward 2 head", "backward 2 head"),
        *("recompute 1 boundary", "backward 1 head", "forward 3 boundary dropped"),
        *("forward 4 head", "backward 4 head", "recompute 3 boundary", "backward 3 head"),
        *("recompute 0 boundary", "backward 0 head"),
    ]
    assert plan.program.instructions == (*plan.program.scores, *plan.program.training)
    marked = mark_last_backward(plan.program.training)
    assert [i.last_backward for i in marked] == [False] * 12 + [True]
    assert plan.events()[:2] == ("score prefix 0", "score prefix 1")
    assert plan.events()[-2:] == ("recompute prefix 0", "backward prefix 0")


def test_dependencies_by_hand() -> None:
    plan = three_levels()
    plan = plan.with_program(scores=False)
    # F0 F1 F2 B2 B1 F3 F4 B4 B3 B0
    assert plan.waits_for() == (
        *((), (0,), (1,), (2,), (1, 3)),
        *((0,), (5,), (6,), (5, 7), (0, 4, 8)),
    )
    assert plan.with_program(scores=True).waits_for() == plan.waits_for()


def test_an_order_that_breaks_a_dependency_is_refused() -> None:
    plan = three_levels().with_program(scores=False)
    with pytest.raises(PlanError, match="unit 4 runs before unit 3"):
        plan.reordered([0, 1, 2, 4, 3, 5, 6, 7, 8, 9])
    with pytest.raises(PlanError, match="give the position of each unit once"):
        plan.reordered([0, 1, 2, 3])


configs = st.builds(
    Config,
    sharing=st.sampled_from(("none", "group", "tree")),
    boundary=st.sampled_from(("across", "mixed")),
    max_microbatch_tokens=st.integers(1, 12),
    activations=st.sampled_from(("keep", "recompute")),
)


def any_order(plan: Plan, rng: random.Random) -> list[int]:
    """A random order that keeps to the dependencies."""
    waits = [set(w) for w in plan.waits_for()]
    order: list[int] = []
    while len(order) < len(waits):
        ready = [at for at, w in enumerate(waits) if at not in order and not w - set(order)]
        order.append(rng.choice(ready))
    return order


def check_slots(plan: Plan) -> int:
    """Captures that live at once are apart, within the stated bound; the most slots in use."""
    captured = [
        [
            (plan.cache_of[s], plan.cache_of[s] + int(plan.forest.length[s]))
            for s in plan.captured(m)
        ]
        for m in plan.microbatches
    ]
    sizes = [sum(end - begin for begin, end in runs) for runs in captured]
    live: dict[int, set[int]] = {}
    peak = 0
    bound = 0
    for i in plan.program.training:
        if i.operation == FORWARD and sizes[i.microbatch]:
            held = set().union(*live.values())
            own = {slot for begin, end in captured[i.microbatch] for slot in range(begin, end)}
            assert not held & own and max(own) < plan.cache_tokens
            peak = max(peak, len(held | own))
            bound = max(bound, len(held) + len(live) * (len(own) - 1) + len(own))
            live[i.microbatch] = own
        elif i.operation == BACKWARD:
            live.pop(i.microbatch, None)
    assert not live
    assert plan.cache_tokens <= bound
    return peak


@settings(max_examples=15, derandomize=True, deadline=None)
@given(batches(), configs, st.booleans(), st.randoms(use_true_random=False))
def test_in_any_order_slots_do_not_clash(
    batch: RolloutBatch, config: Config, coupled: bool, rng: random.Random
) -> None:
    coupling = np.zeros(len(batch), np.int64) if coupled else None
    nested = make_plan(batch, config=config, coupling=coupling)
    plan = nested.reordered(any_order(nested, rng))
    assert check_slots(nested) == nested.cache_tokens, "no more than what lives at once"
    assert check_slots(plan) <= plan.cache_tokens
    again = plan.with_program(scores=plan.program.has_scores)
    assert again.cache_of == nested.cache_of and again.state_of == nested.state_of
    assert again.cache_tokens == nested.cache_tokens


# What a host can do
# ------------------------------------------------------------


def test_a_host_that_is_not_left_early_gets_no_such_plan() -> None:
    batch = RolloutBatch([Rollout([1, 2, 3, n], [0, 0, 0, 1], 1.0) for n in (4, 5)])
    config = Config(sharing="group", boundary="across", activations="recompute")
    plans = [
        make_plan(batch, config=config, capabilities=Capabilities(leaves_early=early))
        for early in (True, False)
    ]
    ends = [[i.ends_at for i in plan.program.instructions] for plan in plans]
    assert ends[0] == ["boundary", "head", "head", "boundary", "head"]
    assert ends[1] == ["blocks", "head", "head", "head", "head"]
    plans[0].check_host(Capabilities(), 1)
    plans[1].check_host(Capabilities(), 1)
    with pytest.raises(PlanError, match="ends forwards inside the last block"):
        plans[0].check_host(Capabilities(leaves_early=False), 1)
