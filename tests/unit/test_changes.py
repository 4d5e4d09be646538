"""Changes are undone last first, however often and wherever undoing them was interrupted."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from forkpoint.engine.changes import Changes
from forkpoint.engine.transaction import (
    ThreadState,
    Transaction,
    _autocast_nesting,
    close_generators,
)

CPU = torch.device("cpu")


class Interrupt(BaseException):
    pass


class Thing:
    def name(self) -> str:
        return "class"


def test_attributes_are_as_before() -> None:
    thing, bare = Thing(), Thing()
    thing.name = lambda: "own"  # type: ignore[method-assign]
    own = vars(thing)["name"]
    with Changes() as changes:
        for each in (thing, bare, thing):
            changes.set(vars(each), "name", lambda: "changed")
            assert each.name() == "changed"
    assert vars(thing) == {"name": own}
    assert vars(bare) == {} and bare.name() == "class"


def test_up_to_a_mark() -> None:
    values: dict[str, object] = {"a": 0}
    changes = Changes()
    changes.set(values, "a", 1)
    mark = changes.mark
    changes.set(values, "a", 2)
    changes.set(values, "b", 2)
    changes.undo(mark)
    assert values == {"a": 1} and changes.mark == mark
    changes.undo()
    assert values == {"a": 0} and changes.mark == 0
    changes.undo()


def test_what_undoes_a_change_is_recorded_before_it() -> None:
    values: dict[str, object] = {"a": 0}

    class Breaking(dict):
        def __setitem__(self, key: str, value: object) -> None:
            super().__setitem__(key, value)
            if value == 1:
                raise Interrupt

    breaking = Breaking(values)
    changes = Changes()
    with pytest.raises(Interrupt):
        changes.set(breaking, "a", 1)
    assert breaking == {"a": 1}
    changes.undo()
    assert breaking == {"a": 0}


@pytest.mark.parametrize("at", range(6))
def test_undoing_can_be_repeated(at: int) -> None:
    """An interrupt comes before or after one of three calls."""
    done: list[int] = []
    moments = iter(range(7))

    def undo(index: int) -> None:
        for _ in "before", "after":
            if next(moments, None) == at:
                raise Interrupt
            done.append(index)

    changes = Changes()
    for index in range(3):
        changes.later(undo, index)
    with pytest.raises(Interrupt):
        changes.undo()
    changes.undo()
    assert changes.mark == 0
    assert list(dict.fromkeys(done)) == [2, 1, 0]


# The state of a thread -------------------------------------------------------------------------


def state() -> list[object]:
    return [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        _autocast_nesting(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    ]


def entered(*contexts: contextlib.AbstractContextManager) -> None:
    """Enter contexts and leave none, as exceptions at their ends do."""
    for context in contexts:
        context.__enter__()


@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
def test_a_thread_s_state_is_restored(within: bool) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks
    with contextlib.ExitStack() as stack:
        if within:
            stack.enter_context(torch.autocast("cpu", torch.float16))
            stack.enter_context(hooks(torch.detach, torch.detach))
            stack.enter_context(torch.no_grad())
        before, kept = state(), ThreadState(CPU)
        entered(
            # Its dtype and cache are those of now, so it comes first.
            torch.autocast("cpu", enabled=False),
            hooks(torch.relu, torch.relu),
            torch.set_grad_enabled(within),
            hooks(torch.relu, torch.relu),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        )
        assert state() != before
        for _ in range(2):
            kept.restore()
            assert state() == before
    assert torch.is_grad_enabled() and _autocast_nesting() == 0


def test_copies_of_weights_that_autocast_keeps_are_dropped() -> None:
    """Autocast drops them as its outermost context ends, which an exception may prevent."""
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    kept = ThreadState(CPU)
    entered(torch.autocast("cpu"))
    assert (x @ weight).sum() == 8
    kept.restore()
    weight.data.mul_(3)
    with torch.autocast("cpu"):
        assert (x @ weight).sum() == 24


def test_generators_that_an_exception_leaves_are_ended() -> None:
    open_contexts: list[str] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        open_contexts.append(name)
        try:
            yield
        finally:
            open_contexts.remove(name)

    def interrupted(manager: contextlib.AbstractContextManager) -> None:
        # As contextlib's own functions are left while one enters or leaves a context.
        manager.__enter__()
        raise Interrupt

    code = interrupted.__code__.replace(co_filename=contextlib.__file__)
    interrupted_there = type(interrupted)(code, globals())

    def work() -> None:
        try:
            interrupted_there(context("first"))
        except Interrupt:
            interrupted_there(context("second"))

    try:
        work()
    except Interrupt as error:
        assert open_contexts == ["first", "second"]
        close_generators(error, before=None)
        assert open_contexts == []

    # What belongs to an exception that was being handled before is left alone.
    try:
        interrupted_there(context("outer"))
    except Interrupt as outer:
        try:
            interrupted_there(context("inner"))
        except Interrupt as inner:
            close_generators(inner, before=outer)
            assert open_contexts == ["outer"]
    gc.collect()
    assert open_contexts == []

    # A transaction ends them while its exception is still held.
    with pytest.raises(Interrupt) as caught:
        Transaction(CPU).run(lambda _: interrupted_there(context("step")))
    assert caught.tb and open_contexts == []
