"""Options of fully_shard that newer versions of torch have; `make test-versions` runs them."""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    EMPTY,
    UNEQUAL,
    Scenario,
    distance,
    gradients,
    model_of,
    on_ranks,
    sharded,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"),
    reason="fully_shard of torch before 2.15",
)


def ended_by_hand(gather: Literal["microbatch", "step"], rollouts: Any) -> tuple[float, bool]:
    scenario = Scenario(rollouts=rollouts)
    model: Any = sharded(model_of(scenario))
    other = model_of(scenario)
    model.set_manual_backward_finalization(True)
    policy = on_ranks(model, scenario.config, gather)
    for _ in range(2):
        policy.forward_backward(RolloutBatch(rollouts[dist.get_rank()]), scenario.loss)
        model.finalize_backward()  # as the user's own loop does
    alone = forkpoint.wrap(other, scenario.config)
    for _ in range(2):
        alone.forward_backward(RolloutBatch([r for part in rollouts for r in part]), scenario.loss)
    names = [name for name, _ in other.named_parameters()]
    context = model._get_fsdp_state()._state_ctx
    return distance(gradients(model), gradients(other), names), (
        context.manual_backward_finalization
    )


@pytest.mark.parametrize("gather", ["microbatch", "step"])
@pytest.mark.parametrize("rollouts", [UNEQUAL, EMPTY], ids=["unequal", "empty"])
def test_backwards_that_users_end(gather: Literal["microbatch", "step"], rollouts: Any) -> None:
    for error, still_by_hand in run_ranks(2, ended_by_hand, gather, rollouts):
        assert error < BAR and still_by_hand


def with_any_gradient(reduce_dtype: torch.dtype | None) -> str:
    model = model_of(Scenario())
    for parameter in model.parameters():
        parameter.grad_dtype = None
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    try:
        forkpoint.wrap(sharded(model, mp_policy=policy))
    except UnsupportedError as error:
        return str(error)
    return ""


def test_gradients_of_any_dtype_need_one_to_be_reduced_in() -> None:
    assert all("grad_dtype=None" in said for said in run_ranks(2, with_any_gradient, None))
    assert not any(run_ranks(2, with_any_gradient, torch.float64))
