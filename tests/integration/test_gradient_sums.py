"""Gradients of a step's microbatches summed in float32 instead of in the parameters' dtype."""

from dataclasses import replace

import torch
from steps import clear_gradients, forked_batch, gradients
from torch import Tensor

from forkpoint import Config, RolloutBatch, wrap
from forkpoint.losses import GRPO
from forkpoint.losses.views import batch_denominators
from forkpoint.testing import tiny_model

BATCH = forked_batch()


def test_a_step_is_the_rounded_sum_of_its_microbatches() -> None:
    """Each rollout is a microbatch; its gradient alone is what a step of this microbatch alone
    leaves."""
    torch.manual_seed(0)
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    rollouts = [r for _ in range(4) for r in BATCH if len(r.token_ids) > 12]
    batch = RolloutBatch(replace(r, rollout_id=f"r{i}") for i, r in enumerate(rollouts))
    whole = batch_denominators(batch)
    config = Config(
        sharing="none", boundary="within", max_microbatch_tokens=int(batch.lengths.max())
    )
    exact: dict[str, Tensor] = {}
    alone = wrap(model, config)
    for n in range(len(batch)):
        alone.forward_backward(batch.select([n]), GRPO(), denominators=whole)
        for name, gradient in gradients(model).items():
            assert gradient is not None
            exact[name] = exact.get(name, 0) + gradient.double()
        clear_gradients(model)
    errors = {}
    for dtype in ("parameter", "float32"):
        policy = wrap(model, replace(config, grad_accumulation_dtype=dtype))
        stats = policy.forward_backward(batch, GRPO())
        assert len(stats.plan.microbatches) == len(batch)
        found = gradients(model)
        errors[dtype] = [float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact]
        assert all(g is not None and g.dtype == torch.bfloat16 for g in found.values())
        clear_gradients(model)
    # Rounding once is off by at most 2^-9 of each entry.
    assert max(errors["float32"]) <= 2**-9
    assert sum(errors["parameter"]) > 1.5 * sum(errors["float32"])


def test_gradients_in_another_dtype_than_parameters() -> None:
    """The sum is not rounded then. A step without any gradient gives zeros of that dtype."""
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    policy = wrap(model, Config(grad_accumulation_dtype="float32"))
    policy.forward_backward(BATCH, GRPO())
    rounded = gradients(model)
    clear_gradients(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    policy.forward_backward(BATCH, GRPO())
    for name, gradient in gradients(model).items():
        assert gradient is not None and gradient.dtype == torch.float32
        assert torch.equal(gradient.bfloat16(), rounded[name])  # type: ignore[arg-type]
    clear_gradients(model)
    policy.forward_backward([replace(r, advantage=0.0) for r in BATCH], GRPO())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
