"""Nothing is half applied: errors in every phase of a step leave gradients, model and memory clean.

An error is raised at a chosen event of a step (a microbatch's forward or backward), in the model,
in the loss, in autograd or between events. What must hold then is the same everywhere:
`check_aftermath`.
"""

import functools
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import (
    ACROSS,
    clear_gradients,
    forked_batch,
    gradients,
    model_state,
    relative_distance,
    step_error,
)
from torch import Tensor, nn

from forkpoint import Policy, losses, wrap
from forkpoint.engine import timing
from forkpoint.engine.changes import Changes
from forkpoint.engine.gradients import GradientGuard
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.staging import PlainTransfers
from forkpoint.engine.transaction import CLEARED, UNCHANGED, ThreadState
from forkpoint.errors import ConfigError
from forkpoint.hosts.compiled import CompiledBlocks
from forkpoint.losses.base import LossBatch, LossOutputs
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides_every
from watched import watched

pytestmark = pytest.mark.usefixtures("without_sample", "without_lists")

BATCH = forked_batch()
RESTORING = replace(ACROSS, restore_grads=True)
SUMMING = replace(ACROSS, grad_accumulation_dtype="float32")


class ModelError(Exception):
    """An error that nothing in forkpoint or torch knows."""


ERRORS: list[type[BaseException]] = [torch.OutOfMemoryError, ModelError, KeyboardInterrupt]

# Events of the plan, in order; the first backward is that of leaf 3.
EVENTS = (
    *("forward prefix 0", "forward prefix 1", "forward prefix 2", "forward leaf 3"),
    *("backward leaf 3", "backward prefix 2", "backward prefix 1"),
    *("forward prefix 4", "forward prefix 5", "forward leaf 6"),
    *("backward leaf 6", "backward prefix 5", "backward prefix 4", "backward prefix 0"),
)


class Injector:
    """Raises an error once, at one event of a step and one place within it.

    place: "forward" and "backward" are in the middle of the model, "between" is before the event,
        "loss" is in a loss called by `loss`.
    """

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.marks = 0
        self.target: tuple[str, int] | None = None
        self.error: type[BaseException] = ModelError
        self.alive: list[weakref.ref[Any]] = []
        mark, buffers = timing.mark, PrefixCache.buffers
        mlp = model.get_submodule("model.layers.1.mlp")
        forward = type(mlp).forward

        @functools.wraps(forward)
        def watched_forward(module: nn.Module, x: Tensor) -> Tensor:
            if module is mlp:
                self.alive.append(weakref.ref(x))
                self.reach("forward")
                if x.requires_grad:
                    x.register_hook(lambda _: self.reach("backward"))
            return forward(module, x)

        def counting_mark(device: torch.device) -> Any:
            marked = mark(device)
            self.marks += 1
            self.reach("between")
            return marked

        def remembering_buffers(cache: PrefixCache, *args: Any) -> Any:
            found = buffers(cache, *args)
            self.alive += [weakref.ref(x) for x in (cache, *found) if x is not None]
            return found

        # Not a hook: around hooked modules torch keeps tensors in closures, these in tracebacks.
        monkeypatch.setattr(type(mlp), "forward", watched_forward)
        monkeypatch.setattr(timing, "mark", counting_mark)
        monkeypatch.setattr(PrefixCache, "buffers", remembering_buffers)

    def arm(self, place: str, event: int, error: type[BaseException]) -> None:
        self.target, self.error, self.marks = (place, event), error, 0
        self.alive.clear()

    def reach(self, place: str) -> None:
        if self.target == (place, self.marks - 1):
            self.target = None
            raise self.error(f"injected {place}")

    def loss(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        self.reach("loss")
        return losses.GRPO(kl=0.1)(outputs, batch)

    def survivors(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.alive)


class TokenLoss(losses.Loss):
    """The injector's loss, declared token-additive, so that every microbatch calls it."""

    decomposition = "token"
    needs = ("reference_logprobs",)

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return self.injector.loss(outputs, batch)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(entry), Tensor) for entry in gc.get_objects())


@pytest.fixture(scope="module", autouse=True)
def fast_collections() -> None:
    """Leave out of garbage collections, of which there are many here, all that exists already."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def dense(model: nn.Module) -> dict[str, Tensor | None]:
    with lifted_upcasts(model):
        return dense_run(model, BATCH, losses.GRPO(kl=0.1)).gradients


@pytest.fixture
def injector(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    injector = Injector(model, monkeypatch)
    yield injector
    clear_gradients(model)


def check_aftermath(
    policy: Policy,
    injector: Injector,
    loss: Any,
    *,
    began: bool,
    accumulated: bool,
    dense: dict[str, Tensor | None],
    anything_ran: bool = True,
) -> None:
    """Run a step that fails, and assert that it leaves behind what invariant 10 says.

    began: whether a backward has begun by then. accumulated: whether there are gradients before.
    dense: the gradients of the step that follows, GRPO(kl=0.1).
    anything_ran: False before the first forward, when there is nothing yet that could survive.
    """
    model = policy.host.model
    assert injector.target is not None
    error_type, restore = injector.error, policy.config in (RESTORING, SUMMING)
    clear_gradients(model)
    if accumulated:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    objects = {name: p.grad for name, p in model.named_parameters()}
    values, state, tensors = gradients(model), model_state(model), live_tensors()

    with pytest.raises(error_type, match="injected") as caught:
        policy.forward_backward(BATCH, loss)

    assert type(caught.value) is error_type
    assert bool(injector.alive) == anything_ran, "nothing was watched, so nothing can survive"
    if error_type is torch.OutOfMemoryError:
        assert not injector.survivors(), "memory is held while the error is handled"
    notes = getattr(caught.value, "__notes__", [])
    cleared = began and accumulated and not restore
    assert notes == [CLEARED if cleared else UNCHANGED]
    assert policy.last_step is not None
    assert policy.last_step.gradients == ("cleared" if cleared else "unchanged")
    for name, parameter in model.named_parameters():
        if not accumulated or (began and not restore):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is objects[name], name
            assert torch.equal(parameter.grad, values[name]), name
    assert model_state(model) == state
    staging = policy.model_state.staging
    assert staging is None or staging.used_bytes == 0, "host memory is in use after the step"

    del caught
    assert not injector.survivors(), "a microbatch's activations or the cache outlive the step"
    del objects, values
    clear_gradients(model)
    assert live_tensors() <= tensors
    with lifted_upcasts(model):
        policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    assert relative_distance(gradients(model), dense) < 1e-10
    clear_gradients(model)


GRADS = {
    "none": (ACROSS, False),
    "accumulated": (ACROSS, True),
    "restoring": (RESTORING, True),
    "summing": (SUMMING, True),
    "offloading": (replace(ACROSS, activations="offload"), True),
    "recomputing": (replace(ACROSS, activations="recompute"), True),
}


def test_the_events_are_these(model: nn.Module) -> None:
    stats = wrap(model, ACROSS).forward_backward(BATCH, losses.GRPO())
    clear_gradients(model)
    assert stats.events == EVENTS
    leaves = {microbatch.index for microbatch in stats.plan.microbatches if not microbatch.children}
    assert {stats.plan.microbatch_names[i] for i in leaves} == {"leaf 3", "leaf 6"}


OOM, MODEL, INTERRUPT = ERRORS
FAILURES: list[tuple[str, int, bool, bool, str, type[BaseException]]] = [
    # Place, event, whether the loss couples microbatches, whether a backward has begun.
    ("forward", 0, False, False, "accumulated", OOM),
    ("forward", 8, False, True, "restoring", MODEL),
    ("backward", 4, False, True, "none", INTERRUPT),
    ("backward", 5, False, True, "accumulated", MODEL),
    ("backward", 13, False, True, "summing", OOM),
    ("loss", 1, False, False, "summing", INTERRUPT),
    ("loss", 8, False, True, "accumulated", OOM),
    ("forward", 1, False, False, "offloading", OOM),
    ("backward", 5, False, True, "offloading", MODEL),
    # The recomputation of prefix 2.
    ("forward", 5, False, True, "recomputing", MODEL),
    # The mark after the last event ends the pass.
    ("between", 0, False, False, "restoring", INTERRUPT),
    ("between", 5, False, True, "summing", MODEL),
    ("between", 14, False, True, "accumulated", INTERRUPT),
    # The pass of scores has the 7 forwards and a last mark.
    ("forward", 6, True, False, "accumulated", INTERRUPT),
    ("loss", 7, True, False, "restoring", OOM),
    ("forward", 8, True, False, "summing", MODEL),
    ("backward", 12, True, True, "restoring", OOM),
    ("backward", 21, True, True, "accumulated", MODEL),
]


@pytest.mark.parametrize(
    ("place", "event", "couples", "began", "grads", "error"), slow_besides_every(2, FAILURES)
)
def test_a_failed_step_leaves_nothing(
    model: nn.Module,
    injector: Injector,
    dense: Any,
    place: str,
    event: int,
    couples: bool,
    began: bool,
    grads: str,
    error: type[BaseException],
) -> None:
    config, accumulated = GRADS[grads]
    injector.arm(place, event, error)
    in_loss: Any = TokenLoss(injector) if place == "loss" else losses.GRPO(kl=0.1)
    check_aftermath(
        wrap(model, config),
        injector,
        injector.loss if couples else in_loss,
        began=began,
        accumulated=accumulated,
        dense=dense,
        anything_ran=(place, event) != ("between", 0),
    )


def test_a_step_can_follow_while_an_error_under_checkpointing_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's checkpoint leaves hooks on saved tensors in force until the traceback is gone."""
    model = tiny_model("llama").train()
    policy = wrap(model, replace(ACROSS, checkpointing="full"))
    injector = Injector(model, monkeypatch)
    injector.arm("forward", EVENTS.index("forward prefix 2"), ModelError)
    try:
        policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    except ModelError:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert step_error(model, BATCH, losses.GRPO(kl=0.1), policy=policy) < 1e-10


def test_the_policy_says_what_became_of_its_last_step(model: nn.Module, injector: Injector) -> None:
    policy = wrap(model, ACROSS)
    loss = losses.GRPO(kl=0.1)
    assert policy.last_step is None
    policy.forward_backward(BATCH, loss)
    first = policy.last_step
    assert first is not None and first.gradients == "added"

    # What does not begin to run is no step: refusals, scores, comparisons.
    with pytest.raises(ConfigError) as refused:
        policy.forward_backward(BATCH, loss, scale=float("nan"))
    assert not hasattr(refused.value, "__notes__")
    policy.score(BATCH)
    policy.verify(BATCH, loss)
    assert policy.last_step is first

    injector.arm("forward", EVENTS.index("forward prefix 2"), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.forward_backward(BATCH, loss)
    assert policy.last_step is not first and policy.last_step.gradients == "unchanged"
    injector.arm("backward", EVENTS.index("backward prefix 2"), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.forward_backward(BATCH, loss)
    assert policy.last_step.gradients == "cleared" and first.gradients == "added"

    seen: list[str] = []
    with watched(lambda _: seen.append(policy.last_step.gradients)):
        policy.forward_backward(BATCH, loss)
    assert set(seen) == {"pending"} and policy.last_step.gradients == "added"


def test_an_error_while_a_step_is_put_back_does_not_take_the_place_of_its_own(
    model: nn.Module, injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the device that copies are waited for, say: what else is to be put back is."""
    policy = wrap(model, replace(ACROSS, activations="offload"))
    policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    clear_gradients(model)
    state = model_state(model)
    calls: list[int] = []

    def failing(_: PlainTransfers) -> None:
        calls.append(1)
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(PlainTransfers, "drain", failing)
    injector.arm("backward", EVENTS.index("backward prefix 2"), ModelError)
    with pytest.raises(ModelError, match="injected") as caught:
        policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    assert calls and caught.value.__notes__ == [UNCHANGED]
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("owner", [ThreadState, GradientGuard, CompiledBlocks])
def test_what_cannot_be_put_back_is_said(
    model: nn.Module, injector: Injector, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """And all else is put back: the thread's state, gradients and the model, each by itself."""
    policy = wrap(model, replace(ACROSS, compile_blocks=True))
    state = model_state(model)

    def failing(*_: object) -> None:
        raise RuntimeError("never")

    def change_for_good(_: CompiledBlocks, blocks: object, changes: Changes) -> None:
        changes.later(failing)

    monkeypatch.setattr(CompiledBlocks, "enter", change_for_good)
    if owner is not CompiledBlocks:
        monkeypatch.setattr(CompiledBlocks, "enter", lambda *_: None)
        name = "restore" if owner is ThreadState else "take_back"
        monkeypatch.setattr(owner, name, failing)
    injector.arm("backward", EVENTS.index("backward prefix 2"), ModelError)
    with pytest.raises(ModelError, match="injected") as caught:
        policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    notes = ["forkpoint: this step could not be undone: RuntimeError('never')"]
    assert policy.last_step is not None
    if owner is GradientGuard:
        assert policy.last_step.gradients == "pending"
    else:
        notes.append(UNCHANGED)
        assert policy.last_step.gradients == "unchanged"
        assert all(p.grad is None for p in model.parameters())
    assert caught.value.__notes__ == notes
    assert model_state(model) == state


@pytest.mark.parametrize("second", [KeyboardInterrupt, ModelError])
def test_an_interrupt_while_a_step_is_put_back_is_raised_afterwards(
    model: nn.Module,
    injector: Injector,
    monkeypatch: pytest.MonkeyPatch,
    second: type[BaseException],
) -> None:
    """An error is not: the one that ended the step is what matters."""
    policy = wrap(model, ACROSS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state, restore = model_state(model), ThreadState.restore
    moments = iter(range(3))

    def interrupted(thread: ThreadState) -> None:
        if next(moments, None) is not None:
            raise second("while it is put back")
        restore(thread)

    monkeypatch.setattr(ThreadState, "restore", interrupted)
    injector.arm("backward", EVENTS.index("backward prefix 2"), torch.OutOfMemoryError)
    expected = second if second is KeyboardInterrupt else torch.OutOfMemoryError
    with pytest.raises(expected) as caught:
        policy.forward_backward(BATCH, losses.GRPO(kl=0.1))
    assert next(moments, None) is None
    assert caught.value.__notes__ == [CLEARED]
    if second is KeyboardInterrupt:
        assert isinstance(caught.value.__context__, torch.OutOfMemoryError)
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())
