"""Which package the code of a function comes from.

A model computes what its family computes only if the code that runs is the family's own. Names say
little: `functools.wraps` copies them. So the file is looked at that a function was compiled from.
"""

import functools
import inspect
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "transformers", "peft", "forkpoint"),
    *("fla", "causal_conv1d", "mamba_ssm", "kernels", "triton"),
)
"""Packages whose functions are the model's own, or ours."""
STANDARD = f"{Path(inspect.__file__).resolve().parent}/"
"""The standard library; installed packages lie below it, in site-packages."""


@functools.cache
def _folders() -> tuple[str, ...]:
    found = [spec.submodule_search_locations for name in PACKAGES if (spec := find_spec(name))]
    places = [str(Path(place).resolve()) for folders in found for place in folders or ()]
    return tuple(f"{place}/" for place in places)


def foreign_code(value: Any) -> str | None:
    """The place of a callable's code, where that is not of `PACKAGES`; None otherwise.

    Decorators of these packages are not looked into: where they are around other code, the
    comparison on a sample finds what that changes.

    Args:
        value: a function, method, property, partial, or any other object that can be called. Those
            that are compiled into Python, torch or an extension have no code, and pass.
    """
    while isinstance(value, functools.partial):
        value = value.func
    for part in (value.fget, value.fset) if isinstance(value, property) else (value,):
        function = getattr(part, "__func__", part)
        called = function if hasattr(function, "__code__") else type(function).__call__
        code = getattr(called, "__code__", None)
        if code is not None and not _is_own(code):
            return _place(code)
    return None


def _is_own(code: types.CodeType) -> bool:
    file = _resolved(code.co_filename)
    standard = file.startswith(STANDARD) and "/site-packages/" not in file
    return standard or file.startswith(_folders())


@functools.cache
def _resolved(file: str) -> str:
    # Code that was made of text, as by exec or on a prompt, has a name in angle brackets.
    return file if file.startswith("<") else str(Path(file).resolve())


def innermost(function: Any) -> Any:
    """The function that a chain of `functools.wraps` decorators stands around."""
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", function)
    return function


def is_defined_as(function: Any, qualname: str, module: str) -> bool:
    """Whether `module` defines `function` by this name, whatever decorators are around it."""
    code = getattr(innermost(function), "__code__", None)
    return code is not None and is_of_code(code, qualname, module)


def is_of_code(code: types.CodeType, qualname: str, module: str) -> bool:
    """Whether `code` was compiled from the file of `module` under this name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (
        code.co_qualname == qualname
        and file is not None
        and _resolved(code.co_filename) == _resolved(file)
    )


def place_of(function: Any) -> str:
    """The name and place of a callable, for messages."""
    if isinstance(function, functools.partial):
        return f"a partial of {place_of(function.func)}"
    code = getattr(innermost(function), "__code__", None)
    if code is None:
        kind = type(function)
        return getattr(function, "__qualname__", None) or f"{kind.__module__}.{kind.__qualname__}"
    return _place(code)


def name_of(function: Any) -> str:
    """The module and name of a callable, without the address that its repr has."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{function.__module__}.{name}"


def _place(code: types.CodeType) -> str:
    return f"{code.co_qualname} of {code.co_filename}, line {code.co_firstlineno}"


def is_of_compiler(name: str) -> bool:
    """Whether a global of this name may be one that torch.compile has put into a module.

    It keeps what it has compiled of a module's functions there, under names with two leading
    underscores. No code of a class can name such a global, because Python mangles the name.
    """
    return name.startswith("__")
