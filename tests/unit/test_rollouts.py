"""Rollout and RolloutBatch: what is stored, how it lines up, and what is refused."""

import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.fields import MAX_TOKEN_ID
from forkpoint.rollouts.rollout import LARGEST_LOGPROB

FLOATS = ("advantage", "old_logprobs", "reference_logprobs", "weights", "returns", "old_values")
TWO = ("advantage", "reference_logprobs")
"""One that may be a single number, and one that may not: stand for all in `FLOATS`."""

# Exact in every format below, so that one list is what is expected of all of them.
GIVEN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "advantage": [0.0, 0.0, 1.0, -2.0],
    "old_logprobs": [0.0, 0.0, -1.0, -0.5],
    "reference_logprobs": [0.0, 0.0, -2.0, -0.25],
    "weights": [0.0, 1.0, 2.0, 0.5],
    "returns": [0.0, 0.0, 0.5, 1.0],
    "old_values": [0.0, 0.0, 4.0, -1.0],
    "temperature": 0.5,
    "group_id": 3,
    "rollout_id": 4,
}
EXPECTED = Rollout(**GIVEN)


def make(**changes: Any) -> Rollout:
    return Rollout(**(GIVEN | changes))


def bare(**changes: Any) -> Rollout:
    """A rollout with the fields that every rollout has."""
    fields = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "advantage": 0.5}
    return Rollout(**(fields | {"rollout_id": "r"} | changes))


def each_field(change: Callable[[Any], Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: change(GIVEN[name]) for name in names}


# What is stored -----------------------------------------------------------------------------------


def test_stores_arrays_of_fixed_types() -> None:
    made = make(old_logprobs=[-9, 0, -1, -0.5], extras={"reward": 1.0})  # entry 0 is ignored
    assert made == make(extras={"reward": 1.0})
    assert made.token_ids.dtype == np.int64 and made.loss_mask.dtype == np.bool_
    for name in FLOATS:
        assert getattr(made, name).dtype == np.float64
    for name in (*FLOATS, "token_ids", "loss_mask"):
        assert not getattr(made, name).flags.writeable
        assert getattr(made, name).tolist() == GIVEN[name]
    assert (made.temperature, made.group_id, made.rollout_id) == (0.5, "3", "4")
    assert made.extras == {"reward": 1.0} and len(made) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.advantage = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("number", [1, np.float32(0.25), np.array(0.5), torch.tensor(0.25).half()])
def test_one_number_stays_one_number(number: Any) -> None:
    made = make(advantage=number, weights=number, returns=number, temperature=number)
    assert type(made.advantage) is float is type(made.temperature)
    assert made.advantage == made.weights == made.returns == made.temperature == float(number)


def test_what_is_stored_is_a_copy_without_a_graph() -> None:
    source = torch.tensor(GIVEN["old_logprobs"], dtype=torch.float64, requires_grad=True)
    ids = np.array(GIVEN["token_ids"])
    made = make(old_logprobs=source, token_ids=ids)
    with torch.no_grad():
        source.fill_(-9)
    ids[:] = 9
    assert made == EXPECTED and source.grad is None


def test_allowed_extremes() -> None:
    assert bare(loss_mask=[0, 0, 0, 0]).loss_mask.sum() == 0
    assert len(Rollout([MAX_TOKEN_ID], [0], 1.0)) == 1
    assert bare(token_ids=np.array([1, 2, 3, 4], np.uint64)).token_ids.dtype == np.int64
    made = bare(old_logprobs=[0, 3, -1, LARGEST_LOGPROB])  # above 0 outside the mask; rounding
    assert made.old_logprobs is not None and made.old_logprobs.tolist() == [0, 3, -1, 0.125]


def test_equality_and_repr() -> None:
    assert make() == EXPECTED
    assert make(old_logprobs=None) != EXPECTED != make(advantage=1.0) and EXPECTED != "rollout"
    assert make(extras={"a": [1]}) != make(extras={"a": [2]})
    assert repr(bare()) == "Rollout(rollout_id='r', group_id=None, 4 tokens, 2 trained)"


# Formats ------------------------------------------------------------------------------------------


def negative_view(x: Any) -> torch.Tensor:
    """A view that says its numbers are to be negated, as conjugated imaginary parts do."""
    view = torch.complex(torch.zeros(len(x)), -torch.tensor(x)).conj().imag
    assert view.is_neg()
    return view


ALL_FLOATS = (*FLOATS, "loss_mask", "temperature")
WHOLE = ("token_ids", "loss_mask", "group_id", "rollout_id")


@pytest.mark.parametrize(
    ("names", "change"),
    [
        *(
            (ALL_FLOATS, lambda x, dtype=dtype: torch.tensor(x).to(dtype))
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        ),
        *(
            (WHOLE, lambda x, dtype=dtype: torch.tensor(x, dtype=dtype))
            for dtype in (torch.int64, torch.uint8, torch.uint16)
        ),
        *(
            (WHOLE[:2], lambda x, kind=kind: np.array(x, kind))
            for kind in ("<i2", ">i8", "<u1", ">u4", "<u8")
        ),
        (FLOATS, negative_view),
        (FLOATS, lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) * 1.0),
        (FLOATS, lambda x: torch.tensor([x, x]).T[:, 1]),
        (FLOATS, lambda x: list(torch.tensor(x, requires_grad=True))),
        (FLOATS, lambda x: [torch.tensor(x[0]), *x[1:3], np.array(x[3])]),
        (FLOATS, lambda x: np.array(x, object)),
        (FLOATS, lambda x: np.array(x, ">f4")),
        (FLOATS, np.ma.masked_array),
        (FLOATS, tuple),
    ],
)
def test_tensors_arrays_and_lists(names: tuple[str, ...], change: Callable[[Any], Any]) -> None:
    assert make(**each_field(change, names)) == EXPECTED


def test_arrays_of_bfloat16_and_float8() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs the package ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        for change in (lambda x: np.array(x, dtype), lambda x: list(np.array(x, dtype))):  # noqa: B023
            assert make(**each_field(change, (*FLOATS, "loss_mask"))) == EXPECTED


@pytest.mark.parametrize(
    "mask",
    [
        [False, False, True, True],
        [-0.0, 0, np.float32(1), np.True_],
        np.array([0.0, False, 1, np.float32(1)], object),
        [torch.tensor(0.0), 0, torch.tensor(1.0), torch.tensor(True)],
    ],
)
def test_masks_of_0_and_1_of_any_type(mask: Any) -> None:
    assert make(loss_mask=mask) == EXPECTED


# Tokens that are not trained ----------------------------------------------------------------------


@pytest.mark.parametrize("unread", [math.nan, -math.inf, None])
@pytest.mark.parametrize("name", TWO)
def test_numbers_of_trained_tokens_alone_are_read(name: str, unread: float | None) -> None:
    values = [unread, unread, *GIVEN[name][2:]]
    expected = make(**{name: [0.0, 0.0, *GIVEN[name][2:]]})
    assert make(**{name: values}) == expected
    if unread is not None:
        assert make(**{name: torch.tensor(values, dtype=torch.bfloat16)}) == expected
    with pytest.raises(RolloutError, match=rf"{name}\[3\] is {unread}, and this token is trained"):
        make(**{name: [*GIVEN[name][:3], unread]})


def test_finite_numbers_of_untrained_tokens_are_kept() -> None:
    """So that a rollout whose mask is changed later has them."""
    made = make(old_logprobs=[9.0, -3.0, -1.0, -0.5], weights=[7.0, 1, 2, 0.5])
    assert made.old_logprobs is not None and made.old_logprobs.tolist() == [0, -3, -1, -0.5]
    wider = dataclasses.replace(made, loss_mask=[0, 1, 1, 1])
    assert wider.old_logprobs is not None and wider.old_logprobs[1] == -3
    assert isinstance(wider.weights, np.ndarray) and wider.weights[0] == 7


@pytest.mark.parametrize("name", ["advantage", "weights", "returns"])
def test_one_number_where_nothing_is_trained(name: str) -> None:
    nothing = [0, 0, 0, 0]
    assert make(loss_mask=nothing, **{name: math.nan}) == make(loss_mask=nothing, **{name: 0.0})
    with pytest.raises(RolloutError, match=f"{name} is nan"):
        make(**{name: math.nan})


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [5, np.True_, 7, 8]}, "token_ids[1] is True"),
        ({"token_ids": [5, -100, 7, 8]}, "token_ids[1] is -100"),
        ({"token_ids": [5, 6, 10**5000, 8]}, "token_ids[2] is an integer of 16610 bits"),
        ({"token_ids": np.array([1.0, 2, 3, 4])}, "token_ids[0] is 1.0 (float64)"),
        ({"token_ids": np.zeros((2, 3), int)}, "token_ids has 2 dimensions"),
        ({"token_ids": np.array([])}, "token_ids is empty"),
        ({"loss_mask": []}, "loss_mask has 0 entries, but token_ids has 4"),
        ({"loss_mask": torch.tensor([0, 0, 0.5, 1])}, "loss_mask[2] is 0.5"),
        ({"advantage": math.inf}, "advantage is inf"),
        ({"advantage": True}, "advantage is True"),
        ({"advantage": 10**400}, "advantage is an integer of 1329 bits"),
        ({"weights": torch.zeros(4, dtype=torch.complex64)}, "weights[0] is 0j (complex64)"),
        ({"returns": [0, 1]}, "returns has 2 entries, but token_ids has 4"),
        ({"old_values": 0.5}, "old_values is 0.5"),
        ({"old_logprobs": [0, False, -1, -1]}, "old_logprobs[1] is False"),
        ({"reference_logprobs": [0, 0, -1, 0.1251]}, "reference_logprobs[3] is 0.1251"),
        ({"temperature": 0}, "temperature is 0"),
        ({"group_id": True}, "group_id is True"),
        ({"extras": 3}, "extras is 3"),
        ({"advantage": None}, "advantage is None"),
        ({"weights": np.ma.masked_array([0.0, 0, 1, 1], [0, 0, 0, 1])}, "weights is a numpy array"),
        ({"temperature": math.inf}, "temperature is inf"),
    ],
)
def test_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RolloutError, match=re.escape(f"Rollout 'r': {said}")) as caught:
        bare(**changes)
    assert len(str(caught.value)) < 330


def fake(x: Any) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(len(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        fake,
        lambda x: torch.tensor(x).to_sparse(),
        lambda x: torch.nested.nested_tensor([torch.tensor(x)], layout=torch.jagged),
    ],
)
def test_tensors_without_numbers_are_refused(change: Callable[[Any], Any]) -> None:
    with pytest.raises(RolloutError, match=r"Rollout '4': advantage is a .*cannot be read"):
        make(advantage=change(GIVEN["advantage"]))


# Batches ------------------------------------------------------------------------------------------


def test_batch_is_flat_and_aligned() -> None:
    one = make(rollout_id="a", returns=0.5, weights=2)
    two = Rollout([9], [0], [3], [-9], [-9], [4], rollout_id="b", returns=[7], old_values=[8])
    batch = RolloutBatch([one, two])
    assert len(batch) == 2 and list(batch) == [one, two]
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.offsets.tolist() == [0, 4, 5] and batch.lengths.tolist() == [4, 1]
    assert batch.loss_mask.tolist() == [False, False, True, True, False]
    assert batch.advantages.tolist() == [0, 0, 1, -2, 3]
    for name, values in {
        "old_logprobs": [0, 0, -1, -0.5, 0],
        "reference_logprobs": [0, 0, -2, -0.25, 0],
        "weights": [2, 2, 2, 2, 4],
        "returns": [0.5, 0.5, 0.5, 0.5, 7],
        "old_values": [0, 0, 4, -1, 8],
    }.items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.temperatures.tolist() == [0.5, 1.0]
    assert (batch.rollout_ids, batch.group_ids) == (("a", "b"), ("3", None))
    assert (batch.logical_tokens, batch.trained_tokens) == (5, 2)
    assert repr(batch) == "RolloutBatch(2 rollouts, 2 groups, 5 tokens, 2 trained)"
    for field in dataclasses.fields(batch):
        values = getattr(batch, field.name)
        assert not isinstance(values, np.ndarray) or not values.flags.writeable, field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.token_ids = np.zeros(5)  # type: ignore[misc]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("given", [EXPECTED, RolloutBatch([EXPECTED])])
def test_copies_are_read_only_as_well(given: Any, copied: Callable[[Any], Any]) -> None:
    """A batch whose arrays are written to would differ from its rollouts."""
    found = copied(given)
    for field in dataclasses.fields(given):
        values = getattr(found, field.name)
        assert not isinstance(values, np.ndarray) or not values.flags.writeable, field.name
    assert list(found if isinstance(given, RolloutBatch) else [found]) == [EXPECTED]


def test_missing_ids_are_positions_that_collide_with_none() -> None:
    names = [None, "2", None, "0", "2_"]
    batch = RolloutBatch(bare(rollout_id=name) for name in names)
    assert batch.rollout_ids == ("0_", "2", "2__", "0", "2_")
    assert batch[0].rollout_id == "0_"


def test_groups_by_id_in_order_of_first_appearance() -> None:
    batch = RolloutBatch(
        bare(rollout_id=i, group_id=group) for i, group in enumerate(["b", "a", "b", 3, "a"])
    )
    assert batch.group_index.tolist() == [0, 1, 0, 2, 1]
    assert batch.group_ids == ("b", "a", "b", "3", "a")
    assert [group.tolist() for group in batch.groups()] == [[0, 2], [1, 4], [3]]


def test_groups_without_id_by_prompt() -> None:
    def rollout(ids: list[int], mask: list[int], group: str | None = None) -> Rollout:
        return Rollout(ids, mask, 1.0, group_id=group)

    batch = RolloutBatch(
        [
            rollout([1, 2, 3], [0, 0, 1]),
            rollout([1, 2, 9, 9], [0, 0, 1, 0]),
            rollout([1, 2, 3], [0, 1, 1]),  # prompt [1]
            rollout([1, 2], [0, 0]),  # nothing trained: all of it is prompt
            rollout([1, 2, 3], [0, 0, 1], group="g"),  # never with those without an id
            rollout([1], [0]),
        ]
    )
    assert batch.group_index.tolist() == [0, 0, 1, 0, 2, 1]


def test_select_keeps_order_and_ids() -> None:
    batch = RolloutBatch(bare(rollout_id=None, group_id=i // 2) for i in range(6))
    chosen = batch.select(np.array([5, 0, -2]))
    assert chosen.rollout_ids == ("5", "0", "4") and chosen.group_ids == ("2", "0", "2")
    assert list(chosen) == [batch[5], batch[0], batch[4]]
    assert len(batch.select([])) == 0
    for indices, error in (([6], IndexError), ([0.5], TypeError), ([1, 2, 1], RolloutError)):
        with pytest.raises(error):
            batch.select(indices)  # type: ignore[list-item]
    for mask in ([True, False], np.array([True]), torch.tensor([False, True])):
        with pytest.raises(RolloutError, match="select takes indices, and these are booleans"):
            batch.select(mask)


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ([bare(), {"token_ids": [1]}], "Item 1 is {'token_ids': [1]} of type dict"),
        ("rollouts.jsonl", "The rollouts are 'rollouts.jsonl'"),
        ([bare(), bare(rollout_id="s"), bare()], "rollout_id 'r' is given twice, at positions 0"),
        (
            [bare(), bare(rollout_id="s", old_logprobs=[0, 0, -1, -1])],
            "Rollout 's' has old_logprobs and rollout 'r' does not",
        ),
    ],
)
def test_batch_refuses(rollouts: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=re.escape(said)):
        RolloutBatch(rollouts)


def test_a_batch_shares_the_arrays_of_rollouts_without_ids() -> None:
    given = bare(rollout_id=None)
    (kept,) = RolloutBatch([given]).rollouts
    assert (given.rollout_id, kept.rollout_id) == (None, "0")
    assert kept.token_ids is given.token_ids
