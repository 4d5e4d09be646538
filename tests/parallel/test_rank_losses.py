"""Losses on ranks that call the model, or read other trainable tensors than log-probs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    UNEQUAL,
    Scenario,
    distance,
    gradients,
    head_alone,
    model_of,
    on_ranks,
    replicated,
    sharded,
)
from torch import Tensor

from forkpoint import RolloutBatch
from forkpoint.errors import RankError, UnsupportedError
from forkpoint.losses import GRPO

WRAPS = {
    "fully_shard": (sharded, "microbatch"),
    "fully_shard, gathered once": (sharded, "step"),
    "DistributedDataParallel": (replicated, "microbatch"),
}
HEAD_ALONE = {**WRAPS, "the head alone": (head_alone, "microbatch")}


def reading_a_coefficient(wrap: str) -> tuple[str, str]:
    """Rank 1's loss reads a coefficient: the errors of a step and of verify, whose gradients are
    as before."""
    around, gather = WRAPS[wrap]
    policy = on_ranks(around(model_of(Scenario())), DEEP, gather)  # type: ignore[arg-type]
    coefficient = torch.ones((), dtype=torch.float64, requires_grad=True)
    rank = dist.get_rank()

    def loss(outputs: Any, batch: Any) -> Tensor:
        value = batch.total(-batch.advantages * outputs.logprobs, "token")
        return coefficient * value if rank else value

    batch = RolloutBatch(UNEQUAL[rank])
    with pytest.raises(UnsupportedError if rank else RankError) as step:
        policy.forward_backward(batch, loss)
    with pytest.raises((UnsupportedError, RankError)) as verified:
        policy.verify(batch, loss)
    assert all(p.grad is None for p in (*policy.host.model.parameters(), coefficient))
    return str(step.value), str(verified.value)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["fully_shard", "DistributedDataParallel"])
def test_a_loss_that_reads_another_tensor_on_one_rank_is_refused_on_all(wrap: str) -> None:
    for messages in run_ranks(2, reading_a_coefficient, wrap):
        assert all("reads a trainable tensor" in message for message in messages), messages


# Calls of the model within a step
# ------------------------------------------------------------


def calling(wrap: str) -> tuple[int, float]:
    """One rank's loss calls the model: how many calls were refused, and how far gradients are
    from those without calls."""
    around, gather = HEAD_ALONE[wrap]
    wrapped = around(model_of(Scenario()))
    inner: Any = wrapped.module if wrap == "DistributedDataParallel" else wrapped
    policy = on_ranks(wrapped, DEEP, gather)  # type: ignore[arg-type]
    batch, refused = RolloutBatch(UNEQUAL[dist.get_rank()]), 0
    policy.forward_backward(batch, GRPO())
    names = [name for name, _ in inner.named_parameters()]
    wanted = gradients(inner)
    inner.zero_grad()
    ids, hidden = torch.tensor([[1, 2, 3]]), torch.zeros(1, 3, 32, dtype=torch.float64)
    calls = (
        lambda: wrapped(input_ids=ids),
        lambda: inner(input_ids=ids),
        lambda: inner.model.layers[0](hidden, position_embeddings=(hidden[..., :8],) * 2),
        lambda: inner.lm_head(hidden),
    )

    class Calling(GRPO):
        def __call__(self, outputs: Any, view: Any) -> Tensor:
            nonlocal refused
            for call in calls if dist.get_rank() else ():
                try:
                    call()
                except UnsupportedError:
                    refused += 1
            return super().__call__(outputs, view)

    policy.forward_backward(batch, Calling())
    return refused, distance(gradients(inner), wanted, names)


@pytest.mark.parametrize("wrap", HEAD_ALONE)
@pytest.mark.slow
def test_calls_of_the_model_within_a_step_communicate_nothing(wrap: str) -> None:
    (none, one), (refused, other) = run_ranks(2, calling, wrap)
    assert none == 0 and refused and refused % 4 == 0
    assert max(one, other) < BAR
