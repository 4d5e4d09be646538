"""Rollouts and batches of them, validated at the door. Imports no torch.

Every per-token array has the length of `token_ids` and entry i belongs to token i. All arrays that
are stored are read-only copies, so that what was validated here stays true later.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors import PaddedLayout as PaddedLayout
from forkpoint.rollouts.batch_tensors.cells import (
    IDS,
    NUMBER_OR_FLOATS,
    FloatReader,
    cells_of_one,
    loss_mask_of,
    token_ids_of,
)
from forkpoint.rollouts.batch_tensors.experts import (
    join_routed_experts,
    read_routed_experts,
    route_index,
)
from forkpoint.rollouts.batch_tensors.identifiers import (
    check_unique,
    fill_ids,
    group_index,
    prompt_lengths,
    read_extras,
)
from forkpoint.rollouts.batch_tensors.identifiers import group_of as group_of
from forkpoint.rollouts.batch_tensors.readers import (
    BatchFields,
    read_completions,
    read_jagged,
    read_padded,
)
from forkpoint.rollouts.fields import MAX_TOKEN_ID as MAX_TOKEN_ID
from forkpoint.rollouts.fields import named, read_identifier, read_temperature, read_vector
from forkpoint.rollouts.fields import short as short

_OPTIONAL = ("old_logprobs", "reference_logprobs", "weights", "returns", "old_values")
"""Fields of floats that all rollouts of a batch have, or none."""


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Rollout:
    """The prompt and the response of one sample, with what the loss needs of it.

    T is the number of tokens. Per-token values are given as lists, tuples, numpy arrays or torch
    tensors; tensors may have any real dtype that torch converts (bfloat16 and float8 too), lie on
    any device and require gradients. Copies are stored, read-only and of the types below.

    Floats of tokens outside the loss mask are not read: there NaN, infinite numbers, and None in a
    list, are accepted and stored as 0. Finite ones are stored as given. In a list None elsewhere
    is refused.

    Attributes:
        token_ids: int64 [T], T >= 1. Prompt and response, without padding. Given as integers.
        loss_mask: bool [T]; given as booleans, 0 and 1, or 0.0 and 1.0. True for trained tokens;
            False for token 0, which no earlier token predicts.
        advantage: a float, or float64 [T]. A single number that is not finite is accepted, and
            stored as 0, where no token is trained; so are those of weights and returns.
        old_logprobs: float64 [T] or None; natural logarithms, under the policy that sampled, of
            token i given the tokens before it. At trained tokens they are finite and at most 1/8:
            rounding to 16 bits can lift a log-prob above 0, and such a value is stored as given.
            Entry 0 is stored as 0.
        reference_logprobs: the same, under the reference policy.
        weights: a float, float64 [T], or None.
        returns: a float, float64 [T], or None; what a critic's value at token i is trained towards.
        old_values: float64 [T] or None; the critic's values when it made the advantages.
        temperature: the sampling temperature, finite and above 0.
        group_id, rollout_id: text or None; whole numbers are accepted and stored as text.
        extras: a dict of anything, carried through untouched, or None.
        routed_experts: int16 [T, L, K] or None; the K experts that token i was sent to in each of
            the L layers that have a router, when it was sampled. Steps send it there as well. Given
            as [T - 1, L, K], without the last token, which a sampler does not run, its entries are
            -1. Where all K entries are -1 the router chooses by itself.

    Raises:
        RolloutError: a value is not allowed; the message names the rollout, the field, the value
            and its position.
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
        if advantage is None:
            raise RolloutError(f"{who}: advantage is None; {NUMBER_OR_FLOATS}")
        takes = f"it takes {IDS}, in a one-dimensional list or array, without padding."
        ids = read_vector(who, "token_ids", token_ids, "iu", takes)
        if not ids.size:
            raise RolloutError(
                f"{who}: token_ids is empty; a rollout has at least one token. Leave this rollout "
                "out."
            )
        cells = cells_of_one(who, len(ids))
        ids = token_ids_of(cells, "token_ids", [ids])
        mask = loss_mask_of(cells, "loss_mask", loss_mask)
        reader = FloatReader(cells, mask)

        _store(
            self,
            token_ids=ids,
            loss_mask=mask,
            advantage=_number_or_floats(reader, "advantage", advantage),
            old_logprobs=reader.logprobs("old_logprobs", old_logprobs),
            reference_logprobs=reader.logprobs("reference_logprobs", reference_logprobs),
            weights=_number_or_floats(reader, "weights", weights),
            returns=_number_or_floats(reader, "returns", returns),
            old_values=reader.floats("old_values", old_values),
            temperature=read_temperature(who, temperature),
            group_id=read_identifier(who, "group_id", group_id),
            rollout_id=rollout_id,
            extras=read_extras(who, "extras", extras),
            routed_experts=None
            if routed_experts is None
            else read_routed_experts(who, routed_experts, len(ids)),
        )

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
class RolloutBatch:
    """Rollouts as ragged flat arrays: the tokens of rollout n are `offsets[n] : offsets[n + 1]`.

    N is the number of rollouts, T that of all their tokens, G that of groups. All arrays are
    read-only.

    Attributes:
        token_ids: int64 [T].
        offsets: int64 [N + 1], the starts of the rollouts and T.
        loss_mask: bool [T].
        advantages: float64 [T]; a rollout's single number is repeated over its tokens.
        old_logprobs, reference_logprobs, weights, returns, old_values: float64 [T], or None where
            no rollout has them. The log-probs of first tokens are 0.
        temperatures: float64 [N].
        group_index: int64 [N]; the groups are 0 .. G - 1 in order of first appearance. Rollouts
            without a group_id form one group where their prompts (the tokens before the first
            trained one, or all if none is) are equal.
        group_ids: N times the group_id as given, or None.
        rollout_ids: N texts, all different.
        extras: N dicts or None.
        routed_experts: int16 [T, L, K], or None where no rollout has them.
        route_index: int64 [T], the same number for tokens that are sent to the same experts in all
            layers, whatever their order; None without routed_experts. Rollouts share tokens up to
            where their tokens or their routes part.
        has_advantages: False where the batch was made from tensors without advantages, which are
            then 0; losses that use advantages refuse it.
        layout: the cells of the tensors [N, W] that the batch was made from, which `to_padded`
            fills. Of a batch made from rollouts, or from jagged tensors, it is padded on the right.
        completion_layout: the cells of the completions' tensors [N, C], which `to_completions`
            fills, or None where completions were not given apart.

    `from_padded`, `from_completions` and `from_jagged` make a batch from tensors.

    A batch without rollouts is that of a rank that has none, in a step of several ranks; everything
    else refuses it.

    Raises:
        RolloutError: an item is no rollout, a rollout_id is there twice, only some of the rollouts
            have old_logprobs, reference_logprobs, weights, returns, old_values or routed_experts,
            or routed_experts have different layers or counts.
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
        rollouts = tuple(
            rollout if rollout.rollout_id is not None else replace(rollout, rollout_id=name)
            for rollout, name in zip(given, rollout_ids, strict=True)
        )
        empty = np.zeros(0, np.int64), np.zeros(0, bool)
        token_ids = np.concatenate([empty[0], *(rollout.token_ids for rollout in rollouts)])
        loss_mask = np.concatenate([empty[1], *(rollout.loss_mask for rollout in rollouts)])
        lengths = np.array([len(rollout) for rollout in rollouts], np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        group_ids = tuple(rollout.group_id for rollout in rollouts)
        prompts = prompt_lengths(loss_mask, offsets)
        experts = join_routed_experts(rollout_ids, [each.routed_experts for each in rollouts])
        _store(
            self,
            token_ids=token_ids,
            offsets=offsets,
            loss_mask=loss_mask,
            advantages=_column(rollouts, "advantage") if rollouts else np.zeros(0),
            **{name: _column(rollouts, name) for name in _OPTIONAL},
            temperatures=np.array([rollout.temperature for rollout in rollouts]),
            group_index=group_index(group_ids, token_ids, offsets, prompts),
            group_ids=group_ids,
            rollout_ids=rollout_ids,
            extras=tuple(rollout.extras for rollout in rollouts),
            has_advantages=True,
            layout=PaddedLayout.of_lengths(lengths),
            completion_layout=None,
            routed_experts=experts,
            route_index=None if experts is None else route_index(experts),
            _rollouts=rollouts,
            _numbers={},
        )

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
    def _of_tensors(cls, attributes: dict[str, Any]) -> Self:
        """The batch of these validated arrays; its rollouts are views of them."""
        batch = object.__new__(cls)
        _store(batch, **attributes, _rollouts=None, routed_experts=None, route_index=None)
        return batch

    @classmethod
    def from_padded(
        cls,
        input_ids: ArrayLike,
        attention_mask: ArrayLike,
        loss_mask: ArrayLike,
        **fields: Unpack[BatchFields],
    ) -> Self:
        """A batch of the rows of padded tensors [N, W]; padding may be on both sides of a row.

        Torch tensors of any device, numpy arrays and lists of rows are taken, of the types that
        Rollout takes. A tensor is copied to the host once, without its graph. Values at padding are
        not read, whichever id the padding has.

        Args:
            input_ids: [N, W]. Prompts and responses.
            attention_mask: [N, W]; 1 for tokens, 0 for padding. The tokens of a row are neighbours.
            loss_mask: [N, W]; 1 for trained tokens, 0 for others and for padding.
            fields: the other fields, by the names in `BatchFields`: advantages, old_logprobs,
                reference_logprobs, weights, returns, old_values, temperatures, group_ids,
                rollout_ids, extras. Per-token fields are [N, W].

        Raises:
            RolloutError: a value or a shape is not allowed, a row has no token, padding lies
                between tokens, or padding is trained.
        """
        return cls._of_tensors(read_padded(fields, input_ids, attention_mask, loss_mask))

    @classmethod
    def from_completions(
        cls,
        prompt_ids: ArrayLike,
        prompt_mask: ArrayLike,
        completion_ids: ArrayLike,
        completion_mask: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
        tool_mask: ArrayLike | None = None,
        **fields: Unpack[BatchFields],
    ) -> Self:
        """A batch of prompts [N, P] and completions [N, C], padded separately, as TRL has them.

        Args:
            prompt_ids: [N, P]; prompt n is repeated for each of its completions.
            prompt_mask: [N, P]; 1 for tokens.
            completion_ids: [N, C].
            completion_mask: [N, C]; 1 for tokens, those of tools included. A completion without
                tokens is a rollout of its prompt, with nothing trained.
            loss_mask: [N, C]; 1 for trained tokens. Without it all tokens of completions are
                trained.
            tool_mask: [N, C], instead of loss_mask; 0 for tokens of tools. It is not read at
                padding, where TRL has 1.
            fields: as in `from_padded`. Per-token fields are over the completions, [N, C]; the
                prompts' entries in the batch are 0. Without group_ids equal prompts form a group,
                whatever is trained; where loss masks that begin late would hide that, rollouts get
                group_ids that stand for prompts.

        Raises:
            RolloutError: as in `from_padded`, and where loss_mask and tool_mask are both given.
        """
        ids = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        return cls._of_tensors(read_completions(fields, *ids, loss_mask, tool_mask))

    @classmethod
    def from_jagged(
        cls,
        input_ids: Any,
        loss_mask: Any,
        *,
        offsets: ArrayLike | None = None,
        response_lengths: ArrayLike | None = None,
        **fields: Unpack[BatchFields],
    ) -> Self:
        """A batch of rows of different lengths without padding: nested tensors, as verl has them.

        Args:
            input_ids: prompts and responses: nested, a list of rows, or flat values with `offsets`.
            loss_mask: as long as input_ids; 1 for trained tokens.
            offsets: [N + 1], where input_ids are flat: the starts of the rollouts, and T.
            response_lengths: [N], tokens of the responses, where loss_mask and the other per-token
                fields are over these alone, as verl's `response_mask` is; responses come last. For
                verl's nested responses it is `responses.offsets().diff()`. Groups are then formed
                by prompts as in `from_completions`.
            fields: as in `from_padded`. Per-token fields are nested tensors [N, j] of either
                layout, lists of N rows, or flat values [T], back to back.

        Raises:
            RolloutError: as in `from_padded`, and where lengths do not fit.
        """
        return cls._of_tensors(read_jagged(fields, input_ids, loss_mask, offsets, response_lengths))

    def to_padded(self, values: Any, *, fill: float = 0) -> Any:
        """Per-token values in the cells of the tensors that the batch was made from: [N, W].

        A batch from `from_completions` has W = P + C: prompts, then completions, as in
        `torch.cat([prompt_ids, completion_ids], 1)`. One from rollouts or jagged tensors is padded
        on the right to the longest rollout.

        Args:
            values: [T] over the batch's tokens in their order, such as `scores.logprobs`, or
                [T, ...]; a torch tensor, a numpy array or a list.
            fill: the number at padding, one that the dtype has.

        Returns:
            [N, W, ...] of the same dtype: for a torch tensor one on its device, with a graph to
            it, otherwise a numpy array.

        Raises:
            RolloutError: the values have another length.
            ConfigError: the values' dtype cannot hold `fill`.
        """
        return self.layout.pad(values, fill)

    def to_completions(self, values: Any, *, fill: float = 0) -> Any:
        """Per-token values in the cells of the completions' tensors: [N, C]; else as `to_padded`.

        Values of prompts are left out. Completions of a batch from `from_jagged` are those of
        `response_lengths`, padded on the right.

        Raises:
            RolloutError: also for a batch that was not given its completions separately.
        """
        if self.completion_layout is None:
            raise RolloutError(
                "The batch has no completions apart from prompts: it was not made by "
                "from_completions, or by from_jagged with response_lengths. Use to_padded."
            )
        return self.completion_layout.pad(values, fill)

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
            **{name: floats(name) for name in _OPTIONAL},
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


def _number_or_floats(
    reader: FloatReader, name: str, value: ArrayLike | None
) -> float | NDArray[np.float64] | None:
    """The field of a single rollout: its one number, or float64 [T]."""
    floats = reader.number_or_floats(name, value)
    return reader.numbers[name][0] if name in reader.numbers else floats


def _store(target: object, **attributes: Any) -> None:
    """Set the attributes of a frozen object; its arrays become read-only."""
    for name, value in attributes.items():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        object.__setattr__(target, name, value)


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
