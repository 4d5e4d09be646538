"""Finds where a function is defined, from its code, because `functools.wraps` copies names."""

import functools
import sys
import types
from pathlib import Path
from typing import Any

Definition = tuple[str, str]
"""A module, and the qualified name of a function that it defines."""


def is_defined_as(function: Any, *definitions: Definition) -> bool:
    """Whether a function is one of these, or a decorator that `functools.wraps` made around it."""
    code = getattr(_innermost(function), "__code__", None)
    return code is not None and is_code_of(code, *definitions)


@functools.cache
def is_code_of(code: types.CodeType, *definitions: Definition) -> bool:
    """Whether code was compiled from the file of one of these modules, with the qualified name of
    the pair."""
    return any(
        code.co_qualname == name and _resolved(code.co_filename) == _file_of(module)
        for module, name in definitions
    )


def describe_function(function: Any) -> str:
    """The module and name of a callable, for messages."""
    if isinstance(function, functools.partial):
        return f"a partial of {describe_function(function.func)}"
    inner = _innermost(function)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def _innermost(function: Any) -> Any:
    """The innermost function of a chain of `functools.wraps` decorators and partials."""
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        function = function.func if isinstance(function, functools.partial) else function
        function = getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", function)
    return function


def _file_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else _resolved(file)


@functools.cache
def _resolved(file: str) -> str:
    # Code that was compiled from text, as by exec or on a prompt, has a name in angle brackets.
    return file if file.startswith("<") else str(Path(file).resolve())
