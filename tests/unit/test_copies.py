from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint import Rollout, RolloutBatch
from forkpoint.parallel.copies import contents_of


def digest(extras: dict[str, Any]) -> str:
    return contents_of(RolloutBatch([Rollout([1, 2], [0, 1], 1.0, extras=extras)]), [], ()).rollouts


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_the_digest_has_every_value_of_extras(of: Callable[[Any], Any]) -> None:
    """The repr of arrays and tensors leaves out the middle of more than 1,000 values."""

    def made(value: float, **options: Any) -> dict[str, Any]:
        values = np.zeros((2, 1001), **options)
        values[1, 7] = value
        return {"a": [of(values)]}

    assert digest(made(0)) == digest(made(0)) != digest(made(5))
    assert digest(made(0)) != digest(made(0, dtype=np.int64))
    assert digest({"a": of(np.zeros((1, 2)))}) != digest({"a": of(np.zeros((2, 1)))})


def test_the_order_of_keys_is_not_in_the_digest() -> None:
    assert digest({"a": {1: 2, "b": 3}, "c": 4}) == digest({"c": 4, "a": {"b": 3, 1: 2}})
    assert digest({"a": "b"}) != digest({"b": "a"})
    assert digest({"a": {"b": 1}, "c": 2}) != digest({"a": {"b": 1, "c": 2}})


def test_tensors_of_any_kind_are_digested() -> None:
    x = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True).T
    assert digest({"a": x}) == digest({"a": x.detach().clone()})
    assert digest({"a": torch.tensor(1)}) != digest({"a": torch.tensor(2)})
    assert digest({"a": np.array([{1: 2}], object)}) == digest({"a": np.array([{1: 2}], object)})
