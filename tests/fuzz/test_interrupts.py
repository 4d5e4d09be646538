"""A few of the interrupts of tests/fuzz/interrupts.py, and bugs that they find.

A failure prints its case and moment; `python tests/fuzz/interrupts.py --case NAME` looks for more.
"""

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from interrupt_ways import Bytecodes, Interrupt
from interrupts import KINDS, Interrupter, Tally, of_control
from torch.autograd.graph import saved_tensors_hooks as hooks
from torch.utils import checkpoint as checkpoints

from forkpoint.engine import transaction
from forkpoint.engine.executor import Executor
from forkpoint.engine.gradients import GradientGuard, GradientSums
from forkpoint.engine.staging import Staging
from forkpoint.engine.transaction import ThreadState, Transaction
from forkpoint.hosts import modules
from lanes import slow_besides

pytestmark = [
    # What arrives in a destructor or a callback of a weak reference is ignored, with a warning.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
# Others are what tests/fuzz/interrupts.py runs as well.
DIFFERENT = ["accumulated", "sums-restoring", "lora", "recompute", "offload", "checkpointed"]
DIFFERENT += ["host-cache", "files", "experts", "two-pass", "hooks", "delta-rule", "score"]
DIFFERENT += ["verify"]

FAILING = ["failing", "out-of-memory", "out-of-memory-host-cache"]


@pytest.fixture(autouse=True)
def quick() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", slow_besides(("accumulated",), DIFFERENT))
def test_at_some_moments(name: str) -> None:
    tally, bytecodes = Tally(), Bytecodes(of_control)
    interrupter = Interrupter(name, tally)
    first, last = interrupter.extent(bytecodes)
    # Each moment has one kind of exception, and no two cases have the same moments.
    for turn, kind in enumerate((*KINDS, *KINDS)):
        at = first + (len(name) + 37 * turn) * (last - first) // 331
        interrupter.at(at, kind, bytecodes)
    interrupter.look_for_tensors()
    assert not tally.failures
    assert tally.interrupts > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_while_a_failed_step_is_put_back(name: str) -> None:
    tally = Tally()
    list(Interrupter(name, tally).everywhere(stride=67))
    assert not tally.failures
    outcome = "cleared" if name == "failing" else "unchanged"
    assert {key[1] for key in tally.counts} == {outcome}


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Steps collect garbage where it is due, so that not all have the same number of bytecodes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", ["sums-restoring"])
def test_there_is_one_moment_at_which_a_step_happens(name: str) -> None:
    """Before it nothing is added, after it everything: at each of the last bytecodes."""
    tally, bytecodes = Tally(), Bytecodes(of_control)
    interrupter = Interrupter(name, tally)
    _, last = interrupter.extent(bytecodes)
    outcomes = []
    for bytecode in range(last - 20, last + 1):
        interrupter.at(bytecode, Interrupt, bytecodes)
        outcomes.append(interrupter.case.outcome)
    assert not tally.failures
    happened = outcomes.index("added")
    assert happened > 0 and set(outcomes[:happened]) == {"unchanged"}
    assert set(outcomes[happened:]) == {"added"}


# Wrong is found ----------------------------------------------------------------------------------


def says_unchanged(guard: GradientGuard) -> str:
    for parameter in guard.parameters:
        parameter.grad = None
    return "unchanged"


def does_nothing(*_: object) -> None:
    pass


# The function that holds the generator; torch 2.15 has it apart.
CHECKPOINT = getattr(checkpoints, "_checkpoint_impl", checkpoints.checkpoint)
BUGS: dict[str, tuple[Any, str, Callable, str, Callable, int]] = {
    # What is replaced by what; in which case and function, and at which of the function's
    # bytecodes, interrupts arrive: one of so many.
    "host memory": (Staging, "finish", does_nothing, "host-cache", Executor.run, 99),
    "a lie": (GradientGuard, "take_back", says_unchanged, "accumulated", Executor.run, 99),
    "hooks": (GradientSums, "_leave", does_nothing, "sums", Executor.run, 99),
    "no note": (Transaction, "_note", does_nothing, "plain", Executor.run, 99),
    "a lost state": (ThreadState, "restore", does_nothing, "offload", hooks.__enter__, 1),
    "a generator": (transaction, "close_generators", does_nothing, "hooks", CHECKPOINT, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, replaced, bug, case, function, stride = BUGS[name]
    code, tally = inspect.unwrap(function).__code__, Tally()
    interrupter, before = Interrupter(case, tally), ThreadState(torch.device("cpu"))
    restore = ThreadState.restore
    monkeypatch.setattr(modules, "_walks", ContextVar("walks of a bug", default=None))
    monkeypatch.setattr(owner, replaced, bug)
    with contextlib.suppress(Exception):  # of steps that follow, once something is left behind
        for _ in interrupter.everywhere(lambda wanted: wanted is code, stride=stride):
            if tally.failures:
                break
    restore(before)
    modules._walks.set(None)
    assert tally.failures
