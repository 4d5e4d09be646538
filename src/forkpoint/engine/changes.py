"""Records changes to objects that outlive a step, so that they can be undone at any moment."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Changes:
    """A list of calls that undo changes. The last change is undone first.

    An exception such as KeyboardInterrupt may arrive between any two bytecodes. So the call that
    undoes a change is recorded before the change is made. It restores the earlier value. It does no
    harm before the change is made, or a second time.

    As a context manager it undoes all changes at the end of the block.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    @property
    def mark(self) -> int:
        """The number of recorded changes. `undo(mark)` undoes only later ones."""
        return len(self._undo)

    def later(self, function: Callable[..., object], *args: Any) -> None:
        """Record the call that undoes a change, before the change is made."""
        self._undo.append((function, args))

    def set(self, attributes: dict[str, Any], name: str, value: object) -> None:
        """Set an attribute of an object, given as `vars(object)`."""
        if name in attributes:
            self.later(attributes.__setitem__, name, attributes[name])
        else:
            self.later(attributes.pop, name, None)
        attributes[name] = value

    def set_through(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object whose `vars` cannot be written, by `setattr`."""
        self.later(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Make calls of a module run `forward`, with its hooks around it.

        Compiled blocks that call the module need a method bound to it: the compiler compares other
        callables by identity, and compiles each block anew.
        """
        self.set(vars(module), "forward", forward)

    def undo(self, mark: int = 0) -> None:
        """Undo all changes that were made since the mark; after an interrupt it can be repeated."""
        while len(self._undo) > mark:
            function, args = self._undo[-1]
            function(*args)
            self._undo.pop()

    def forget(self) -> None:
        """Drop the record of the last change, because undoing it fails."""
        self._undo.pop()

    def __enter__(self) -> "Changes":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.undo()
        finally:
            self.undo()  # again, if an interrupt has ended the first
