"""Placement of rollouts on ranks that exchange the prompts that several of them have."""

from dataclasses import replace

import numpy as np
import pytest

from forkpoint import Rollout, RolloutBatch
from forkpoint.parallel.placement.exchanges import ExchangePrices, Prompts, split_groups
from forkpoint.parallel.placement.items import Priced
from forkpoint.parallel.placement.lockstep import exchange_plans, predict_step
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.place import lists_of, place, place_paths
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.tree.forest import IntArray
from made_calibrations import LINK, SHAPE, made_up

QWEN = ModelShape.from_config(MODELS["qwen3-8b"], dtype_bytes=2)
RATES = Rates.of(QWEN)
PRICES = ExchangePrices.of(QWEN, RATES)
CAPACITY = 16384


def groups(count: int, prompt: int, response: int, size: int, *, first: int = 1) -> RolloutBatch:
    """Flat groups whose prompts train on nothing, but for their last tokens from `first` on."""
    rollouts = []
    for number in range(count):
        rng = np.random.default_rng(number)
        tokens = rng.integers(0, 30_000, prompt)
        mask = np.repeat([0, 1], [prompt + 1 - first, response + first - 1])
        for _ in range(size):
            ids = np.concatenate([tokens, rng.integers(0, 30_000, response)])
            rollouts.append(Rollout(ids, mask, 1.0, group_id=str(number)))
    return RolloutBatch(rollouts)


def steps(batch: RolloutBatch, rank: IntArray, ranks: int) -> tuple[float, float]:
    """Predicted steps of these ranks' plans, replicated and exchanged."""
    parts = [batch.select(np.flatnonzero(rank == r).tolist()) for r in range(ranks)]
    plans = [make_plan(part, QWEN) for part in parts]
    others, prompts = exchange_plans(parts, plans, lambda b, t: make_plan(b, QWEN, prompts=t))
    replicated = predict_step(plans).lockstep
    return replicated, predict_step(others, None, prompts).lockstep if prompts else replicated


@pytest.mark.parametrize(("count", "ranks"), [(5, 4), (9, 8)])
def test_exchanging_is_placed_for_where_it_is_faster(count: int, ranks: int) -> None:
    batch = groups(count, 8192, 1024, 8)
    paths = Paths.of_batch(batch)
    forest = paths.forest()
    alone = place_paths(paths, forest, RATES, ranks)
    rank = place_paths(paths, forest, RATES, ranks, exchange=PRICES)
    replicated, _ = steps(batch, alone, ranks)
    fallback, exchanged = steps(batch, rank, ranks)
    assert exchanged < 0.95 * replicated
    # Where the step does not exchange after all, little is lost.
    assert fallback < 1.25 * replicated
    assert sorted(np.unique(rank)) == list(range(ranks))
    assert place(batch, ranks=ranks, model=QWEN) == lists_of(rank, ranks)
    assert place(batch, ranks=ranks, model=QWEN, split="replicate") == lists_of(alone, ranks)
    # What is predicted for placing is about what is predicted of plans.
    priced = Priced.of(paths, forest, RATES)
    assert PRICES is not None
    prompts = Prompts.of(priced, split_groups(paths.groups, rank))
    found = prompts.step_cost(rank, ranks, CAPACITY, PRICES) * priced.rates.unit_cost
    assert found == pytest.approx(exchanged, rel=0.06)


def test_groups_stay_whole_where_a_loss_couples_them() -> None:
    batch = groups(5, 8192, 1024, 8)
    paths = Paths.of_batch(batch)
    rank = place_paths(paths, paths.forest(), RATES, 4, whole_groups=True, exchange=PRICES)
    assert not len(split_groups(paths.groups, rank))


def test_prompts_end_before_what_is_trained_or_differs() -> None:
    batch = groups(2, 100, 10, 3, first=41)
    priced = Priced.of(Paths.of_batch(batch), Paths.of_batch(batch).forest(), RATES)
    found = Prompts.of(priced, np.asarray([0, 1]))
    # Sixty tokens are not trained, which are 59 edges.
    assert found.edges.tolist() == [59, 59]
    assert int(found.priced.forest.length.sum()) == int(priced.forest.length.sum()) - 2 * 59
    assert found.priced.total == pytest.approx(priced.total - int(found.cost.sum()), rel=1e-9)
    whole = Prompts.of(priced, np.asarray([0, 1]), left=1.0)
    assert whole.priced.total == pytest.approx(priced.total, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_owner_sends_a_prompt_to_each_other_rank(ranks: int) -> None:
    paths = Paths.of_batch(groups(1, 100, 10, 3))
    priced = Priced.of(paths, paths.forest(), Rates.of(None))
    prompts, rank = Prompts.of(priced, np.asarray([0])), np.arange(3) % ranks
    free, paid = (
        prompts.step_cost(rank, ranks, CAPACITY, prices) * prompts.priced.rates.unit_cost
        for prices in (ExchangePrices(0.0, 0.0, 0.0), ExchangePrices(3.0, 5.0, 7.0))
    )
    assert paid - free == pytest.approx((ranks - 1) * (3 * 99 + 5) + 7)


def test_what_groups_share_with_others_is_run_with_each_prompt() -> None:
    """Rollouts of a prompt that is exchanged share nothing else, as in the plans of a step."""
    first = [7] * 50
    rollouts = [
        Rollout([*first, g, g + 10, g, n, n], [0] * 53 + [1] * 2, 1.0, group_id=str(g))
        for g in range(3)
        for n in (1, 2)
    ]
    paths = Paths.of_batch(RolloutBatch(rollouts))
    priced = Priced.of(paths, paths.forest(), Rates.of(None))
    found = Prompts.of(priced, np.asarray([1]))
    assert found.edges.tolist() == [52]
    # The others have 49 edges in common and five of a kind after them, of which three are shared by
    # two rollouts; of this group two edges a rollout are left.
    assert int(found.priced.forest.length.sum()) == 49 + 2 * (3 + 2 * 2) + 2 * 2
    assert int(priced.forest.length.sum()) == 49 + 3 * (3 + 2 * 2)


def test_prices_of_sending_are_measured_ones_where_there_are_any() -> None:
    assert ExchangePrices.of(None, Rates.of(None)) is None
    calibration = made_up(link=LINK)
    found = ExchangePrices.of(SHAPE, Rates.of(SHAPE, calibration), calibration)
    assert found is not None
    nbytes = SHAPE.boundary_bytes_per_token + SHAPE.boundary_gradient_bytes_per_token
    assert found.token == pytest.approx(nbytes / 2e6)
    assert found.step == pytest.approx(2 * 2 * SHAPE.layers * 0.25)
    dear = ExchangePrices.of(
        SHAPE,
        Rates.of(SHAPE, calibration),
        replace(calibration, link=replace(LINK, send_bytes_per_ms=1e6)),
    )
    assert dear is not None and dear.token == pytest.approx(2 * found.token)
    nominal = ExchangePrices.of(QWEN, RATES)
    assert nominal is not None and nominal.token < 0.1 * RATES.token and nominal.step == 0
