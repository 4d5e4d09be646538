"""Rollout and RolloutBatch: what is stored, how it lines up, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, check_rollouts, short
from forkpoint.rollouts.fields import MAX_TOKEN_ID


def make(**changes) -> Rollout:
    values = {
        "token_ids": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        "advantage": 0.5,
        "rollout_id": "r",
    }
    return Rollout(**(values | changes))


def refusal(*parts: str) -> str:
    """A pattern for a message that holds all the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


# What is stored


def test_stores_arrays_of_fixed_types():
    rollout = make(
        advantage=[0, 0, 1, 2],
        old_logprobs=[-9, 0, -1, -2.5],
        reference_logprobs=np.array([0, 0, -1, -1], np.float32),
        weights=(1, 1, 1, 2),
        returns=[0, 0, 1, 2],
        old_values=np.array([0, 0, 3, -1], np.float32),
        temperature=np.float32(0.5),
        group_id=7,
        rollout_id=np.int64(8),
        extras={"reward": 1.0},
    )
    assert rollout.token_ids.dtype == np.int64
    assert rollout.loss_mask.dtype == np.bool_
    for values in (
        rollout.advantage,
        rollout.old_logprobs,
        rollout.reference_logprobs,
        rollout.weights,
        rollout.returns,
        rollout.old_values,
    ):
        assert isinstance(values, np.ndarray)
        assert values.dtype == np.float64
        assert not values.flags.writeable
    assert not rollout.token_ids.flags.writeable
    assert not rollout.loss_mask.flags.writeable
    assert rollout.old_logprobs is not None
    assert rollout.old_logprobs.tolist() == [0, 0, -1, -2.5]  # entry 0 is ignored
    assert rollout.temperature == 0.5
    assert (rollout.group_id, rollout.rollout_id) == ("7", "8")
    assert rollout.extras == {"reward": 1.0}
    assert len(rollout) == 4


@pytest.mark.parametrize("number", [1, 0.25, np.float32(0.25), np.int64(-3), np.array(0.5)])
def test_one_number_stays_one_number(number):
    rollout = make(advantage=number, weights=number)
    assert type(rollout.advantage) is float
    assert rollout.advantage == rollout.weights == float(number)


def test_copies_what_it_is_given():
    ids = np.array([5, 6, 7, 8])
    rollout = make(token_ids=ids)
    ids[0] = 99
    assert rollout.token_ids[0] == 5
    with pytest.raises(ValueError, match="read-only"):
        rollout.token_ids[0] = 1


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().advantage = 2.0


@pytest.mark.parametrize(
    "mask",
    [
        [False, False, True, True],
        np.array([False, False, True, True]),
        np.array([0, 0, 1, 1], np.uint8),
        [np.False_, 0, True, np.int32(1)],
        np.array([0, 0, 1, 1], object),
    ],
)
def test_masks_of_any_whole_type(mask):
    assert make(loss_mask=mask).loss_mask.tolist() == [False, False, True, True]


def test_allowed_extremes():
    assert make(loss_mask=[0, 0, 0, 0]).loss_mask.sum() == 0
    assert len(Rollout([MAX_TOKEN_ID], [0], 1.0)) == 1
    assert make(token_ids=np.array([1, 2, 3, 4], np.uint64)).token_ids.dtype == np.int64
    made = make(old_logprobs=[0, 3, -1, 0.125])  # above 0 outside the mask, rounding inside
    assert made.old_logprobs is not None and made.old_logprobs.tolist() == [0, 3, -1, 0.125]


def test_equality_and_repr():
    arrays = {"advantage": [0, 0, 1, 2], "old_logprobs": [0, 0, -1, -1], "extras": {"a": [1]}}
    assert make(**arrays) == make(**arrays)
    assert make(**arrays) != make(**(arrays | {"old_logprobs": None}))
    assert make(**arrays) != make(**(arrays | {"advantage": 1.0}))
    assert make(**arrays) != make(**(arrays | {"extras": {"a": [2]}}))
    assert make() != "rollout"
    assert repr(make()) == "Rollout(rollout_id='r', group_id=None, 4 tokens, 2 trained)"


def test_short_is_exact_for_numbers_and_short_for_the_rest():
    assert short(np.float64(0.1)) == "0.1"
    assert short(-(2**70)) == str(-(2**70))
    assert short(1 << 30000) == "an integer of 30001 bits"
    assert len(short(list(range(10_000)))) < 60
    assert len(short("x" * 10_000)) == 80


# What is refused

IDS = "whole numbers from 0 to 2147483647"
NAMED = "Rollout 'r': "


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # token_ids
        ({"token_ids": [5, np.True_, 7, 8]}, ["token_ids[1] is True", IDS]),
        ({"token_ids": [5, 6, 7, "8"]}, ["token_ids[3] is '8'", IDS]),
        ({"token_ids": [5, None, 7, 8]}, ["token_ids[1] is None", IDS]),
        ({"token_ids": [5, 2**63, 7, 8]}, ["token_ids[1] is 9223372036854775808", IDS]),
        ({"token_ids": [-1, 2**63, 7, 8]}, ["token_ids[1] is 9223372036854775808", IDS]),
        ({"token_ids": [5, 6, 2**70, 8]}, ["token_ids[2] is 1180591620717411303424", IDS]),
        ({"token_ids": [5, 6, 10**5000, 8]}, ["token_ids[2] is an integer of 16610 bits", IDS]),
        ({"token_ids": np.array([1.0, 2, 3, 4])}, ["token_ids[0] is 1.0 (float64)", IDS]),
        ({"token_ids": np.array([True] * 4)}, ["token_ids[0] is True (bool)", IDS]),
        ({"token_ids": np.array([1, 2, None, 4])}, ["token_ids[2] is None", IDS]),
        (
            {"token_ids": np.array([1, 2, 3, 2**63], np.uint64)},
            ["token_ids[3] is 9223"],
        ),
        ({"token_ids": "5678"}, ["token_ids is '5678'", "one-dimensional"]),
        ({"token_ids": None}, ["token_ids is None"]),
        ({"token_ids": 5}, ["token_ids is 5"]),
        ({"token_ids": np.array([])}, ["token_ids is empty"]),
        # loss_mask
        ({"loss_mask": []}, ["loss_mask has 0 entries, but token_ids has 4"]),
        ({"loss_mask": [0, 0, -1, 1]}, ["loss_mask[2] is -1", "0 and 1"]),
        ({"loss_mask": [0, 0, 1.5, 1]}, ["loss_mask[2] is 1.5", "0 and 1"]),
        ({"loss_mask": [0, 0, "1", 1]}, ["loss_mask[2] is '1'", "0 and 1"]),
        ({"loss_mask": [0, 0, None, 1]}, ["loss_mask[2] is None", "0 and 1"]),
        ({"loss_mask": [0, 0, 2**80, 1]}, ["loss_mask[2] is 1208925819614629174706176"]),
        ({"loss_mask": np.array([0, np.nan, 1, 1])}, ["loss_mask[1] is nan", "0 and 1"]),
        ({"loss_mask": np.array([0, 0, 1, 1j])}, ["loss_mask[0] is 0j (complex128)"]),
        ({"loss_mask": np.zeros((1, 4), bool)}, ["loss_mask has 2 dimensions (1 x 4)"]),
        # one number or one per token
        ({"advantage": float("-inf")}, ["advantage is -inf", "finite"]),
        ({"advantage": True}, ["advantage is True"]),
        ({"advantage": 1j}, ["advantage is 1j"]),
        ({"advantage": {"a": 1}}, ["advantage is {'a': 1}"]),
        ({"advantage": 10**400}, ["advantage is an integer of 1329 bits"]),
        ({"advantage": [0, 0, float("nan"), 1]}, ["advantage[2] is nan", "finite"]),
        ({"advantage": [0, 0, "a", 1]}, ["advantage[2] is 'a'"]),
        ({"advantage": [0, 0, 10**400, 1]}, ["advantage[2] is an integer of 1329 bits"]),
        ({"advantage": np.zeros((4, 1))}, ["advantage has 2 dimensions (4 x 1)"]),
        ({"weights": [0, 0, 1, float("inf")]}, ["weights[3] is inf"]),
        ({"returns": float("nan")}, ["returns is nan", "one finite number, or one per token"]),
        ({"returns": [0, 1]}, ["returns has 2 entries, but token_ids has 4"]),
        ({"old_values": 0.5}, ["old_values is 0.5", "numbers, one per token"]),
        ({"old_values": [0, 0, 1, float("inf")]}, ["old_values[3] is inf"]),
        # log-probs
        ({"old_logprobs": [0, False, -1, -1]}, ["old_logprobs[1] is False"]),
        ({"old_logprobs": -1.0}, ["old_logprobs is -1.0", "numbers, one per token"]),
        (
            {"reference_logprobs": [0, 0, -1, -np.inf]},
            ["reference_logprobs[3] is -inf, and token 3 is trained", "policy.score", "loss_mask"],
        ),
        ({"old_logprobs": [0, 0, np.nan, -1]}, ["old_logprobs[2] is nan", "policy.score"]),
        ({"old_logprobs": [0, 0, None, -1]}, ["old_logprobs[2] is None", "policy.score"]),
        ({"reference_logprobs": [0, 0, -1, 0.1251]}, ["[3] is 0.1251", "16 bits", "0.125"]),
        # the rest
        ({"temperature": -0.5}, ["temperature is -0.5"]),
        ({"temperature": float("nan")}, ["temperature is nan"]),
        ({"temperature": float("inf")}, ["temperature is inf"]),
        ({"temperature": "1"}, ["temperature is '1'"]),
        ({"temperature": True}, ["temperature is True"]),
        ({"temperature": None}, ["temperature is None"]),
        ({"temperature": [1.0]}, ["temperature is [1.0]"]),
        ({"group_id": True}, ["group_id is True"]),
    ],
)
def test_refuses(changes, parts):
    with pytest.raises(RolloutError, match=refusal(NAMED, *parts)):
        make(**changes)


def test_refuses_without_an_id():
    with pytest.raises(RolloutError, match=r"A rollout: rollout_id is 2\.5; it takes text"):
        make(rollout_id=2.5)
    with pytest.raises(RolloutError, match="A rollout without rollout_id: token_ids is empty"):
        make(rollout_id=None, token_ids=[])


def test_messages_never_show_long_arrays_whole():
    with pytest.raises(RolloutError) as caught:
        make(token_ids=[list(range(100_000))])
    assert len(str(caught.value)) < 300


# Batches


def test_batch_is_flat_and_aligned():
    batch = RolloutBatch(
        [
            make(
                rollout_id="a",
                weights=2,
                old_logprobs=[-9, 0, -1, -2],
                temperature=0.7,
                returns=0.5,
                old_values=[0, 0, 1, -2],
            ),
            make(
                token_ids=[9],
                loss_mask=[0],
                advantage=[3],
                rollout_id="b",
                weights=[4],
                old_logprobs=[-9],
                returns=[7],
                old_values=[8],
                extras={"reward": 1},
            ),
        ]
    )
    assert len(batch) == 2
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.offsets.tolist() == [0, 4, 5]
    assert batch.lengths.tolist() == [4, 1]
    assert batch.loss_mask.tolist() == [False, False, True, True, False]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, 0.5, 3.0]
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [0, 0, -1, -2, 0]
    assert batch.reference_logprobs is None
    assert batch.weights is not None
    assert batch.weights.tolist() == [2, 2, 2, 2, 4]
    assert batch.returns is not None and batch.old_values is not None
    assert batch.returns.tolist() == [0.5, 0.5, 0.5, 0.5, 7]
    assert batch.old_values.tolist() == [0, 0, 1, -2, 8]
    assert batch.temperatures.tolist() == [0.7, 1.0]
    assert batch.rollout_ids == ("a", "b")
    assert batch.group_ids == (None, None)
    assert batch.extras == (None, {"reward": 1})
    assert (batch.logical_tokens, batch.trained_tokens) == (5, 2)
    assert repr(batch) == "RolloutBatch(2 rollouts, 2 groups, 5 tokens, 2 trained)"
    for dtype, names in (
        (np.int64, ("token_ids", "offsets", "group_index")),
        (
            np.float64,
            ("advantages", "old_logprobs", "weights", "returns", "old_values", "temperatures"),
        ),
        (np.bool_, ("loss_mask",)),
    ):
        for name in names:
            assert getattr(batch, name).dtype == dtype, name
            assert not getattr(batch, name).flags.writeable, name
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.token_ids = np.zeros(5)


def test_missing_ids_are_positions_that_collide_with_none():
    given = [None, "2", None, "0", "2_"]
    batch = RolloutBatch(make(rollout_id=name) for name in given)
    assert batch.rollout_ids == ("0_", "2", "2__", "0", "2_")
    assert batch[0].rollout_id == "0_"
    assert RolloutBatch([make(rollout_id=None)] * 3).rollout_ids == ("0", "1", "2")


def test_groups_by_id_in_order_of_first_appearance():
    batch = RolloutBatch(
        make(rollout_id=i, group_id=group) for i, group in enumerate(["b", "a", "b", 3, "a"])
    )
    assert batch.group_index.tolist() == [0, 1, 0, 2, 1]
    assert batch.group_ids == ("b", "a", "b", "3", "a")
    assert [group.tolist() for group in batch.groups()] == [[0, 2], [1, 4], [3]]


def test_groups_without_id_by_prompt():
    def rollout(ids, mask, group=None):
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


def test_select_keeps_order_and_ids():
    batch = RolloutBatch(make(rollout_id=None, group_id=i // 2) for i in range(6))
    chosen = batch.select(np.array([5, 0, -2]))
    assert chosen.rollout_ids == ("5", "0", "4")
    assert chosen.group_ids == ("2", "0", "2")
    assert chosen.group_index.tolist() == [0, 1, 0]
    assert chosen[0] == batch[5]
    assert list(chosen) == [batch[5], batch[0], batch[4]]
    with pytest.raises(IndexError):
        batch.select([6])
    assert len(batch.select([])) == 0
    with pytest.raises(RolloutError, match="rollout_id '1' is given twice, at positions 0 and 2"):
        batch.select([1, 2, 1])


def test_check_vocabulary():
    batch = RolloutBatch([make(), make(rollout_id="s", token_ids=[5, 6, 900, 901])])
    batch.check_vocabulary(902)
    parts = ["Rollout 's': token_ids[2] is 900", "has 900 entries", "from 0 to 899", "tokenizer"]
    with pytest.raises(RolloutError, match=refusal(*parts)):
        batch.check_vocabulary(900)
    with pytest.raises(RolloutError, match=refusal("Rollout 'r': token_ids[0] is 5", "0 to 3")):
        batch.check_vocabulary(4)


@pytest.mark.parametrize(
    ("rollouts", "parts"),
    [
        ([make(), {"token_ids": [1]}], ["Item 1 is {'token_ids': [1]} of type dict", "Rollout(.."]),
        (
            [make(), make(rollout_id="s"), make()],
            ["rollout_id 'r' is given twice", "positions 0 and 2", "Rename"],
        ),
        (
            [make(), make(rollout_id="s", old_logprobs=[0, 0, -1, -1])],
            ["Rollout 's' has old_logprobs and rollout 'r' has not", "two batches"],
        ),
        (
            [make(reference_logprobs=[0, 0, -1, -1]), make(rollout_id=None)],
            ["Rollout 'r' has reference_logprobs and rollout '1' has not"],
        ),
        ([make(weights=1), make(rollout_id="s")], ["Rollout 'r' has weights and rollout 's' has"]),
        ([make(returns=1), make(rollout_id="s")], ["Rollout 'r' has returns and rollout 's' has"]),
        (
            [make(), make(rollout_id="s", old_values=[0, 0, 1, 1])],
            ["Rollout 's' has old_values and rollout 'r' has not"],
        ),
    ],
)
def test_batch_refuses(rollouts, parts):
    with pytest.raises(RolloutError, match=refusal(*parts)):
        RolloutBatch(rollouts)


def test_check_rollouts_names_what_asks():
    with pytest.raises(RolloutError, match="There are no rollouts; a file takes at least one"):
        check_rollouts([], "a file")


finite_floats = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts_strategy(draw) -> list[Rollout]:
    logprobs, weights = draw(st.booleans()), draw(st.booleans())
    made = []
    for _ in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=8))
        n = len(ids)
        numbers = st.one_of(finite_floats, st.lists(finite_floats, min_size=n, max_size=n))
        made.append(
            Rollout(
                ids,
                [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))],
                draw(numbers),
                old_logprobs=[-draw(st.floats(0, 50)) for _ in ids] if logprobs else None,
                weights=draw(numbers) if weights else None,
                temperature=draw(st.floats(0.01, 10)),
                group_id=draw(st.sampled_from([None, "a", "b"])),
            )
        )
    return made


@given(rollouts_strategy())
def test_every_slice_of_a_batch_is_its_rollout(rollouts):
    batch = RolloutBatch(rollouts)
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == batch.logical_tokens == sum(map(len, rollouts))
    for n, rollout in enumerate(rollouts):
        part = slice(batch.offsets[n], batch.offsets[n + 1])
        size = len(rollout)
        assert np.array_equal(batch.token_ids[part], rollout.token_ids)
        assert np.array_equal(batch.loss_mask[part], rollout.loss_mask)
        advantage = np.broadcast_to(rollout.advantage, size)
        assert np.array_equal(batch.advantages[part], advantage)
        assert (batch.old_logprobs is None) == (rollout.old_logprobs is None)
        if batch.old_logprobs is not None:
            assert np.array_equal(batch.old_logprobs[part], rollout.old_logprobs)
            assert batch.old_logprobs[part][0] == 0
        if batch.weights is not None:
            assert np.array_equal(batch.weights[part], np.broadcast_to(rollout.weights, size))
        assert dataclasses.replace(batch[n], rollout_id=None) == rollout
    groups = batch.groups()
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(batch)))
    for number, group in enumerate(groups):
        assert (batch.group_index[group] == number).all()
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
