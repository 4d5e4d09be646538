"""Refusals of losses that read other trainable tensors than log-probs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, small_model
from torch import Tensor

from forkpoint import RolloutBatch, wrap
from forkpoint.errors import UnsupportedError
from forkpoint.losses import FunctionLoss, LossBatch, LossOutputs

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
