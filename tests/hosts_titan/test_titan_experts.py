"""Mixtures of experts of torchtitan, and the counts by which its optimizer balances them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from steps import ACROSS, forked_batch, step_error
from titan_models import BIAS, balancing_optimizer, checkpoint_fully, titan_model

from forkpoint import UnsupportedError, losses, wrap
from forkpoint.testing import lifted_upcasts

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")

BATCH = forked_batch()
FAMILIES = ("qwen3_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def counts_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.histc, which 0.2 calls, takes integers on CUDA alone."""
    own = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **options: own(x.float(), **options).to(x.dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients(family: str, checkpoint: bool) -> None:
    model = titan_model(family)
    if checkpoint:
        checkpoint_fully(model)
    assert step_error(model, BATCH, losses.GRPO(), ACROSS) < 1e-10


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_experts(groups: int) -> None:
    """The router's scores, and not those of groups, are those that choices are forced by."""
    model = titan_model("deepseek_v3", groups=groups)
    assert step_error(model, BATCH, losses.GRPO(), ACROSS) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify(family: str, dtype: torch.dtype) -> None:
    report = wrap(titan_model(family, dtype=dtype)).verify(BATCH, losses.GRPO())
    assert report.passed, str(report)


def biases(family: str, checkpoint: bool, shared: bool) -> torch.Tensor:
    """[steps, layers, experts], after each step of torchtitan's optimizer."""
    model: Any = titan_model(family)
    if checkpoint:
        checkpoint_fully(model)
    dims: Any = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=False)
    optimizers = balancing_optimizer(model, dims)
    policy, found = wrap(model, ACROSS), []
    layers = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    for step in range(20):
        batch = forked_batch(seed=step)
        with lifted_upcasts(model):  # to float64, where rounding changes no choice
            if shared:
                policy.score(batch)
                policy.forward_backward(batch, losses.GRPO())
            else:
                for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                    ids = torch.tensor(batch.token_ids[begin:end].copy())
                    model(ids[None, :-1]).sum().backward()
        optimizers.step()
        optimizers.zero_grad()
        found.append(torch.stack([moe.get_buffer(BIAS).clone() for moe in layers]))
    return torch.stack(found)


@pytest.mark.parametrize(("family", "checkpoint"), [("qwen3_moe", True), ("deepseek_v3", False)])
def test_biases_move_as_in_dense_training(family: str, checkpoint: bool) -> None:
    dense = biases(family, checkpoint, shared=False)
    assert dense[-1].abs().max() > 5e-3, "they have moved"
    assert torch.equal(biases(family, checkpoint, shared=True), dense)


def test_logprobs_with_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="counts tokens of its experts"):
        wrap(titan_model("qwen3_moe"), ACROSS).logprobs(BATCH)
