"""Where torch's compiler fails, a step runs again with eager blocks, and is exact."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, model_state, relative_distance
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError

from forkpoint import Policy, losses, wrap
from forkpoint.engine.compiling import Compiling, is_of_compiler
from forkpoint.engine.transaction import CLEARED
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import compiled
from forkpoint.losses.base import LossBatch, LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.testing import ReadOnlyHook, dense_run, lifted_upcasts, tiny_model

BATCH = forked_batch()
LOSS = losses.GRPO(kl=0.1)
COMPILED = replace(ACROSS, compile_blocks=True)

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
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of forkpoint's log, without announcements of compilation."""
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
@pytest.mark.parametrize(
    ("backward", "after", "accumulated"),
    [(False, 0, False), (False, 2, True), (True, 0, False), (True, 2, False), (True, 2, True)],
)
def test_a_step_falls_back(
    model: nn.Module,
    dense: Any,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable[[], list[str]],
    backward: bool,
    after: int,
    accumulated: bool,
) -> None:
    """At the first graph, and at the third: those of the fourth microbatch are compiled anew."""
    state = model_state(model)
    policy = wrap(model, replace(COMPILED, self_check=False))
    policy.observer = lambda event: (
        torch._dynamo.reset() if event.text == "forward leaf 3" else None
    )
    compiled = failing(monkeypatch, backward=backward, after=after)
    check_exact(policy, dense, accumulated)
    assert len(compiled) > after, "nothing has failed"
    (line,) = log()
    assert "failed (RuntimeError: no such kernel)" in line and "eagerly from now on" in line
    assert not policy.host.compiles
    assert policy.last_step is not None and policy.last_step.gradients == "added"
    assert model_state(model) == state

    count = len(compiled)
    check_exact(policy, dense, accumulated)
    check_exact(policy.with_config(restore_grads=True), dense, accumulated)
    assert len(compiled) == count and len(log()) == 1, "the compiler was asked again"


@pytest.mark.slow
def test_it_fails_in_the_sample_before_the_first_step(
    model: nn.Module, dense: Any, monkeypatch: pytest.MonkeyPatch, log: Callable[[], list[str]]
) -> None:
    failing(monkeypatch, backward=False)
    policy = wrap(model, COMPILED)
    check_exact(policy, dense, accumulated=True)
    assert len(log()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("call", ["score", "logprobs", "backward", "verify"])
def test_other_calls_fall_back(
    model: nn.Module,
    dense: Any,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable[[], list[str]],
    call: str,
) -> None:
    plain = wrap(model, ACROSS).score(BATCH).logprobs
    failing(monkeypatch, backward=call == "backward")
    policy = wrap(model, COMPILED)
    if call == "verify":
        assert policy.verify(BATCH, LOSS).passed
    elif call == "score":
        assert torch.equal(policy.score(BATCH).logprobs, plain)
    elif call == "logprobs":
        assert torch.equal(policy.logprobs(BATCH).detach(), plain)
    else:
        with lifted_upcasts(model):
            logprobs = policy.logprobs(BATCH)
            outputs = LossOutputs(logprobs=logprobs)
            views = LossViews(BATCH, batch_denominators(BATCH), logprobs.device, logprobs.dtype)
            LOSS(outputs, views.of_rollouts(np.ones(len(BATCH), bool))[0]).backward()
        assert relative_distance(gradients(model), dense) < 1e-10
    assert len(log()) == 1
    assert not policy.host.compiles


@pytest.mark.slow
def test_a_missing_compiler(
    model: nn.Module,
    dense: Any,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    policy = wrap(model, COMPILED)
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        check_exact(policy, dense, accumulated=False)
    assert len(log()) == 1 and not policy.host.compiles


def test_an_error_that_remains_is_not_the_compiler_s(
    model: nn.Module, dense: Any, monkeypatch: pytest.MonkeyPatch, log: Callable[[], list[str]]
) -> None:
    """The eager attempt's error is raised, and the next step compiles."""
    compiled = failing(monkeypatch, backward=False)
    policy = wrap(model, replace(COMPILED, self_check=False))

    def bad(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        policy.forward_backward(BATCH, bad)
    assert compiled and policy.host.compiles and not log()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_gradients_that_were_lost_are_not_added_to(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, log: Callable[[], list[str]]
) -> None:
    """A compiler that has worked before fails: a step that cannot be repeated says so."""
    policy = wrap(model, replace(COMPILED, self_check=False))
    policy.forward_backward(BATCH, LOSS)
    assert policy.host.compiling.proven
    torch._dynamo.reset()
    failing(monkeypatch, backward=True)
    with pytest.raises(InductorError) as caught:
        policy.forward_backward(BATCH, LOSS)
    assert CLEARED in caught.value.__notes__
    assert all(p.grad is None for p in model.parameters())
    assert len(log()) == 1 and not policy.host.compiles
    policy.forward_backward(BATCH, LOSS)


def test_errors_of_the_model_are_not_the_compiler_s() -> None:
    errors = [
        UnsupportedError("x"),
        torch.OutOfMemoryError("x"),
        KeyboardInterrupt(),
        RuntimeError("x"),
    ]
    for error in errors:
        assert not is_of_compiler(error)
    for call in (lambda: torch.zeros(2) @ torch.zeros(3), lambda: Path("/none").read_text()):
        with pytest.raises((RuntimeError, OSError)) as caught:
            call()
        assert not is_of_compiler(caught.value)


def test_names_that_generated_code_lacks() -> None:
    """torch 2.11 generates such code after a graph break within a hook."""
    code = "def {}(): return _global_forward_hooks"
    for name, wanted in (("torch_dynamo_resume_in_forward_at_332", True), ("forward", False)):
        space: dict[str, Any] = {}
        exec(code.format(name), space)
        with pytest.raises(NameError) as caught:
            space[name]()
        assert is_of_compiler(caught.value) is wanted


@pytest.mark.parametrize("lacks", [False, True])
def test_modules_with_hooks_where_generated_code_lacks_globals(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LACKS_GLOBALS", lacks)
    model: Any = tiny_model("llama")
    assert compiled._dynamo_options(model.model.layers)
    model.model.layers[1].self_attn.register_forward_hook(ReadOnlyHook(lambda *_: None))
    assert bool(compiled._dynamo_options(model.model.layers)) is not lacks


def test_what_is_compiled_by_default() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    default = Compiling(None)
    assert default.reason_for_eager(cuda, torch.bfloat16) is None
    assert "float64" in str(default.reason_for_eager(cuda, torch.float64))
    assert "CUDA" in str(default.reason_for_eager(cpu, torch.float32))
    asked = Compiling(True)
    assert asked.reason_for_eager(cuda, torch.float64) is None
    assert asked.reason_for_eager(cpu, torch.float64) is None
    assert asked.give_up(compiler_error())
    assert "no such kernel" in str(asked.reason_for_eager(cuda, torch.float32))
    assert not Compiling(False).give_up(compiler_error())
