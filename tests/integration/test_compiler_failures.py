"""A block at which torch's compiler fails runs eagerly, and the step is exact."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, model_state, relative_distance
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError

from forkpoint import Policy, losses, wrap
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import compiled
from forkpoint.hosts.compiled import Compiling
from forkpoint.testing import ReadOnlyHook, dense_run, lifted_upcasts, tiny_model

BATCH = forked_batch()
LOSS = losses.GRPO(kl=0.1)
COMPILED = replace(ACROSS, compile_blocks=True)
Log = Callable[[], list[str]]
"""Gives the lines of forkpoint's log, without announcements of compilation."""

# What torch's compiler looks at warns.
pytestmark = pytest.mark.filterwarnings("ignore")


def compiler_error() -> Exception:
    """As inductor raises them."""
    return InductorError(RuntimeError("no such kernel\nand more lines"), None)  # type: ignore


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    # A cache would give what was compiled before.
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield tiny_model("llama", num_hidden_layers=2)
    torch._dynamo.reset()


@pytest.fixture
def dense(model: nn.Module) -> dict[str, Tensor | None]:
    with lifted_upcasts(model):
        return dense_run(model, BATCH, LOSS).gradients


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "forkpoint")

    def lines() -> list[str]:
        records = [record for record in caplog.records if record.name == "forkpoint"]
        # Old log-probs of the batch are not the model's, which has a warning of its own.
        found = [text for r in records if "have a ratio of e^5" not in (text := r.getMessage())]
        return [line for line in found if not line.startswith("compiling the model's")]

    return lines


def failing(monkeypatch: pytest.MonkeyPatch, *, backward: bool, after: int = 0) -> list[int]:
    """Let inductor fail at the graphs of forwards, or of backwards, but for the first few."""
    compiled: list[int] = []
    real = compile_fx._compile_fx_inner

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        if bool(kwargs.get("is_backward", False)) == backward:
            compiled.append(1)
            if len(compiled) > after:
                raise compiler_error()
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", compile_inner)
    return compiled


def check_exact(policy: Policy, dense: dict[str, Tensor | None], accumulated: bool) -> None:
    model = policy.host.model
    before = {}
    if accumulated:
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            before[name] = parameter.grad
    with lifted_upcasts(model):
        policy.forward_backward(BATCH, LOSS)
    found = gradients(model)
    for name, parameter in model.named_parameters():
        if accumulated:
            assert parameter.grad is before[name]
            gradient = found[name]
            assert gradient is not None
            found[name] = gradient - 1
    assert relative_distance(found, dense) < 1e-10
    clear_gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_a_block_falls_back(
    model: nn.Module, dense: Any, monkeypatch: pytest.MonkeyPatch, log: Log, backward: bool
) -> None:
    """Backwards are compiled along with forwards, so that the block runs eagerly there and then."""
    state = model_state(model)
    policy = wrap(model, replace(COMPILED, self_check=False))
    compiled = failing(monkeypatch, backward=backward)
    check_exact(policy, dense, accumulated=backward)
    assert compiled, "nothing has failed"
    (line,) = log()
    assert "failed (RuntimeError: no such kernel)" in line and "eagerly from now on" in line
    assert not policy.host.compiles
    assert policy.last_step is not None and policy.last_step.gradients == "added"
    assert model_state(model) == state

    count = len(compiled)
    check_exact(policy, dense, accumulated=False)
    assert len(compiled) == count and len(log()) == 1, "the compiler was asked again"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sample", "score", "verify"])
def test_other_calls_fall_back(
    model: nn.Module, dense: Any, monkeypatch: pytest.MonkeyPatch, log: Log, call: str
) -> None:
    plain = wrap(model, ACROSS).score(BATCH).logprobs
    failing(monkeypatch, backward=False)
    policy = wrap(model, COMPILED)
    if call == "verify":
        assert policy.verify(BATCH, LOSS).passed
    elif call == "score":
        assert torch.equal(policy.score(BATCH).logprobs, plain)
    else:
        check_exact(policy, dense, accumulated=True)
    assert len(log()) == 1
    assert not policy.host.compiles


@pytest.mark.slow
def test_a_block_that_has_run_in_part_ends_the_step(
    monkeypatch: pytest.MonkeyPatch, log: Log, tmp_path: Path
) -> None:
    """Blocks with routers have several graphs."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    mixture = tiny_model("qwen3_moe", num_hidden_layers=2, **experts)
    with lifted_upcasts(mixture):
        dense = dense_run(mixture, BATCH, LOSS).gradients
    policy = wrap(mixture, replace(COMPILED, self_check=False))
    failing(monkeypatch, backward=False, after=1)
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
        pytest.raises(UnsupportedError, match="Run the step again: blocks run eagerly"),
    ):
        policy.forward_backward(BATCH, LOSS)
    assert all(p.grad is None for p in mixture.parameters())
    check_exact(policy, dense, accumulated=False)
    assert len(log()) == 1


@pytest.mark.slow
def test_a_missing_compiler(
    model: nn.Module, dense: Any, monkeypatch: pytest.MonkeyPatch, log: Log, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    policy = wrap(model, COMPILED)
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        check_exact(policy, dense, accumulated=False)
    assert len(log()) == 1 and not policy.host.compiles


@pytest.mark.parametrize("lacks", [False, True])
def test_modules_with_hooks_where_generated_code_lacks_globals(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LACKS_GLOBALS", lacks)
    model: Any = tiny_model("llama")
    assert "nested_graph_breaks" in compiled._dynamo_options(model.model.layers)
    model.model.layers[1].self_attn.register_forward_hook(ReadOnlyHook(lambda *_: None))
    found = compiled._dynamo_options(model.model.layers)
    assert ("nested_graph_breaks" in found) is not lacks


def test_what_is_compiled_by_default() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    default = Compiling(None)
    assert default.compiles(cuda, torch.bfloat16)
    assert not default.compiles(cuda, torch.float64)
    assert not default.compiles(cpu, torch.float32)
    assert not Compiling(False).compiles(cuda, torch.bfloat16)
    asked = Compiling(True)
    assert asked.compiles(cuda, torch.float64) and asked.compiles(cpu, torch.float64)
    assert asked.give_up(compiler_error())
    assert "no such kernel" in str(asked.failure) and not asked.compiles(cuda, torch.float32)
    for error in (UnsupportedError("x"), torch.OutOfMemoryError("x"), RuntimeError("x")):
        assert not asked.give_up(error)
