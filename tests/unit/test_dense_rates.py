"""Time of a plan at dense training's rates, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.steps.dense_rates import Amounts, at_dense_rates
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from plan_shapes import SHAPE as TWO_LAYERS

SHAPE = replace(TWO_LAYERS, layers=3, windows=(0, 0, 2))


def test_amounts_by_hand() -> None:
    """A prompt of 4 edges in a row of its own, and two responses of 3 and 2 below it."""
    prompt = [1, 2, 3, 4, 5]
    batch = RolloutBatch(
        [
            Rollout([*prompt, 6, 7, 8], [0] * 5 + [1] * 3, 1.0, group_id="g"),
            Rollout([*prompt, 9, 9], [0] * 5 + [1] * 2, 1.0, group_id="g"),
        ]
    )
    shared = make_plan(batch, SHAPE, Config(sharing="group", boundary="across"))
    assert [row.tokens for row in shared.microbatches] == [4, 5]
    found = Amounts.of(shared)
    causal = 4 * 5 // 2
    below, windowed = (5 + 6 + 7) + (5 + 6), 2 * 5
    assert found == Amounts(4 * 2 + 5 * 3, 2 * causal + 2 * below + windowed, 5)
    dense = Amounts.of(make_plan(batch, SHAPE, Config(sharing="none")))
    assert dense.tokens == (7 + 6) * 3 and dense.num_loss_entries == 5
    assert dense.pairs == 2 * (28 + 21) + (1 + 2 * 6) + (1 + 2 * 5)


def test_each_kind_is_scaled_by_its_own_work() -> None:
    dense = Amounts(100.0, 50.0, 11), {"attention": 10.0, "products": 42.0, "copies": 8.0}
    few = Amounts(100.0, 50.0, 1), {"attention": 10.2, "products": 22.0, "copies": 8.0}
    found = at_dense_rates(dense, few, Amounts(50.0, 100.0, 20))
    assert found["attention"] == pytest.approx(20.0)
    assert found["products"] == pytest.approx((42 - 11 * 2) / 2 + 20 * 2)
    assert found["copies"] == pytest.approx(4.0)
    assert np.isclose(sum(at_dense_rates(dense, few, dense[0]).values()), 60.0)
