"""When a model is compared with its stock forward: not again where nothing has changed."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import forked_batch
from torch import nn

from forkpoint import Config, wrap
from forkpoint.losses import GRPO
from forkpoint.step import self_check as checks
from forkpoint.step.weight_changes import OptimizerSteps
from forkpoint.testing import ReadOnlyHook, tiny_model
from versions import checkpoint_blocks


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each comparison."""
    found: list[None] = []
    compare: Callable[..., Any] = checks.self_check

    def counting(*args: Any, **options: Any) -> Any:
        found.append(None)
        return compare(*args, **options)

    monkeypatch.setattr("forkpoint.step.run.self_check", counting)
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_before_the_first_and_the_second_step(counted: list[None], fused: bool) -> None:
    model = tiny_model("llama")
    policy = wrap(model, Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    seen = []
    for _ in range(4):
        policy.forward_backward(forked_batch(), GRPO())
        seen.append(len(counted))
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [1, 2, 2, 2]


def test_other_weights_and_models_are_compared(counted: list[None]) -> None:
    """Before the first step, at the next one with other weights, and when the model changed."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    config = Config(sharing="tree", boundary="across", max_microbatch_tokens=48)
    policy, batch = wrap(model, config), forked_batch().select(range(2))

    def step() -> int:
        before = len(counted)
        policy.forward_backward(batch, GRPO())
        return len(counted) - before

    def moved() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-3)

    assert [step(), step()] == [1, 0]
    moved()
    assert [step(), step()] == [1, 0]
    moved()
    assert [step(), step()] == [0, 0]
    model.eval()
    assert [step(), step()] == [1, 0]
    model.train()
    assert [step(), step()] == [0, 0], "both modes are remembered"
    handle = model.get_submodule("model.norm").register_forward_hook(ReadOnlyHook(lambda *_: None))
    assert step() == 1
    handle.remove()
    assert step() == 0
    model.get_submodule("model.layers.1.mlp").act_fn = nn.SiLU()
    assert step() == 1
    model.config.rms_norm_eps = 1e-5
    assert step() == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert [step(), step()] == [1, 0]
    before = len(counted)
    policy.score(batch)
    policy.score(batch)
    assert len(counted) == before + 1
    assert policy.with_config(sharing="none").forward_backward(batch, GRPO()) and step() == 0
    before = len(counted)
    wrap(model, replace(config, self_check=False)).forward_backward(batch, GRPO())
    assert len(counted) == before, "it can be turned off"


def test_checkpointing_that_is_enabled_again_and_again(counted: list[None]) -> None:
    """transformers makes a partial each time; TRL's trainers do so at every generation."""
    model = tiny_model("llama")
    policy = wrap(model, Config())
    for _ in range(4):
        checkpoint_blocks(model, use_reentrant=False)
        policy.forward_backward(forked_batch(), GRPO())
    assert len(counted) == 1
    checkpoint_blocks(model, use_reentrant=False, preserve_rng_state=False)
    policy.forward_backward(forked_batch(), GRPO())
    assert len(counted) == 2


def test_inputs_that_require_gradients_again_and_again(counted: list[None]) -> None:
    """transformers adds a hook each time that checkpointing is enabled; trainers that generate do
    so at every step."""
    model = tiny_model("llama")
    policy = wrap(model, Config())
    for _ in range(4):
        model.enable_input_require_grads()
        policy.forward_backward(forked_batch(), GRPO())
    assert len(model.get_input_embeddings()._forward_hooks) == 4
    assert len(counted) == 1


def test_a_hook_with_another_closure_is_another_state() -> None:
    """Hooks without one are compared by their code."""
    model = tiny_model("llama")
    host = wrap(model, Config()).host

    def scaled(factor: float | None) -> int:
        plain, closed = (lambda *_: None), (lambda *args: args[-1] * factor)
        handle = model.lm_head.register_forward_hook(plain if factor is None else closed)
        found = host.fingerprint()
        handle.remove()
        return found

    assert scaled(None) == scaled(None)
    assert len({scaled(None), scaled(1.0), scaled(2.0)}) == 3


def test_replaced_weights_are_freed() -> None:
    """A state of the model that is remembered must not keep another copy of its weights."""
    model = tiny_model("llama", dtype=torch.float32)
    policy, batch = wrap(model, Config()), forked_batch()
    replaced: list[weakref.ref[Any]] = []
    for _ in range(3):
        policy.forward_backward(batch, GRPO())
        replaced += [weakref.ref(x) for x in (*model.parameters(), model.lm_head)]
        model.lm_head = nn.Linear(32, 61, bias=False)
        model.load_state_dict({k: x.clone() for k, x in model.state_dict().items()}, assign=True)
    policy.forward_backward(batch, GRPO())
    gc.collect()
    assert not any(each() is not None for each in replaced)


def test_steps_of_other_optimizers_do_not_count() -> None:
    ours, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    steps = OptimizerSteps(ours.parameters())
    for module, expected in ((other, 0), (ours, 1), (other, 1), (ours, 2)):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert steps.count == expected


def test_convolutions_do_not_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN does by default, in algorithms that it chooses by the size of a batch."""
    convolutions: Any = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    assert before == "tf32"
    seen, stock = [], checks.StockComparison.stock

    def seeing(self: checks.StockComparison, *args: Any) -> Any:
        seen.append(convolutions.fp32_precision)
        return stock(self, *args)

    monkeypatch.setattr(checks.StockComparison, "stock", seeing)
    wrap(tiny_model("llama"), Config()).forward_backward(forked_batch(), GRPO())
    assert seen and set(seen) == {"ieee"}
    assert convolutions.fp32_precision == before
