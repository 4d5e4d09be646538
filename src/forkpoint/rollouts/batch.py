"""Rollouts and batches of them, validated at the door. Imports no torch.

Every per-token array has the length of `token_ids` and entry i belongs to token i. All arrays that
are stored are read-only copies, so that what was validated here stays true later.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors import (
    Columns,
    FromTensors,
    check_unique,
    fill_ids,
    group_index,
    prompt_lengths,
)
from forkpoint.rollouts.batch_tensors import PaddedLayout as PaddedLayout
from forkpoint.rollouts.batch_tensors import group_of as group_of
from forkpoint.rollouts.fields import MAX_TOKEN_ID as MAX_TOKEN_ID
from forkpoint.rollouts.fields import (
    named,
    read_floats,
    read_identifier,
    read_logprobs,
    read_loss_mask,
    read_number_or_floats,
    read_routed_experts,
    read_temperature,
    read_token_ids,
)
from forkpoint.rollouts.fields import short as short


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Rollout:
    """The prompt and the response of one sample, with what the loss needs of it.

    T is the number of tokens. Per-token values are given as lists, tuples, numpy arrays or torch
    tensors; tensors may have any real dtype that torch converts (bfloat16 and float8 too), lie on
    any device and require gradients. Copies are stored, read-only and of the types below.

    Floats of tokens outside the loss mask are not read: there NaN, infinite numbers, and None in a
    list, are accepted and stored as 0. Finite ones are stored as given. In a list None elsewhere
    is refused.

    token_ids: int64 [T], T >= 1. Prompt and response, without padding. Given as integers.
    loss_mask: bool [T]; given as booleans, 0 and 1, or 0.0 and 1.0. True for trained tokens; False
        for token 0, which no earlier token predicts.
    advantage: a float, or float64 [T]. A single number that is not finite is accepted, and stored
        as 0, where no token is trained; so are those of weights and returns.
    old_logprobs: float64 [T] or None; natural logarithms, under the policy that sampled, of token i
        given the tokens before it. At trained tokens they are finite and at most 1/8: rounding to
        16 bits can lift a log-prob above 0, and such a value is stored as given. Entry 0 is stored
        as 0.
    reference_logprobs: the same, under the reference policy.
    weights: a float, float64 [T], or None.
    returns: a float, float64 [T], or None; what a critic's value at token i is trained towards.
    old_values: float64 [T] or None; the critic's values when it made the advantages.
    temperature: the sampling temperature, finite and above 0.
    group_id, rollout_id: text or None; whole numbers are accepted and stored as text.
    extras: a dict of anything, carried through untouched, or None.
    routed_experts: int16 [T, L, K] or None; the K experts that token i was sent to in each of the L
        layers that have a router, when it was sampled. Steps send it there as well. Given as
        [T - 1, L, K], without the last token, which a sampler does not run, its entries are -1.
        Where all K entries are -1 the router chooses by itself.

    Raises RolloutError where a value is not allowed; the message names the rollout, the field, the
    value and its position.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    advantage: float | NDArray[np.float64]
    old_logprobs: NDArray[np.float64] | None
    reference_logprobs: NDArray[np.float64] | None
    weights: float | NDArray[np.float64] | None
    returns: float | NDArray[np.float64] | None
    old_values: NDArray[np.float64] | None
    temperature: float
    group_id: str | None
    rollout_id: str | None
    extras: dict[str, Any] | None
    routed_experts: NDArray[np.int16] | None

    def __init__(
        self,
        token_ids: ArrayLike,
        loss_mask: ArrayLike,
        advantage: ArrayLike,
        old_logprobs: ArrayLike | None = None,
        reference_logprobs: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        temperature: float = 1.0,
        group_id: str | int | None = None,
        rollout_id: str | int | None = None,
        extras: dict[str, Any] | None = None,
        returns: ArrayLike | None = None,
        old_values: ArrayLike | None = None,
        routed_experts: ArrayLike | None = None,
    ) -> None:
        rollout_id = read_identifier("A rollout", "rollout_id", rollout_id)
        who = "A rollout without rollout_id" if rollout_id is None else named(rollout_id)
        ids = read_token_ids(who, token_ids)
        mask = read_loss_mask(who, loss_mask, len(ids))
        if extras is not None and not isinstance(extras, dict):
            raise RolloutError(
                f"{who}: extras is {short(extras)}; it takes a dict or None. Put the value into a "
                "dict under a key of its own."
            )

        def optional(read: Callable, field: str, value: Any) -> Any:
            return None if value is None else read(who, field, value, mask)

        values = {
            "token_ids": ids,
            "loss_mask": mask,
            "advantage": read_number_or_floats(who, "advantage", advantage, mask),
            "old_logprobs": optional(read_logprobs, "old_logprobs", old_logprobs),
            "reference_logprobs": optional(read_logprobs, "reference_logprobs", reference_logprobs),
            "weights": optional(read_number_or_floats, "weights", weights),
            "returns": optional(read_number_or_floats, "returns", returns),
            "old_values": optional(read_floats, "old_values", old_values),
            "temperature": read_temperature(who, temperature),
            "group_id": read_identifier(who, "group_id", group_id),
            "rollout_id": rollout_id,
            "extras": extras,
            "routed_experts": None,
        }
        if routed_experts is not None:
            values["routed_experts"] = read_routed_experts(who, routed_experts, len(ids))
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)
        )

    def __repr__(self) -> str:
        return (
            f"Rollout(rollout_id={short(self.rollout_id)}, group_id={short(self.group_id)}, "
            f"{len(self)} tokens, {np.count_nonzero(self.loss_mask)} trained)"
        )


@dataclass(frozen=True, slots=True, weakref_slot=True, init=False, eq=False, repr=False)
class RolloutBatch(FromTensors):
    """Rollouts as ragged flat arrays: the tokens of rollout n are `offsets[n] : offsets[n + 1]`.

    N is the number of rollouts, T that of all their tokens, G that of groups. All arrays are
    read-only.

    token_ids: int64 [T].
    offsets: int64 [N + 1], the starts of the rollouts and T.
    loss_mask: bool [T].
    advantages: float64 [T]; a rollout's single number is repeated over its tokens.
    old_logprobs, reference_logprobs, weights, returns, old_values: float64 [T], or None where no
        rollout has them. The log-probs of first tokens are 0.
    temperatures: float64 [N].
    group_index: int64 [N]; the groups are 0 .. G - 1 in order of first appearance. Rollouts without
        a group_id form one group where their prompts (the tokens before the first trained one, or
        all if none is) are equal.
    group_ids: N times the group_id as given, or None.
    rollout_ids: N texts, all different.
    extras: N dicts or None.
    routed_experts: int16 [T, L, K], or None where no rollout has them.
    route_index: int64 [T], the same number for tokens that are sent to the same experts in all
        layers, whatever their order; None without routed_experts. Rollouts share tokens up to where
        their tokens or their routes part.
    has_advantages: False where the batch was made from tensors without advantages, which are then
        0; losses that use advantages refuse it.
    layout: the cells of the tensors [N, W] that the batch was made from, which `to_padded` fills.
        Of a batch made from rollouts, or from jagged tensors, it is padded on the right.
    completion_layout: the cells of the completions' tensors [N, C], which `to_completions` fills,
        or None where completions were not given apart.

    `from_padded`, `from_completions` and `from_jagged` make a batch from tensors.

    A batch without rollouts is that of a rank that has none, in a step of several ranks; everything
    else refuses it.

    Raises RolloutError for things that are not rollouts, for a rollout_id that is there twice, and
    where only some of the rollouts have old_logprobs, reference_logprobs,
    weights, returns, old_values or routed_experts, or these of different layers or counts.
    """

    token_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float64]
    old_logprobs: NDArray[np.float64] | None
    reference_logprobs: NDArray[np.float64] | None
    weights: NDArray[np.float64] | None
    returns: NDArray[np.float64] | None
    old_values: NDArray[np.float64] | None
    temperatures: NDArray[np.float64]
    group_index: NDArray[np.int64]
    group_ids: tuple[str | None, ...]
    rollout_ids: tuple[str, ...]
    extras: tuple[dict[str, Any] | None, ...]
    has_advantages: bool
    layout: PaddedLayout
    completion_layout: PaddedLayout | None
    routed_experts: NDArray[np.int16] | None
    route_index: NDArray[np.int64] | None
    _rollouts: tuple[Rollout, ...] | None
    _numbers: dict[str, list[float]]

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        given = check_rollouts(rollouts, "a batch", least=0)
        rollout_ids = fill_ids([rollout.rollout_id for rollout in given])
        named = tuple(
            rollout if rollout.rollout_id is not None else replace(rollout, rollout_id=name)
            for rollout, name in zip(given, rollout_ids, strict=True)
        )
        none = np.zeros(0, np.int64), np.zeros(0, bool)
        token_ids = np.concatenate([none[0], *(rollout.token_ids for rollout in named)])
        loss_mask = np.concatenate([none[1], *(rollout.loss_mask for rollout in named)])
        lengths = np.array([len(rollout) for rollout in named], np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        group_ids = tuple(rollout.group_id for rollout in named)
        values = {
            "token_ids": token_ids,
            "offsets": offsets,
            "loss_mask": loss_mask,
            "advantages": _column(named, "advantage") if named else np.zeros(0),
            "old_logprobs": _column(named, "old_logprobs"),
            "reference_logprobs": _column(named, "reference_logprobs"),
            "weights": _column(named, "weights"),
            "returns": _column(named, "returns"),
            "old_values": _column(named, "old_values"),
            "temperatures": np.array([rollout.temperature for rollout in named]),
            "group_index": group_index(
                group_ids, token_ids, offsets, prompt_lengths(loss_mask, offsets)
            ),
            "group_ids": group_ids,
            "rollout_ids": rollout_ids,
            "extras": tuple(rollout.extras for rollout in named),
            "has_advantages": True,
            "layout": PaddedLayout.of_lengths(lengths),
            "completion_layout": None,
            "routed_experts": (routed_experts := _routed_experts(named)),
            "route_index": None if routed_experts is None else _route_index(routed_experts),
            "_rollouts": named,
            "_numbers": {},
        }
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.rollout_ids)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __getitem__(self, index: int) -> Rollout:
        """Rollout `index`, with the rollout_id that it has in this batch."""
        return self.rollouts[index]

    def __repr__(self) -> str:
        return (
            f"RolloutBatch({len(self)} rollouts, {self.group_index.max(initial=-1) + 1} groups, "
            f"{self.logical_tokens} tokens, {self.trained_tokens} trained)"
        )

    @classmethod
    def _of_columns(cls, columns: Columns) -> Self:
        """The batch of these validated arrays; its rollouts are views of them."""
        batch = object.__new__(cls)
        for field in fields(columns):
            name = "_numbers" if field.name == "numbers" else field.name
            object.__setattr__(batch, name, getattr(columns, field.name))
        for name in ("_rollouts", "routed_experts", "route_index"):
            object.__setattr__(batch, name, None)
        return batch

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """N `Rollout`s, each with a rollout_id: one that has none gets its position as text.

        Those of a batch made from tensors are views of its arrays, made when first asked for.
        """
        if self._rollouts is None:
            object.__setattr__(self, "_rollouts", self._views())
        assert self._rollouts is not None
        return self._rollouts

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each rollout, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def logical_tokens(self) -> int:
        """Tokens of all rollouts as given: T."""
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        """Tokens whose loss_mask is 1."""
        return int(np.count_nonzero(self.loss_mask))

    def select(self, indices: Iterable[int]) -> "RolloutBatch":
        """A batch of the rollouts at `indices`, in that order; they keep ids and layout.

        Raises IndexError for an index outside the batch, and RolloutError where one is there twice.
        """
        chosen = [operator.index(index) for index in indices]
        batch = RolloutBatch([self.rollouts[index] for index in chosen])
        object.__setattr__(batch, "has_advantages", self.has_advantages)
        object.__setattr__(batch, "layout", self.layout.select(chosen))
        if self.completion_layout is not None:
            object.__setattr__(batch, "completion_layout", self.completion_layout.select(chosen))
        return batch

    def groups(self) -> list[NDArray[np.int64]]:
        """For each group, in order of first appearance, its rollouts' indices: int64, ascending."""
        by_group = np.argsort(self.group_index, kind="stable")
        return np.split(by_group, np.cumsum(np.bincount(self.group_index))[:-1])

    def where_all_trained(self, condition_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rollouts in which every trained token meets a condition: bool [N].

        A rollout without trained tokens is among them. `condition_T` is bool [T].
        """
        missed = np.concatenate([[0], np.cumsum(self.loss_mask & np.logical_not(condition_T))])
        return missed[self.offsets[1:]] == missed[self.offsets[:-1]]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RolloutError, naming the first, where a token id is not below `vocab_size`."""
        outside = self.token_ids >= vocab_size
        if outside.any():
            flat = int(outside.argmax())
            index = int(np.searchsorted(self.offsets, flat, side="right")) - 1
            raise RolloutError(
                f"{named(self.rollout_ids[index])}: token_ids[{flat - self.offsets[index]}] is "
                f"{self.token_ids[flat]}, but the vocabulary has {vocab_size} entries, so that ids "
                f"go from 0 to {vocab_size - 1}. Use the model whose tokenizer made these rollouts."
            )

    def _views(self) -> tuple[Rollout, ...]:
        """The rollouts, without copies and without validating them again."""
        bounds = self.offsets.tolist()

        def split(values: NDArray[Any]) -> list[Any]:
            return [values[begin:end] for begin, end in pairwise(bounds)]

        def floats(name: str) -> Sequence[Any]:
            values = getattr(self, name)
            if values is None:
                return [None] * len(self)
            return self._numbers[name] if name in self._numbers else split(values)

        values: dict[str, Sequence[Any]] = {
            "token_ids": split(self.token_ids),
            "loss_mask": split(self.loss_mask),
            "advantage": floats("advantages"),
            "old_logprobs": floats("old_logprobs"),
            "reference_logprobs": floats("reference_logprobs"),
            "weights": floats("weights"),
            "returns": floats("returns"),
            "old_values": floats("old_values"),
            "temperature": self.temperatures.tolist(),
            "group_id": self.group_ids,
            "rollout_id": self.rollout_ids,
            "extras": self.extras,
            "routed_experts": [None] * len(self),
        }
        made = tuple(object.__new__(Rollout) for _ in range(len(self)))
        for name, of_rollouts in values.items():
            for rollout, value in zip(made, of_rollouts, strict=True):
                object.__setattr__(rollout, name, value)
        return made


def check_rollouts(given: Iterable[Rollout], what: str, *, least: int = 1) -> list[Rollout]:
    """The rollouts; refuses, for `what` (such as "a batch"), none, other things, and equal ids.

    `least` is 0 where there may be none.

    Raises RolloutError, naming the value and its position.
    """
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise RolloutError(
            f"The rollouts are {short(given)} of type {type(given).__name__}; {what} takes a list "
            "of Rollout objects. Put a single one into a list; load_rollouts(path) reads a file."
        )
    rollouts = list(given)
    if len(rollouts) < least:
        raise RolloutError(f"There are no rollouts; {what} takes at least one.")
    for position, rollout in enumerate(rollouts):
        if not isinstance(rollout, Rollout):
            raise RolloutError(
                f"Item {position} is {short(rollout)} of type {type(rollout).__name__}; {what} "
                "takes Rollout objects. Make them with Rollout(...) or load_rollouts(path)."
            )
    check_unique([rollout.rollout_id for rollout in rollouts], what)
    return rollouts


def _routed_experts(rollouts: Sequence[Rollout]) -> NDArray[np.int16] | None:
    """int16 [T, L, K] of all rollouts; None where none has them."""
    given = [rollout.routed_experts for rollout in rollouts]
    has = [rollout for rollout in rollouts if rollout.routed_experts is not None]
    if not has:
        return None
    first = has[0]
    for rollout, experts in zip(rollouts, given, strict=True):
        if experts is None:
            raise RolloutError(
                f"Rollout {short(first.rollout_id)} has routed_experts and rollout "
                f"{short(rollout.rollout_id)} has not; a batch needs it of all of its rollouts or "
                "of none. Add what is missing, as -1 where routers choose, or make two batches."
            )
        assert first.routed_experts is not None
        wanted, found = first.routed_experts.shape[1:], experts.shape[1:]
        if found != wanted:
            raise RolloutError(
                f"routed_experts of rollout {short(first.rollout_id)} are of {wanted[0]} layers "
                f"with {wanted[1]} experts a token, and those of rollout "
                f"{short(rollout.rollout_id)} of {found[0]} with {found[1]}; all rollouts are "
                "routed by one model. Make two batches."
            )
    return np.concatenate([experts for experts in given if experts is not None])


def _route_index(experts_TLK: NDArray[np.int16]) -> NDArray[np.int64]:
    """int64 [T], equal where a token's experts are, whatever their order."""
    ordered = np.ascontiguousarray(np.sort(experts_TLK, axis=-1))
    rows = ordered.reshape(len(ordered), -1).view(f"V{ordered[0].nbytes}")[:, 0]
    return np.unique(rows, return_inverse=True)[1].astype(np.int64)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    return one == other


def _column(rollouts: Sequence[Rollout], field: str) -> NDArray[np.float64] | None:
    """`field` of all rollouts, flat over their tokens: float64 [T]; None where none has it."""
    values = [getattr(rollout, field) for rollout in rollouts]
    without = [value is None for value in values]
    if all(without):
        return None
    if any(without):
        has, has_not = (rollouts[without.index(lacks)].rollout_id for lacks in (False, True))
        raise RolloutError(
            f"Rollout {short(has)} has {field} and rollout {short(has_not)} has not; a batch needs "
            "it of all of its rollouts or of none. Add what is missing, or make two batches."
        )
    return np.concatenate(
        [
            np.broadcast_to(value, len(rollout))
            for value, rollout in zip(values, rollouts, strict=True)
        ]
    )
