"""Inputs of microbatches are made when they are first read, in any order."""

from typing import Any

import numpy as np
import pytest
import torch
from commands import CONFIG
from torch import Tensor

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.apps.cli.models import random_model
from forkpoint.engine.microbatches import MicrobatchInputs, PreparedMicrobatches
from forkpoint.plan import make_plan
from forkpoint.plan.program import FORWARD


def batch_of(temperatures: tuple[float, ...]) -> RolloutBatch:
    rows = [[1] * 9 + [2 + i] * 6 + [5 + j] * 6 for i in (0, 1) for j in (0, 1)]
    mask = np.arange(21) >= 9
    return RolloutBatch(
        [
            Rollout(row, mask, 1.0, group_id="g", temperature=temperature)
            for row, temperature in zip(rows, temperatures, strict=True)
        ]
    )


def values(inputs: MicrobatchInputs) -> dict[str, Any]:
    found = vars(inputs).items()
    return {n: x.tolist() for n, x in found if isinstance(x, Tensor | np.ndarray)}


@pytest.mark.parametrize("temperatures", [(1.0,) * 4, (0.5, 1.0, 1.0, 2.0)])
@pytest.mark.parametrize("boundary", ["within", "across"])
def test_the_order_of_reading_does_not_matter(
    temperatures: tuple[float, ...], boundary: Any
) -> None:
    batch = batch_of(temperatures)
    config = Config(sharing="group", boundary=boundary, max_microbatch_tokens=24)
    plan = make_plan(batch, None, config)
    count = len(plan.microbatches)
    assert count >= 2
    one, other = (PreparedMicrobatches(plan, batch, torch.device("cpu")) for _ in range(2))
    last = other[-1]
    assert [made is not None for made in other._made] == [False] * (count - 1) + [True]
    assert other[count - 1] is last
    found = [values(one[n]) for n in range(count)]
    assert found == [values(x) for x in reversed([other[n] for n in reversed(range(count))])]
    assert [inputs.microbatch for inputs in one] == list(plan.microbatches)
    # Each trained token is in one microbatch.
    trained = np.concatenate([inputs.trained_tokens for inputs in one])
    assert sorted(trained) == np.flatnonzero(batch.loss_mask).tolist()
    for inputs in one:
        assert (inputs.head_temperatures is None) == (set(temperatures) == {1.0})
        labels = batch.token_ids[inputs.trained_tokens]
        assert (inputs.head_labels.numpy()[inputs.trained_entry] == labels).all()


def test_a_step_makes_the_inputs_of_a_microbatch_after_the_forward_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(CONFIG, torch.float32, 0).train()
    policy = wrap(model, Config(sharing="none", max_microbatch_tokens=24, self_check=False))
    seen: list[str] = []
    make, forward = PreparedMicrobatches._make, policy.host.forward

    def noted(self: PreparedMicrobatches, microbatch: Any) -> MicrobatchInputs:
        seen.append(f"inputs {microbatch.index}")
        return make(self, microbatch)

    def ran(instruction: Any, *rest: Any, **options: Any) -> Any:
        seen.append(f"forward {instruction.microbatch}")
        return forward(instruction, *rest, **options)

    monkeypatch.setattr(PreparedMicrobatches, "_make", noted)
    monkeypatch.setattr(policy.host, "forward", ran)
    stats = policy.forward_backward(batch_of((1.0,) * 4), losses.GRPO())
    order = [i.microbatch for i in stats.plan.program.instructions if i.operation == FORWARD]
    assert len(order) >= 3
    assert seen == [f"{what} {n}" for n in order for what in ("inputs", "forward")]
