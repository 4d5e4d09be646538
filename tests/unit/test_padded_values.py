"""Per-token values put back into the shapes of the tensors that a batch was made from."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from batch_fields import some, split
from forkpoint import Rollout, RolloutBatch
from forkpoint.errors import ConfigError, RolloutError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def test_padding_on_both_sides_by_hand() -> None:
    batch = RolloutBatch.from_padded(**some())
    assert [r.token_ids.tolist() for r in batch] == [
        [5, 6, 7, 8, 9],
        [5, 6, 7],
        [5, 6, 1, 2, 3, 4],
    ]
    assert batch.group_index.tolist() == [0, 0, 0]  # by the prompt 5, 6, on whichever side it is
    assert batch.layout.shape == (3, 6)
    back = batch.to_padded(torch.arange(1, 15), fill=-1)
    assert back.tolist() == [[1, 2, 3, 4, 5, -1], [-1, -1, -1, 6, 7, 8], [9, 10, 11, 12, 13, 14]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_values_keep_dtype_and_order(dtype: torch.dtype) -> None:
    batch = RolloutBatch.from_padded(**some())
    values = (torch.arange(14) % 2).to(dtype)
    back = batch.to_padded(values, fill=1)
    mask = torch.from_numpy(batch.layout.mask())
    assert back.dtype == dtype and back.shape == (3, 6)
    assert torch.equal(back[mask], values) and bool((back[~mask] == 1).all())


def test_values_of_more_dimensions_arrays_and_lists() -> None:
    batch = RolloutBatch.from_completions(**split())
    mask = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(batch.layout.mask(), mask)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    for each in (values, torch.from_numpy(values)):
        back = batch.to_padded(each)
        assert back.shape == (2, 5, 2)
        np.testing.assert_array_equal(np.asarray(back)[mask], values)
        of_completions = batch.to_completions(each)
        np.testing.assert_array_equal(np.asarray(of_completions), np.asarray(back)[:, 2:])
    assert batch.to_padded(list(range(8))).tolist() == [[0, 1, 2, 3, 0], [0, 4, 5, 6, 7]]
    assert batch.to_padded(np.ones(8, bool), fill=True).all()


@pytest.mark.parametrize("method", ["to_padded", "to_completions"])
def test_gradients_of_padded_values(method: str) -> None:
    pad = getattr(RolloutBatch.from_completions(**split()), method)
    values = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pad(x * x, fill=3), [values])
    assert not pad(values.detach()).requires_grad


def test_a_batch_of_rollouts_is_padded_on_the_right() -> None:
    batch = RolloutBatch([Rollout([1, 2, 3], [0, 1, 1], 1.0), Rollout([4], [0], 1.0)])
    assert batch.to_padded([1, 2, 3, 4]).tolist() == [[1, 2, 3], [4, 0, 0]]
    with pytest.raises(RolloutError, match="Use to_padded"):
        batch.to_completions([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("values", "fill", "error", "problem"),
    [
        (torch.zeros(13), 0, RolloutError, r"the shape \(13,\), and the batch has 14 tokens"),
        (np.array(1.0), 0, RolloutError, r"the shape \(\), and the batch has 14 tokens"),
        (torch.zeros(14).to_sparse(), 0, RolloutError, "sparse_coo"),
        (["a"] * 14, 0, RolloutError, "values is "),
        ([[1], [2, 3]], 0, RolloutError, "values is "),
        (torch.zeros(14, dtype=torch.int64), 0.5, ConfigError, r"fill is 0\.5; .*int64"),
        (torch.zeros(14, dtype=torch.int8), 200, ConfigError, "fill is 200; .*int8"),
        (torch.zeros(14, dtype=torch.int8), math.nan, ConfigError, "fill is nan; .*int8"),
        (torch.zeros(14, dtype=torch.bool), 2, ConfigError, "fill is 2; .*bool"),
        (np.zeros(14, np.uint8), -1, ConfigError, "fill is -1; .*uint8"),
        (np.zeros(14), "0", ConfigError, "fill is '0'"),
    ],
)
def test_values_that_do_not_fit(values: Any, fill: Any, error: type, problem: str) -> None:
    with pytest.raises(error, match=problem):
        RolloutBatch.from_padded(**some()).to_padded(values, fill=fill)
