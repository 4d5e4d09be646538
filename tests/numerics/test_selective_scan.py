"""The recurrence of Mamba-2: chunks against a loop over time, with states handed over."""

import numpy as np
import pytest
import torch
from recurrences_by_loops import mamba2
from test_delta_rule import RAGGED, close
from test_delta_rule import outcome as outcome_of
from torch import Tensor

from forkpoint import UnsupportedError
from forkpoint.ops.recurrence import Sequences, StateTable
from forkpoint.ops.selective_scan import chunked_scan, selective_scan
from forkpoint.tree import Level, StateLayout

NAMES = ("x", "a", "b", "c", "initial")
HEADS, GROUPS, VALUE_DIM, STATE_DIM = 4, 2, 3, 5


def make(lengths: list[int], forgets: float, states: bool = True) -> list[Tensor | None]:
    random = torch.Generator().manual_seed(0)
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    x, a = normal(tokens, HEADS, VALUE_DIM), -forgets * normal(tokens, HEADS).abs()
    b, c = (normal(tokens, GROUPS, STATE_DIM) for _ in range(2))
    return [x, a, b, c, normal(len(lengths), HEADS, VALUE_DIM, STATE_DIM) if states else None]


def outcome(scan, inputs: list[Tensor | None], lengths: list[int]) -> dict[str, Tensor]:
    return outcome_of(scan, inputs, Sequences(np.asarray(lengths), "cpu"), names=NAMES)


@pytest.mark.parametrize(
    ("lengths", "forgets", "states"),
    [
        (RAGGED, 0.0, True),
        (RAGGED, 300.0, True),
        (RAGGED, 0.2, False),
        ([1], 0.2, True),
        ([63, 65], 0.2, True),
    ],
)
def test_chunks_are_the_loop_over_time(lengths: list[int], forgets: float, states: bool) -> None:
    inputs = make(lengths, forgets, states)
    expected = outcome(mamba2, inputs, lengths)
    close(outcome(chunked_scan, inputs, lengths), expected)


def test_the_gradient_of_decays_is_precise_where_tokens_forget_almost_all() -> None:
    inputs = [None if x is None else x.float() for x in make([130], 0.2, states=False)]
    inputs[1] = inputs[1] - 16
    exact = [None if x is None else x.double() for x in inputs]
    expected = outcome(mamba2, exact, [130])["a"]
    found = outcome(chunked_scan, inputs, [130])["a"]
    assert (found - expected).norm() < 1e-3 * expected.norm()
    assert expected.norm() > 0


def test_a_kernel_that_is_none_is_refused() -> None:
    whole = Level(np.zeros(1, int), np.asarray([3]), np.asarray([-1]), np.zeros(0, int), False)
    table = StateTable(StateLayout((whole,), np.zeros(0, int)))
    x, a, b, c, _ = make([3], 0.2)
    assert x is not None and a is not None and b is not None and c is not None
    with pytest.raises(UnsupportedError, match=r"no selective-scan kernel 'fla'; .*'chunked'"):
        selective_scan(x, a, b, c, table=table, kernel="fla")


def test_autocast_outside_changes_nothing_inside() -> None:
    """The state stays in float32, and what it is made with."""
    whole = Level(np.zeros(1, int), np.asarray([70]), np.asarray([-1]), np.zeros(1, int), True)
    table = StateTable(StateLayout((whole,), np.zeros(1, int)))
    given = [x.float() for x in make([70], 0.2) if x is not None]
    plain = selective_scan(*given[:4], table=table, initial_SGED=given[4])
    with torch.autocast("cpu", torch.bfloat16):
        cast = selective_scan(*given[:4], table=table, initial_SGED=given[4])
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
