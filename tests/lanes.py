"""Cases of `make test`, and those that wait for `make test-slow`.

Most cases of some tests are of one kind: families, dtypes, optimizers, damaged files. A few of them
run in `make test`, so that what breaks the kind is noticed there.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from forkpoint import Config


def slow_besides(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values for `parametrize`, of which those in `kept` alone are not marked."""
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"{unknown} are none of {values}"
    return [
        value
        if value in kept
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


def slow_besides_every(nth: int, values: Iterable[Any]) -> list[Any]:
    """The values for `parametrize`, of which every nth is not marked, from the first on."""
    values = list(values)
    return slow_besides(values[::nth], values)


def id_of(value: Any) -> str:
    """A short name of a value for the name of a test; the same in every process."""
    if isinstance(value, Config):
        limit = f"-{value.max_microbatch_tokens}" if value.max_microbatch_tokens else ""
        return f"{value.sharing}-{value.boundary}{limit}"
    return getattr(value, "__name__", str(value))
