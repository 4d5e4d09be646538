"""Python's collections of garbage: a step defers those of older generations, and no others."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from steps import ACROSS, forked_batch, small_model
from torch import Tensor

from forkpoint import Config, losses, wrap
from watched import watched

FREQUENT = (100, 1, 1)


@pytest.fixture
def thresholds() -> Iterator[tuple[int, ...]]:
    """Thresholds with which each step would collect all generations several times."""
    before = gc.get_threshold()
    gc.set_threshold(*FREQUENT)
    yield FREQUENT
    gc.set_threshold(*before)


@pytest.mark.parametrize(("young", "collected"), [(100, {0}), (1, {0, 1})])
def test_a_step_collects_older_objects_late(
    thresholds: tuple[int, ...], young: int, collected: set[int]
) -> None:
    """Only after DUE collections of the youngest generation, which a step of many microbatches
    has."""
    policy = wrap(small_model("llama"), ACROSS)
    batch = forked_batch()
    events = policy.forward_backward(batch, losses.GRPO()).events
    inside, found = False, []

    def watch(event: str) -> None:
        nonlocal inside
        inside = event != events[-1]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and inside:
            found.append(info["generation"])

    gc.set_threshold(young, *thresholds[1:])
    gc.callbacks.append(note)
    try:
        with watched(watch):
            policy.forward_backward(batch, losses.GRPO())
    finally:
        gc.callbacks.remove(note)
    assert len(events) > 4
    assert collected <= set(found) and (max(found) > 0) == (1 in collected)
    assert gc.get_threshold() == (young, *thresholds[1:])


def test_garbage_that_a_step_leaves_is_collected_by_the_next(thresholds: tuple[int, ...]) -> None:
    """Where the caller makes so few objects that Python collects within steps alone."""
    policy = wrap(small_model("llama"), ACROSS)
    batch = forked_batch()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.set_threshold(thresholds[0], 10**6, 10)
    policy.forward_backward(batch, losses.GRPO())
    made: list[Cycle] = []
    with watched(lambda _: made or made.append(Cycle())):
        policy.forward_backward(batch, losses.GRPO())
    alive = weakref.ref(made.pop())
    assert alive() is not None
    policy.forward_backward(batch, losses.GRPO())
    assert alive() is None


def test_thresholds_return_after_an_error_and_scores(thresholds: tuple[int, ...]) -> None:
    policy = wrap(small_model("llama"), Config(self_check=False))
    seen = []

    def failing(outputs: Any, batch: Any) -> Tensor:
        seen.append(gc.get_threshold())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        policy.forward_backward(forked_batch(), losses.FunctionLoss(failing, "token"))
    assert seen[0] != thresholds
    assert gc.get_threshold() == thresholds
    policy.score(forked_batch())
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("off", [gc.disable, lambda: gc.set_threshold(0)])
def test_a_collector_that_is_off_stays_off(
    thresholds: tuple[int, ...], off: Callable[[], None]
) -> None:
    policy = wrap(small_model("llama"), ACROSS)
    collected: list[str] = []
    gc.collect(0)  # so that the middle generation would be due
    off()
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        policy.forward_backward(forked_batch(), losses.GRPO())
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert not collected
    assert gc.get_threshold() == before
