"""Stock transformers models as users have them: every state that is supported is exact.

In float64, with upcasts lifted, gradients equal ordinary training's to rounding; in float32 and
below, errors are those of the precision.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from host_models import (
    BARS,
    BATCH,
    LOSS,
    TREE_IN_ROW,
    checkpointing,
    count_calls,
    frozen_below,
    lora,
    quiet_peft,
    resized,
)
from steps import ACROSS, clear_gradients, gradients, step_error
from torch import nn

from forkpoint import wrap
from forkpoint.ops.attention import KERNELS, registry
from forkpoint.ops.attention.kernel import Asked
from forkpoint.testing import ReadOnlyHook, tiny_model
from lanes import id_of, slow_besides_every

pytestmark = quiet_peft


# State policies ----------------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    return model


def only_the_head(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("lm_head").requires_grad_(True)
    return model


def only_the_last_mlp(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("model.layers.2.mlp").requires_grad_(True)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    checkpointing(model, use_reentrant=False)
    return model


def checkpointed_partly(model: nn.Module) -> nn.Module:
    checkpointing(model, use_reentrant=False)
    model.get_submodule("model.layers.1").gradient_checkpointing = False
    return model


def keeping_hidden_states(model: nn.Module) -> nn.Module:
    model.config.output_hidden_states = True  # type: ignore
    model.config.output_attentions = False  # type: ignore
    return model


STATES: list[Callable[[nn.Module], nn.Module]] = [
    plain,
    frozen_below,
    only_the_head,
    only_the_last_mlp,
    checkpointed,
    checkpointed_partly,
    keeping_hidden_states,
    resized,
]
ROWS = (("llama", torch.float64, ACROSS), ("qwen3", torch.float32, TREE_IN_ROW))


@pytest.mark.parametrize(("state", "row"), slow_besides_every(4, product(STATES, ROWS)), ids=id_of)
def test_states_of_a_model(state: Callable[[nn.Module], nn.Module], row: Any) -> None:
    family, dtype, config = row
    model = state(tiny_model(family, dtype=dtype))
    assert step_error(model, BATCH, LOSS, config) < BARS[dtype]


def test_bfloat16_parameters_and_autocast_follow_the_model() -> None:
    """Only dtypes here: how exact they are is verify's to say (test_verify.py)."""
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model = tiny_model("qwen3", dtype=dtype)
        seen: set[torch.dtype] = set()
        model.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(
            ReadOnlyHook(lambda module, args, output, seen=seen: seen.add(output.dtype))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stats = wrap(model, ACROSS).forward_backward(BATCH, LOSS)
        assert seen == {torch.bfloat16}
        assert stats.logprobs.dtype == torch.float32
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


def test_autocast_casts_queries_keys_and_values_as_torchs_attention_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary embeddings leave q and k in float32 there, and v in bfloat16."""
    from forkpoint.hosts import attention as host

    attention, seen = host.shared_attention, []

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, **options)

    monkeypatch.setattr(host, "shared_attention", watched)
    model = tiny_model("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wrap(model, ACROSS).score(BATCH)
    assert set(seen) == {(torch.bfloat16,) * 3}


# Checkpointing -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_sample")
def test_checkpointing_really_recomputes() -> None:
    model = tiny_model("llama")
    policed: nn.Module = lora(model)
    calls = [count_calls(model.get_submodule(f"model.layers.{n}.mlp")) for n in range(3)]

    def step() -> list[int]:
        for each in calls:
            each.clear()
        stats = wrap(policed, ACROSS).forward_backward(BATCH, LOSS)
        assert len(stats.plan.microbatches) == 7
        return [len(each) for each in calls]

    before = step()
    found = gradients(policed)
    clear_gradients(policed)
    checkpointing(model, use_reentrant=False)
    assert step() == [14, 14, 14]
    # The one microbatch without trained tokens ends at the K and V of its last block.
    assert before == [7, 7, 6]
    for name, gradient in gradients(policed).items():
        expected = found[name]
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    clear_gradients(policed)
    assert step_error(policed, BATCH, LOSS, ACROSS) < 1e-10


@pytest.mark.usefixtures("without_sample")
def test_scores_are_not_recomputed() -> None:
    model = tiny_model("llama")
    checkpointing(model, use_reentrant=False)
    calls = count_calls(model.get_submodule("model.layers.0.mlp"))
    wrap(model, ACROSS).score(BATCH)
    assert len(calls) == 7


@pytest.mark.parametrize("asked_for", [False, True])
def test_attention_is_deterministic_where_torch_is_asked_to_be(
    asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of CUDA add in any order unless they are told not to."""
    asked: list[Asked] = []
    reference = next(kernel for kernel in KERNELS if kernel.name == "reference")
    monkeypatch.setattr(registry, "KERNELS", (replace(reference, refuses=asked.append),))
    registry.forget_choices()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked_for)
    try:
        wrap(tiny_model("llama")).forward_backward(BATCH, LOSS)
    finally:
        torch.use_deterministic_algorithms(before)
        monkeypatch.undo()
        registry.forget_choices()
    assert {one.deterministic for one in asked} == {asked_for}
