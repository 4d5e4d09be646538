"""Cases of `make test`, and those that wait for another command.

Most cases of some tests are of one kind: families, dtypes, optimizers, damaged files. A few of them
run in `make test`, so that what breaks the kind is noticed there, and `make test-slow` runs the
others.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_besides(
    kept: Collection[Any], values: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """The values for `parametrize`, of which those in `kept` alone are not marked.

    Args:
        kept: the values that `make test` runs, each of which must be among `values`.
        values: one of a test's arguments, or a tuple of them, each.
        mark: of the others; its lane runs them.
    """
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"{unknown} are none of {values}"
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]
