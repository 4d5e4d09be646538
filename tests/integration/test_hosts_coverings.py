"""Models as people hold them: compiled, prepared by accelerate, with forwards set on them.

Every step is compared with ordinary training of the same model, and leaves what was put around it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from host_models import BATCH, LOSS, lora, quiet_peft
from steps import ACROSS, clear_gradients, gradients, model_state, relative_distance, small_model

from forkpoint import Policy, wrap
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides

pytestmark = quiet_peft
Change = Callable[[Any], Any]


def never(*_: object) -> Callable[..., Any]:
    """A compiler that is never asked, since what users compile does not run in a step."""
    raise AssertionError("code that the user has compiled ran in a step")


def error_of(model: Any, policy: Policy) -> float:
    """The distance of a step's gradients from ordinary training's, which runs uncompiled."""
    clear_gradients(model)
    with lifted_upcasts(model):
        policy.forward_backward(BATCH, LOSS)
        found = gradients(model)
        with torch.compiler.set_stance("force_eager"):
            dense = dense_run(model, BATCH, LOSS)
    clear_gradients(model)
    return relative_distance(found, dense.gradients)


def compile_model(model: Any) -> Any:
    model.compile(backend=never)
    return model


def replace_blocks(model: Any) -> Any:
    """As regional compilation is often written."""
    layers = model.model.layers
    for index, block in enumerate(layers):
        layers[index] = torch.compile(block, backend=never)
    return model


def compile_inside_and_out(model: Any) -> Any:
    replace_blocks(model)
    model.model = torch.compile(model.model, backend=never)
    model.model._orig_mod.layers[0]._orig_mod.mlp.compile(backend=never)
    return torch.compile(model, backend=never)


def autocast_block(model: Any) -> Any:
    block = model.model.layers[0]
    block.forward = torch.autocast("cpu", torch.bfloat16)(block.forward)
    return model


def compiled_autocast_block(model: Any) -> Any:
    autocast_block(model)
    block = model.model.layers[0]
    block.forward = torch.compile(block.forward, backend=never)
    return model


def prepare(model: Any, **options: Any) -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **options)
    return accelerator.prepare_model(model)


def prepare_and_adapt(model: Any) -> Any:
    return lora(prepare(model))


def compile_and_adapt(model: Any) -> Any:
    replace_blocks(model)
    adapted = lora(model)
    adapted.compile(backend=never)
    return adapted


def unprepared(model: Any) -> Any:
    prepared = prepare(model)  # the first Accelerator of a process decides on its precision
    return Accelerator(cpu=True).unwrap_model(prepared, keep_fp32_wrapper=False)


CHANGES: dict[str, Change] = {
    "model.compile()": compile_model,
    "layers[i] = torch.compile(layers[i])": replace_blocks,
    "compiled inside and out": compile_inside_and_out,
    "LoRA around compiled blocks, compiled": compile_and_adapt,
    "accelerate's mixed precision": prepare,
    "accelerate's mixed precision, unwrapped": unprepared,
    "LoRA around accelerate's mixed precision": prepare_and_adapt,
    "autocast around a block": autocast_block,
    "autocast, compiled": compiled_autocast_block,
}
CASES = [(name, later) for later in (False, True) for name in CHANGES]
IN_CORE = [CASES[0], CASES[3], CASES[8]]


@pytest.mark.parametrize(("name", "later"), slow_besides(IN_CORE, CASES))
def test_steps_are_exact_and_leave_it(name: str, later: bool) -> None:
    """Whether it was done before or after the model was wrapped."""
    model: Any = small_model("llama")
    policy = wrap(model, ACROSS) if later else None
    changed = CHANGES[name](model)
    state = model_state(changed)
    if policy is None or "LoRA" in name:
        policy = wrap(changed, ACROSS)
    assert error_of(policy.host.model, policy) < 1e-10
    assert model_state(changed) == state
    policy.score(BATCH)
    assert model_state(changed) == state
    assert policy.verify(BATCH, LOSS).passed
    assert model_state(changed) == state


@pytest.mark.slow
def test_mixed_precision_is_that_of_ordinary_training() -> None:
    """The same bits as the plain model's under autocast, and within the bars of verify."""
    plain = lora(tiny_model("llama", dtype=torch.float32))
    changed = prepare_and_adapt(tiny_model("llama", dtype=torch.float32))
    policy = wrap(changed, ACROSS)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = wrap(plain, ACROSS).forward_backward(BATCH, LOSS)
    stats = policy.forward_backward(BATCH, LOSS)
    assert torch.equal(stats.logprobs, wanted.logprobs)
    assert not torch.equal(
        stats.logprobs, wrap(tiny_model("llama", dtype=torch.float32), ACROSS).score(BATCH).logprobs
    )
    for ours, theirs in zip(changed.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    report = policy.verify(BATCH, LOSS)
    assert report.passed and (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert report.dense_error > 1e-4, "dense training was not in bfloat16"


def test_nothing_is_looked_at_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is put back does not look like another model at the next step."""
    model = compiled_autocast_block(compile_model(small_model("llama", dtype=torch.float32)))
    policy = wrap(model, ACROSS)
    policy.forward_backward(BATCH, LOSS)
    number = policy.host.check(BATCH, training=True)
    policy.forward_backward(BATCH, LOSS)
    assert policy.host.check(BATCH, training=True) == number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_blocks_of_a_compiled_model_are_compiled_by_forkpoint() -> None:
    model = compiled_autocast_block(compile_model(small_model("llama", num_hidden_layers=2)))
    policy = wrap(model, replace(ACROSS, compile_blocks=True))
    state = model_state(model)
    assert error_of(model, policy) < 1e-10
    assert model_state(model) == state and policy.host.compiles
