"""Rollouts of one path at several temperatures: the body once, the head for each temperature."""

import re
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


def test_rollouts_of_different_temperatures_share_all_but_the_head() -> None:
    batch = at_temperatures(1.0, 0.5, 1.0)
    for sharing in ("group", "tree"):
        plan = make_plan(batch, config=Config(sharing=sharing, boundary="within"))
        assert plan.computed_tokens == 3
        assert plan.forest.multiplicity.tolist() == [3]
        assert plan.unique_tokens == 4
        assert (plan.dense.num_loss_entries, plan.num_loss_entries) == (6, 2 * 2)
        assert [microbatch.num_loss_entries for microbatch in plan.microbatches] == [4]
        assert re.search(r"outputs of the head +│ +4 │", plan.explain())
    dense = make_plan(batch, config=Config(sharing="none"))
    assert dense.num_loss_entries == dense.dense.num_loss_entries == 6


@pytest.mark.parametrize(
    ("temperatures", "masks", "num_loss_entries"),
    [
        ((0.5, 0.5), (), 2),
        ((0.7, float(np.nextafter(0.7, 1))), (), 4),
        ((1.0, 0.5), ([0, 0, 1, 1], [0, 1, 0, 1]), 4),  # one shares its temperature with nobody
        ((1.0, 0.5), ([0, 0, 1, 1], [0, 0, 0, 0]), 2),
        ((1.0, 0.5, 0.25), ([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]), 3),
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
