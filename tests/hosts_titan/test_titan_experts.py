"""Mixtures of experts of torchtitan, and the counts by which its optimizer balances them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from steps import ACROSS, forked_batch, step_error
from titan_models import titan_model
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config.job_config import ActivationCheckpoint, Optimizer
from torchtitan.distributed.activation_checkpoint import apply_ac

from forkpoint import UnsupportedError, losses, wrap

BATCH = forked_batch()
FAMILIES = ("qwen3_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def counts_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.histc takes integers on CUDA alone."""
    own = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **options: own(x.float(), **options).to(x.dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients(family: str, checkpoint: bool) -> None:
    model = titan_model(family)
    if checkpoint:
        apply_ac(model, ActivationCheckpoint(mode="full"))
    assert step_error(model, BATCH, losses.GRPO(), ACROSS) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_verify(family: str) -> None:
    report = wrap(titan_model(family, dtype=torch.float32)).verify(BATCH, losses.GRPO())
    assert report.passed, str(report)


def biases(family: str, checkpoint: bool, shared: bool) -> torch.Tensor:
    """[steps, layers, experts], after each step of torchtitan's optimizer."""
    model: Any = titan_model(family)  # in float64, where rounding changes no choice
    if checkpoint:
        apply_ac(model, ActivationCheckpoint(mode="full"))
    dims = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=False)
    options = Optimizer(lr=0.0, implementation="for-loop")
    optimizers = build_optimizers_with_moe_load_balancing([model], options, dims)  # type: ignore[arg-type]
    policy, found = wrap(model, ACROSS), []
    layers = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    for step in range(20):
        batch = forked_batch(seed=step)
        if shared:
            policy.score(batch)
            policy.forward_backward(batch, losses.GRPO())
        else:
            for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                ids = torch.tensor(batch.token_ids[begin:end].copy())
                model(ids[None, :-1]).sum().backward()
        optimizers.step()
        optimizers.zero_grad()
        found.append(torch.stack([moe.expert_bias.clone() for moe in layers]))
    return torch.stack(found)


@pytest.mark.parametrize(("family", "checkpoint"), [("qwen3_moe", True), ("deepseek_v3", False)])
def test_biases_move_as_in_dense_training(family: str, checkpoint: bool) -> None:
    dense = biases(family, checkpoint, shared=False)
    assert dense[-1].abs().max() > 5e-3, "they have moved"
    assert torch.equal(biases(family, checkpoint, shared=True), dense)


def test_logprobs_with_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="counts its experts"):
        wrap(titan_model("qwen3_moe"), ACROSS).logprobs(BATCH)
