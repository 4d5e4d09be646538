"""Which parameters get a gradient, and which get zeros: those of ordinary training."""

from typing import Any

import pytest
import torch
from host_models import checkpointing, frozen_below, lora, quiet_peft
from steps import clear_gradients, model_state
from torch import Tensor

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.losses.base import Loss, LossBatch, LossOutputs, as_loss
from forkpoint.testing import dense_run, tiny_model
from lanes import slow_besides_every

pytestmark = quiet_peft
PROMPT = [3, 1, 4, 1, 5]


def rollout(ids: list[int], trained: int, advantage: float = 1.0) -> Rollout:
    """A rollout whose last tokens are trained."""
    return Rollout(ids, [i >= len(ids) - trained for i in range(len(ids))], advantage)


BATCHES = {
    "nothing is trained": [rollout([*PROMPT, 9, 2], 0), rollout([*PROMPT, 9, 6, 7], 0)],
    "advantages of zero": [rollout([*PROMPT, 9, 2], 2, 0.0), rollout([*PROMPT, 9, 6, 7], 3, 0.0)],
    "one token each": [rollout([3], 0), rollout([4], 0)],
    "one rollout of one token": [rollout([3], 0)],
    "one token and more": [rollout([3], 0), rollout([*PROMPT, 9, 2], 2)],
    "the first edge alone": [rollout([3, 4], 1), rollout([3, 5], 1)],
    "one rollout is trained": [rollout([*PROMPT, 9, 2], 0), rollout([*PROMPT, 9, 6, 7], 1)],
}
UNTRAINED = [name for name, found in BATCHES.items() if not any(r.loss_mask.any() for r in found)]
CONFIGS = {
    "across": Config(sharing="tree", boundary="across", self_check=False),
    "within": Config(sharing="tree", boundary="within", self_check=False),
    "float32": Config(grad_accumulation_dtype="float32", self_check=False),
    "full": Config(checkpointing="full", self_check=False),
}
KEPT = ("nothing is trained", "advantages of zero", "one token each", "one rollout is trained")
every_batch = pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, id=name, marks=() if name in KEPT else pytest.mark.slow)
        for name, batch in BATCHES.items()
    ],
)


def squares(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    return (outputs.values.square() * batch.loss_mask).sum()


def coupled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    return (outputs.logprobs * batch.loss_mask).sum().square()


def faults(model: Any, rollouts: list[Rollout], config: Config, loss: Any = None) -> list[str]:
    """The parameters whose gradient is None, or zero, on one side alone."""
    batch, loss = RolloutBatch(rollouts), as_loss(loss or losses.GRPO())
    clear_gradients(model)
    wrap(model, config).forward_backward(batch, loss)
    ours = {name: p.grad for name, p in model.named_parameters()}
    clear_gradients(model)
    dense = dense_run(model, batch, loss).gradients
    assert any(g is not None for g in dense.values())
    return [name for name, g in ours.items() if _kind(g) != _kind(dense[name])]


def _kind(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    return "some" if float(gradient.abs().max()) > 1e-12 else "zeros"


@pytest.mark.parametrize("config", slow_besides_every(2, CONFIGS.values()), ids=CONFIGS)
@every_batch
def test_ways_of_running(batch: list[Rollout], config: Config) -> None:
    assert not faults(tiny_model("qwen3"), batch, config)


@pytest.mark.parametrize(
    "kind", slow_besides_every(2, ["tied", "frozen", "lora", "checkpointed", "critic", "coupled"])
)
@every_batch
def test_kinds_of_models(batch: list[Rollout], kind: str) -> None:
    tied = {"tie_word_embeddings": True} if kind == "tied" else {}
    model: Any = tiny_model("llama", critic=kind == "critic", **tied)
    if kind == "frozen":
        frozen_below(model)
    elif kind == "lora":
        model = lora(model)
    elif kind == "checkpointed":
        checkpointing(model, use_reentrant=False)
    loss: Loss | Any = {"critic": squares, "coupled": coupled}.get(kind)
    assert not faults(model, batch, CONFIGS["across"], loss)


@pytest.mark.parametrize("name", UNTRAINED)
def test_gradients_that_exist_stay(name: str) -> None:
    """And of `logprobs` the backward gives the same."""
    model = tiny_model("llama")
    state, batch = model_state(model), RolloutBatch(BATCHES[name])
    kept = model.lm_head.weight
    kept.grad = before = torch.ones_like(kept)
    wrap(model, CONFIGS["across"]).forward_backward(batch, losses.GRPO())
    assert kept.grad is before and bool((before == 1).all())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter is kept or not bool(parameter.grad.any())
    clear_gradients(model)
    wrap(model, CONFIGS["across"]).logprobs(batch).sum().backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())
    clear_gradients(model)
    assert model_state(model) == state


def test_an_interrupt_takes_zeros_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    policy, empty_like = wrap(model, CONFIGS["across"]), torch.zeros_like
    calls: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return empty_like(*args, **kwargs)

    monkeypatch.setattr("forkpoint.engine.gradients.torch.zeros_like", interrupted)
    with pytest.raises(KeyboardInterrupt):
        policy.forward_backward(RolloutBatch(BATCHES["one token each"]), losses.GRPO())
    assert len(calls) == 4 and all(p.grad is None for p in model.parameters())
