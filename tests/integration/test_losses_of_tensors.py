"""Losses that read trainable tensors besides log-probs: refused in steps, exact by logprobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, relative_distance, small_model
from test_logprobs import stock_values
from torch import Tensor, nn

from forkpoint import RolloutBatch, wrap
from forkpoint.errors import UnsupportedError
from forkpoint.losses import FunctionLoss, LossBatch, LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.testing import lifted_upcasts

TRAINED = forked_batch()
UNTRAINED = RolloutBatch([replace(r, loss_mask=[False] * len(r.token_ids)) for r in TRAINED])


@pytest.mark.parametrize(
    ("decomposition", "batch"), [("token", TRAINED), ("rollout", TRAINED), ("rollout", UNTRAINED)]
)
@pytest.mark.parametrize("read", ["parameter", "coefficient"])
def test_a_step_and_verify_refuse_other_tensors(
    decomposition: Any, batch: RolloutBatch, read: str
) -> None:
    model = small_model("qwen3", dtype=torch.float64)
    parameter: Tensor = next(model.parameters())
    coefficient = torch.full((3, 2), 0.7, dtype=torch.float64, requires_grad=True)
    tensor = parameter if read == "parameter" else coefficient

    def reading(outputs: LossOutputs, view: LossBatch) -> Tensor:
        value = -view.total(view.trained(outputs.logprobs * view.advantages), "token")
        return value + tensor.square().sum()

    leaves = [*model.parameters(), coefficient]
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 0.3)
    policy, loss = wrap(model, ACROSS), FunctionLoss(reading, decomposition)
    shape = rf"trainable tensor of shape \({tensor.shape[0]}, {tensor.shape[1]}\)"
    with pytest.raises(UnsupportedError, match=shape):
        policy.forward_backward(batch, loss)
    assert all(leaf.grad is not None and bool((leaf.grad == 0.3).all()) for leaf in leaves)
    if batch is UNTRAINED:  # nothing to verify
        return
    clear_gradients(model)
    with pytest.raises(UnsupportedError, match=shape):
        policy.verify(batch, loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_logprobs_train_a_reward_head() -> None:
    """Ordinary autograd reaches the head's parameters and the model's."""
    model = small_model("qwen3", dtype=torch.float64)
    policy, head = wrap(model, ACROSS), nn.Linear(1, 1, dtype=torch.float64)
    views = LossViews(TRAINED, batch_denominators(TRAINED), torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(TRAINED), bool))
    weight, found = model.get_submodule("lm_head").weight, []
    assert isinstance(weight, nn.Parameter)

    def train(logprobs: Tensor) -> None:
        rewards = head(view.rollout_mean(logprobs)[:, None])[:, 0]
        (weight.square().sum() - rewards.sigmoid().log().mean()).backward()
        found.append((gradients(model), gradients(head)))
        for part in (model, head):
            clear_gradients(part)

    with lifted_upcasts(model):
        train(policy.logprobs(TRAINED))
        train(stock_values(model, TRAINED)[0])
    (one, own), (other, wanted) = found
    assert relative_distance(one, other) < 1e-10
    assert relative_distance(own, wanted) < 1e-10
