"""Sizes of microbatches on the stages of a pipeline are chosen by the predicted time of a step."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest

from forkpoint import Config, RolloutBatch
from forkpoint.errors import PlanError
from forkpoint.losses import GSPO
from forkpoint.plan import MODELS, ModelShape, Plan, make_plan, stage_sizes
from forkpoint.plan.pipeline import forwards_time
from forkpoint.plan.stage_sizes import SizedOffer, choose_size, offers_of, plans_of_sizes
from forkpoint.plan.stages import stages_of_shape
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.units import GIB
from lanes import slow_besides
from made_calibrations import made_up

SHAPE = ModelShape.from_config(MODELS["qwen2.5-14b"])
FREE = Config(sharing="group")


@cache
def batch_of(groups: int, seed: int = 0) -> RolloutBatch:
    made = synthetic_rollouts(
        groups=groups, rollouts_per_group=4, prompt_tokens=4096, response_tokens=2048, seed=seed
    )
    return RolloutBatch(made)


def plans(
    batch: RolloutBatch, stages: int, budget_bytes: int | None = None, config: Config = FREE
) -> tuple[Plan, ...]:
    def make(config: Config, budget_bytes: int | None) -> Plan:
        coupling = GSPO().coupling(batch) if config.all_logprobs else None
        return make_plan(batch, SHAPE, config, coupling=coupling, budget_bytes=budget_bytes)

    return plans_of_sizes(config, budget_bytes, stages, make)


def time_of(offers: Sequence[SizedOffer], stages: int, budget_bytes: int | None) -> float:
    """Of one offer by each data rank."""
    ranks = [[offer] for offer in offers]
    return choose_size(ranks, stages_of_shape(SHAPE, stages), budget_bytes).time


def test_a_calibration_prices_the_stages() -> None:
    """Blocks of 1 us a token forward, 2 backward."""
    (plan,) = plans(batch_of(1), 1)[:1]
    calibration = made_up(shape=SHAPE)
    (offer,) = offers_of([plan], calibration)
    tokens = np.array(offer.tokens)
    assert offer.prices.blocks.backward == pytest.approx(tokens * SHAPE.layers * 2e-3, rel=1e-4)
    schedule = choose_size([[offer]], stages_of_shape(SHAPE, 2)).schedule
    step_ms = make_plan(batch_of(1), SHAPE, FREE, calibration=calibration).predicted_ms
    assert sum(schedule.busy) == pytest.approx(step_ms, rel=0.01)


@pytest.mark.parametrize(
    ("stages", "budget_bytes"),
    slow_besides([(2, 40 * GIB), (8, None)], [(2, None), (2, 40 * GIB), (8, None), (8, 40 * GIB)]),
)
def test_no_other_size_is_faster(stages: int, budget_bytes: int | None) -> None:
    offers = offers_of(plans(batch_of(4), stages, budget_bytes))
    found = choose_size([offers], stages_of_shape(SHAPE, stages), budget_bytes)
    assert found.fits and found.time <= time_of([offers[0]], stages, budget_bytes)
    for offer in offers:
        alone = choose_size([[offer]], stages_of_shape(SHAPE, stages), budget_bytes)
        assert not alone.fits or found.time <= alone.time * 1.01
    assert found.size > 0, "the first plan fills no pipeline"


def test_lengths_and_budgets_that_are_planned() -> None:
    batch, stages, budget = batch_of(4), 8, 40 * GIB
    free = plans(batch, stages)
    longest = max(m.tokens for m in free[0].microbatches)
    lengths = [plan.max_microbatch_tokens for plan in free]
    assert lengths == [free[0].max_microbatch_tokens, *(longest >> n for n in range(1, 5))]
    limited = partial(plans, batch, stages, config=Config(max_microbatch_tokens=4096))
    assert [plan.max_microbatch_tokens for plan in limited()] == [4096]
    both = limited(budget_bytes=budget)
    assert [plan.memory_budget_bytes for plan in both] == [budget, stages * budget]
    assert both[1].predicted_peak_bytes > budget
    # Short of memory, the stages still try the length that was asked for.
    tight = limited(budget_bytes=5 * GIB // 2)
    assert tight[0].max_microbatch_tokens < tight[1].max_microbatch_tokens == 4096


def test_short_microbatches_are_planned_where_there_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_sizes, "SHORT_TOKENS", 3000)
    few, many = plans(batch_of(4), 64), plans(batch_of(4), 1)
    assert len(few) == 5 and few[-1].max_microbatch_tokens < 3000
    lengths = [plan.max_microbatch_tokens for plan in many]
    assert lengths == [p.max_microbatch_tokens for p in few if p.max_microbatch_tokens >= 3000]


def test_data_ranks_choose_together() -> None:
    """Of ranks with unequal batches, one of which has a single plan."""
    stages = stages_of_shape(SHAPE, 4)
    many, one = offers_of(plans(batch_of(4), 4)), offers_of(plans(batch_of(1, seed=1), 4)[:1])
    found = choose_size([many, one], stages)
    assert found.time <= time_of([many[0], one[0]], 4, None)
    assert found.time == pytest.approx(time_of([many[found.size], one[0]], 4, None))
    assert len(found.programs) == 2
    assert len({len(program.instructions) for program in found.programs}) == 1
    swapped = choose_size([one, many], stages)
    assert (swapped.size, swapped.time) == (found.size, pytest.approx(found.time))


def test_a_pass_of_scores_counts() -> None:
    config = Config(sharing="group", all_logprobs=True)  # stands for the coupled loss above
    offers = offers_of(plans(batch_of(4), 4, config=config))
    stages = stages_of_shape(SHAPE, 4)
    found = choose_size([offers[-1:]], stages)
    assert found.scores.shape == (4, len(found.programs[0].scores)) and found.scores.size
    assert found.time == forwards_time(found.scores) + found.schedule.time
    # No stage can do it in less, and the last one begins after a microbatch has passed the others.
    assert forwards_time(found.scores) >= found.scores.sum(1).max()
    assert sum(found.busy) == pytest.approx(found.scores.sum() + sum(found.schedule.busy))


def test_a_step_that_fits_no_stage() -> None:
    offers, stages = offers_of(plans(batch_of(1), 2)), stages_of_shape(SHAPE, 2)
    assert not choose_size([offers], stages, 1000).fits
    with pytest.raises(PlanError, match=r"is predicted to need .* memory_budget is 1000 bytes"):
        choose_size([offers], stages, 1000, strict=True)
