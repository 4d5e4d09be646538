"""Checks that tensors have the dimensions that the suffixes of their names say.

`q_THD` is a tensor [T, H, D]: in one call of an operation all tensors agree on T, on H and on D,
arguments and results alike. `checked_shapes` in conftest.py puts these checks around the public
operations for the time of a test.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SUFFIX = re.compile(r"_([A-Z]+)$")


class ShapeMismatch(AssertionError):
    """A tensor whose shape is not that of its name."""


@dataclass(frozen=True)
class Documented:
    """The shapes of an operation that no name of an argument has.

    results: of each result, one letter a dimension; "?" for one that has no letter.
    others: of arguments, and attributes of arguments, by name.
    """

    results: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)


CACHED = {"cache.k": "AKD", "cache.v": "AKE", "cache.grad_k": "AKD", "cache.grad_v": "AKE"}
OPERATIONS: dict[tuple[str, str], Documented] = {
    ("forkpoint.ops.attention", "shared_attention"): Documented(
        ("THE", "HT"), {"sinks": "H", **CACHED}
    ),
    ("forkpoint.ops.delta_rule", "gated_delta_rule"): Documented(("TGE", "KGDE")),
    ("forkpoint.ops.selective_scan", "selective_scan"): Documented(("TGE", "KGED")),
    ("forkpoint.ops.recurrence", "gathered_inputs"): Documented(("TC", "FWC", "K?C")),
    ("forkpoint.ops.recurrence", "pairwise_decay"): Documented(("NGCC",)),
    ("forkpoint.ops.recurrence", "short_convolution"): Documented(("TC",)),
    ("forkpoint.ops.head", "token_logprobs"): Documented(("T", "T")),
    ("forkpoint.ops.head", "token_logprobs_reference"): Documented(("T", "T")),
}
"""The public operations by module and name."""


def shapes_checked(function: Callable[..., Any], documented: Documented) -> Callable[..., Any]:
    """`function`, raising ShapeMismatch where tensors of one call disagree with their names."""
    signature = inspect.signature(function)
    name = function.__name__

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        sizes: dict[str, tuple[int, str]] = {}
        for argument, value in signature.bind(*args, **kwargs).arguments.items():
            for place, letters, tensor in _named(argument, value, documented.others):
                _check(name, place, letters, tensor, sizes)
        results = function(*args, **kwargs)
        given = results if isinstance(results, tuple) else (results,)
        if len(given) != len(documented.results):
            raise ShapeMismatch(f"{name} gives {len(given)} results, not {documented.results}")
        for place, (letters, tensor) in enumerate(zip(documented.results, given, strict=True)):
            _check(name, f"result {place}", letters, tensor, sizes)
        return results

    return checked


def _named(argument: str, value: Any, others: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Tensors of an argument that have documented dimensions."""
    if found := SUFFIX.search(argument):
        yield argument, found[1], value
    for place, letters in others.items():
        owner, _, attribute = place.partition(".")
        if owner == argument and value is not None:
            yield place, letters, getattr(value, attribute) if attribute else value


def _check(
    name: str, place: str, letters: str, tensor: Any, sizes: dict[str, tuple[int, str]]
) -> None:
    if tensor is None:
        return
    shape = tuple(tensor.shape)
    if len(shape) != len(letters):
        raise ShapeMismatch(f"{name}: {place} has the shape {shape}, and is named {letters}")
    for letter, size in zip(letters, shape, strict=True):
        known, where = sizes.setdefault(letter, (size, place)) if letter != "?" else (size, place)
        if known != size:
            raise ShapeMismatch(
                f"{name}: {letter} is {size} in {place}, of shape {shape}, and {known} in {where}"
            )


def our_modules() -> list[Any]:
    """Modules of forkpoint and of the tests that are loaded."""
    # Every test that checks shapes asks, and thousands of modules of others are loaded.
    return [module for name, module in list(sys.modules.items()) if _is_ours(name)]


@functools.cache
def _is_ours(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None) or ""
    return name.partition(".")[0] == "forkpoint" or TESTS in Path(file).parents


def holders(name: str, function: object, modules: Sequence[Any]) -> Iterator[Any]:
    """Those of the modules that hold the function under its name."""
    for module in modules:
        if vars(module).get(name) is function:
            yield module
