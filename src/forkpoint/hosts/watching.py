"""A hook that is known to change nothing."""

from collections.abc import Callable
from typing import Any


class Watching:
    """A hook for a module that passes its arguments to a function and discards the result.

    `Module.register_forward_hook(Watching(function))` and its siblings call `function` with what
    they give a hook. Every other hook on a wrapped model is refused, because it may change values.
    A forward hook sees the tensors of microbatches, in which a shared token is there once. The
    function must not write to them.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function: Callable[..., object] = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)
