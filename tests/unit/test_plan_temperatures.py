"""Rollouts of one path at several temperatures: the body once, the head for each temperature."""

from collections.abc import Sequence

import numpy as np
import pytest

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from plan_shapes import SHAPE


def at_temperatures(*temperatures: float, masks: Sequence[Sequence[int]] = ()) -> RolloutBatch:
    """One rollout at each temperature, of the same tokens."""
    every = masks or [[0, 0, 1, 1]] * len(temperatures)
    return RolloutBatch(
        Rollout([1, 2, 3, 4], mask, 1.0, temperature=temperature, group_id="g")
        for temperature, mask in zip(temperatures, every, strict=True)
    )


@pytest.mark.parametrize(
    ("temperatures", "masks", "num_loss_entries"),
    [
        ((0.7, float(np.nextafter(0.7, 1))), (), 4),
        ((1.0, 0.5), ([0, 0, 1, 1], [0, 1, 0, 1]), 4),  # one shares its temperature with nobody
    ],
)
def test_an_edge_has_an_entry_for_each_temperature_that_trains_it(
    temperatures, masks, num_loss_entries
) -> None:
    batch = at_temperatures(*temperatures, masks=masks)
    plan = make_plan(batch, SHAPE, Config(sharing="tree", boundary="across"))
    assert (plan.computed_tokens, plan.num_loss_entries) == (3, num_loss_entries)
    # Of a head whose outputs do not depend on temperatures.
    critic = make_plan(
        batch, SHAPE, Config(sharing="tree", boundary="across"), uses_temperature=False
    )
    once = int(batch.loss_mask.reshape(len(batch), -1).any(0).sum())
    assert (critic.computed_tokens, critic.num_loss_entries) == (3, once)
    assert critic.dense == plan.dense


def test_the_bound_counts_the_head_for_each_temperature() -> None:
    one, two = at_temperatures(1.0, 1.0), at_temperatures(1.0, 0.5)
    config = Config(sharing="tree", boundary="across")
    first, second = make_plan(one, SHAPE, config), make_plan(two, SHAPE, config)
    entry = 3 * 2.0 * SHAPE.hidden * SHAPE.vocab
    assert first.dense == second.dense
    assert second.shared.step_flops(SHAPE) - first.shared.step_flops(SHAPE) == 2 * entry
    assert second.bound < first.bound
    # By the same, the price; and the bytes of logits that are kept.
    assert second.cost - first.cost == pytest.approx(2 * entry * 4 / 3)
    keeping = Config(sharing="tree", boundary="across", head_logits="keep")
    peaks = [make_plan(batch, SHAPE, keeping).predicted_peak_bytes or 0 for batch in (one, two)]
    assert peaks[1] - peaks[0] == 2 * SHAPE.vocab * SHAPE.dtype_bytes
