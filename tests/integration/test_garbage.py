"""Python's collections of garbage: a pass defers those of older generations, and no others."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from steps import ACROSS, forked_batch, small_model
from torch import Tensor

from forkpoint import Config, losses, wrap
from watched import watched

FREQUENT = (20, 1, 1)


@pytest.fixture
def thresholds() -> Iterator[tuple[int, ...]]:
    """Thresholds with which each step would collect all generations several times."""
    before = gc.get_threshold()
    gc.set_threshold(*FREQUENT)
    yield FREQUENT
    gc.set_threshold(*before)


def test_only_young_objects_are_collected_in_a_pass(thresholds: tuple[int, ...]) -> None:
    policy = wrap(small_model("llama"), ACROSS)
    batch = forked_batch()
    events = policy.forward_backward(batch, losses.GRPO()).events
    inside, collected = False, []

    def watch(event: str) -> None:
        nonlocal inside
        inside = event != events[-1]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and inside:
            collected.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with watched(watch):
            policy.forward_backward(batch, losses.GRPO())
    finally:
        gc.callbacks.remove(note)
    assert len(events) > 4
    assert set(collected) == {0}
    assert gc.get_threshold() == thresholds


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


def test_collections_that_are_off_stay_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        policy = wrap(small_model("llama"), Config(self_check=False))
        policy.forward_backward(forked_batch(), losses.GRPO())
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
