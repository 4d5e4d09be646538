"""Constructors and functions that explain an argument which they do not have."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from forkpoint.errors import ArgumentError
from forkpoint.rollouts.argument_names import unknown_argument

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., object])

TAKES: dict[str, tuple[str, ...]] = {}
"""The arguments of every loss, by the name of its class."""


def explains_arguments(loss: C) -> C:
    """Class decorator for a loss, above `@dataclass`.

    Its constructor raises ArgumentError for an argument that the loss does not have, and says
    which argument is meant where TRL or verl has one of that name; also for arguments without
    names, where it takes them by name alone. Its signature stays.
    """
    made: Callable[..., None] = loss.__init__
    signature = inspect.signature(loss).parameters
    takes = tuple(signature)
    by_name = all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in signature.values())
    TAKES[loss.__name__] = takes

    @functools.wraps(made)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        if args and by_name:
            raise ArgumentError(
                f"{loss.__name__} takes arguments by name, and got {', '.join(map(repr, args))} "
                f"without one. Write {loss.__name__}(name=value); its names are "
                f"{', '.join(takes) or 'none: it has no arguments'}."
            )
        check_arguments(loss.__name__, takes, kwargs)
        made(self, *args, **kwargs)

    setattr(loss, "__init__", __init__)  # noqa: B010 - assigning to a method is a type error
    return loss


def explains_arguments_of(function: F) -> F:
    """Decorator for a function of forkpoint.losses, as `explains_arguments` is for a loss."""
    takes = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> object:
        check_arguments(function.__name__, takes, kwargs)
        return function(*args, **kwargs)

    return cast(F, checked)


def check_arguments(name: str, takes: tuple[str, ...], given: dict[str, object]) -> None:
    """Raises ArgumentError where `given` has an argument that is not one of `takes`."""
    unknown = {n: v for n, v in given.items() if n not in takes}
    if unknown:
        raise ArgumentError(
            " ".join(unknown_argument(name, n, v, takes, TAKES) for n, v in unknown.items())
        )
