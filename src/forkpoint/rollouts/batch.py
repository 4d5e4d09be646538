"""Batches of rollouts. Imports no torch."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts import from_tensors
from forkpoint.rollouts.experts import route_index
from forkpoint.rollouts.fields import MAX_TOKEN_ID as MAX_TOKEN_ID
from forkpoint.rollouts.fields import named, read_vector
from forkpoint.rollouts.fields import short as short
from forkpoint.rollouts.from_tensors import BatchFields, Made
from forkpoint.rollouts.groups import check_unique, fill_ids, group_index, prompt_lengths
from forkpoint.rollouts.groups import group_of as group_of
from forkpoint.rollouts.layout import PaddedLayout as PaddedLayout
from forkpoint.rollouts.media import Media, ShownMedia, media_columns, share_index
from forkpoint.rollouts.rollout import Rollout as Rollout
from forkpoint.rollouts.rollout import restore, store, with_id

_OPTIONAL = ("old_logprobs", "reference_logprobs", "weights", "returns", "old_values")
"""Fields of floats that either all rollouts of a batch have, or none."""
_ONE_PER_ROLLOUT = ("advantages", "weights", "returns")
"""Fields for which `with_` also takes one number per rollout."""


@dataclass(frozen=True, slots=True, weakref_slot=True, init=False, eq=False, repr=False)
class RolloutBatch:
    """Rollouts as ragged flat arrays: the tokens of rollout n are `offsets[n] : offsets[n + 1]`.

    N is the number of rollouts, T that of all their tokens, G that of groups. All arrays are
    read-only.

    Attributes:
        token_ids: int64 [T].
        offsets: int64 [N + 1], the first token of each rollout, then T.
        loss_mask: bool [T].
        advantages: float64 [T]. A single number of a rollout is repeated over its tokens.
        old_logprobs, reference_logprobs, weights, returns, old_values: float64 [T], or None if no
            rollout has them. Log-probs of first tokens are 0.
        temperatures: float64 [N].
        group_index: int64 [N], groups 0 .. G - 1 in order of first appearance. Rollouts without a
            group_id form a group if their prompts and media are equal. A prompt is the tokens
            before the first trained one, or all tokens if none is trained.
        group_ids: N texts or None. Completions and responses without one get a text that is equal
            for equal prompts.
        rollout_ids: N different texts.
        extras: N dicts or None.
        routed_experts: int16 [T, L, K], or None if no rollout has them.
        route_index: int64 [T], equal for tokens with the same experts in all layers, in any order;
            None without routed_experts.
        media: the distinct images and videos of all rollouts.
        media_of: int64 [T], index into `media` for placeholder tokens, -1 for text; None without
            media.
        media_row: int64 [T], position of a placeholder token within its medium; None without media.
        share_index: int64 [T], equal for tokens with the same experts and media; None without both.
            Rollouts share tokens up to the first with another id or another share_index.
        has_advantages: False if the batch was made from tensors without advantages. They are then
            0, and losses that use advantages refuse the batch.
        rollouts: N `Rollout`s. A rollout without rollout_id gets its position as text.
        layout: cells of the tensors [N, W] that the batch was made from, for `to_padded`. For
            rollouts and jagged tensors it is padded on the right.
        completion_layout: cells of the tensors [N, C] of the completions, for `to_completions`;
            None if the batch was not made from separate completions.

    `from_padded`, `from_completions` and `from_jagged` make a batch from tensors.

    In a step of several ranks, a rank without rollouts passes `RolloutBatch([])`. Other uses of an
    empty batch are refused.

    Raises:
        RolloutError: an item is not a Rollout, a rollout_id appears twice, a field is missing in
            some rollouts, or routed_experts have different numbers of layers or experts.
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
    media: tuple[Media, ...]
    media_of: NDArray[np.int64] | None
    media_row: NDArray[np.int64] | None
    share_index: NDArray[np.int64] | None
    rollouts: tuple[Rollout, ...]

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        given = check_rollouts(rollouts, "a batch", least=0)
        rollout_ids = fill_ids([rollout.rollout_id for rollout in given])
        rollouts = tuple(
            rollout if rollout.rollout_id is not None else with_id(rollout, name)
            for rollout, name in zip(given, rollout_ids, strict=True)
        )
        token_ids = np.concatenate([np.zeros(0, np.int64), *(r.token_ids for r in rollouts)])
        loss_mask = np.concatenate([np.zeros(0, np.bool_), *(r.loss_mask for r in rollouts)])
        layout = PaddedLayout.of_lengths(map(len, rollouts))
        group_ids = tuple(rollout.group_id for rollout in rollouts)
        prompts = prompt_lengths(loss_mask, layout.offsets)
        experts = _experts(rollouts)
        routes = None if experts is None else route_index(experts)
        media, media_of, media_row = (), None, None
        if any(rollout.media for rollout in rollouts):
            types = [rollout.media_types for rollout in rollouts]
            columns = media_columns([r.media for r in rollouts], types, layout.offsets)
            media, media_of, media_row = columns
        store(
            self,
            token_ids=token_ids,
            offsets=layout.offsets,
            loss_mask=loss_mask,
            advantages=_column(rollouts, "advantage") if rollouts else np.zeros(0),
            **{name: _column(rollouts, name) for name in _OPTIONAL},
            temperatures=np.array([rollout.temperature for rollout in rollouts]),
            group_index=group_index(group_ids, _keys(token_ids, media_of), layout.offsets, prompts),
            group_ids=group_ids,
            rollout_ids=rollout_ids,
            extras=tuple(rollout.extras for rollout in rollouts),
            has_advantages=True,
            rollouts=rollouts,
            layout=layout,
            completion_layout=None,
            routed_experts=experts,
            route_index=routes,
            media=media,
            media_of=media_of,
            media_row=media_row,
            share_index=share_index(routes, media_of),
        )

    def __setstate__(self, state: list[Any]) -> None:
        restore(self, state)

    def __len__(self) -> int:
        return len(self.rollout_ids)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __getitem__(self, index: int) -> Rollout:
        """Rollout `index`, with its rollout_id in this batch."""
        return self.rollouts[index]

    def shown(self, rollouts: Sequence[int]) -> ShownMedia | None:
        """The media of rollouts of equal length, as rows of a dense forward; None without media."""
        found = [self[index] for index in rollouts]
        if not any(rollout.media for rollout in found):
            return None
        types = [np.zeros(len(r)) if r.media_types is None else r.media_types for r in found]
        return ShownMedia(tuple(r.media for r in found), np.stack(types).astype(np.int64))

    def __repr__(self) -> str:
        return (
            f"RolloutBatch({len(self)} rollouts, {self.group_index.max(initial=-1) + 1} groups, "
            f"{self.logical_tokens} tokens, {self.trained_tokens} trained)"
        )

    @classmethod
    def _of(cls, made: Made) -> Self:
        batch = cls(made.rollouts)
        store(
            batch,
            has_advantages=made.has_advantages,
            layout=made.layout,
            completion_layout=made.completion_layout,
        )
        return batch

    @classmethod
    def from_padded(
        cls,
        input_ids: ArrayLike,
        attention_mask: ArrayLike,
        loss_mask: ArrayLike,
        **fields: Unpack[BatchFields],
    ) -> Self:
        """Make a batch from padded tensors [N, W]; a row may have padding on both sides.

        Arguments may be torch tensors on any device, numpy arrays or lists of rows, with the types
        that Rollout accepts. Each tensor is copied to the host once, without its graph. Values at
        padding are not read.

        Args:
            input_ids: [N, W]. Prompts and responses.
            attention_mask: [N, W]; 1 for tokens, 0 for padding. Padding must not be between tokens.
            loss_mask: [N, W]; 1 for trained tokens, 0 for others and for padding.
            fields: advantages, weights and returns, [N, W] or [N]; old_logprobs,
                reference_logprobs and old_values, [N, W]; temperatures, group_ids, rollout_ids and
                extras, [N].

        Raises:
            RolloutError: a value or a shape is not allowed, a row has no token, padding is between
                tokens, or padding is trained.
        """
        return cls._of(from_tensors.from_padded(fields, input_ids, attention_mask, loss_mask))

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
        """Make a batch from prompts [N, P] and completions [N, C], padded separately, as in TRL.

        Args:
            prompt_ids: [N, P]. A prompt is repeated for each of its completions.
            prompt_mask: [N, P]; 1 for tokens.
            completion_ids: [N, C].
            completion_mask: [N, C]; 1 for tokens, including those of tools. A completion without
                tokens becomes a rollout of its prompt that trains nothing.
            loss_mask: [N, C]; 1 for trained tokens. The default trains all tokens of completions.
            tool_mask: [N, C], instead of loss_mask; 0 for tokens of tools. It is not read at
                padding, where TRL has 1.
            fields: as in `from_padded`, with per-token fields [N, C]. Entries of prompts are 0 in
                the batch. Rollouts with equal prompts form a group unless they have a group_id.

        Raises:
            RolloutError: as in `from_padded`, or both loss_mask and tool_mask are given.
        """
        ids = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        return cls._of(from_tensors.from_completions(fields, *ids, loss_mask, tool_mask))

    @classmethod
    def from_jagged(
        cls,
        input_ids: Any,
        loss_mask: Any,
        *,
        response_lengths: ArrayLike | None = None,
        **fields: Unpack[BatchFields],
    ) -> Self:
        """Make a batch from rows of different lengths without padding: nested tensors, as in verl.

        Args:
            input_ids: prompts and responses: a nested tensor [N, j] of either layout, or a list of
                N rows, such as `flat.split(lengths)`.
            loss_mask: rows as long as those of input_ids; 1 for trained tokens.
            response_lengths: [N], numbers of tokens of the responses, which end the rows. Set it if
                loss_mask and the other per-token fields cover the responses only, as verl's
                `response_mask` does. For verl's nested responses, pass
                `responses.offsets().diff()`. Groups are then formed as in `from_completions`.
            fields: as in `from_padded`. Per-token fields are nested tensors or lists of N rows.

        Raises:
            RolloutError: as in `from_padded`, or lengths do not fit.
        """
        return cls._of(from_tensors.from_jagged(fields, input_ids, loss_mask, response_lengths))

    def to_padded(self, values: Any, *, fill: float = 0) -> Any:
        """Arrange per-token values like the tensors that the batch was made from: [N, W].

        For `from_completions` W is P + C: prompts, then completions, as in
        `torch.cat([prompt_ids, completion_ids], 1)`. Rollouts and jagged tensors are padded on the
        right to the longest rollout.

        Args:
            values: [T] or [T, ...], one entry per token of the batch, such as `scores.logprobs`: a
                torch tensor, a numpy array or a list.
            fill: value at padding.

        Returns:
            [N, W, ...] of the same dtype: a torch tensor on the same device, with a graph to
            `values`, or a numpy array.

        Raises:
            RolloutError: the values have another length.
            ConfigError: the values' dtype cannot hold `fill`.
        """
        return self.layout.pad(values, fill)

    def to_completions(self, values: Any, *, fill: float = 0) -> Any:
        """Arrange per-token values like the tensors of the completions: [N, C].

        Values of prompts are left out. For `from_jagged` with `response_lengths`, responses are
        padded on the right. Arguments and result are as in `to_padded`.

        Raises:
            RolloutError: as in `to_padded`, or the batch has no separate completions.
        """
        if self.completion_layout is None:
            raise RolloutError(
                "The batch has no separate completions: it was not made by from_completions, or by "
                "from_jagged with response_lengths. Use to_padded."
            )
        return self.completion_layout.pad(values, fill)

    @property
    def token_keys(self) -> NDArray[np.int64]:
        """int64 [T], equal for tokens with the same id and the same medium."""
        return _keys(self.token_ids, self.media_of)

    def content(self, begin: int, end: int) -> bytes:
        """Bytes that are equal for equal tokens with equal media, also between processes.

        begin, end: positions in the batch's flat tokens.
        """
        tokens = self.token_ids[begin:end].tobytes()
        if self.media_of is None or self.media_row is None:
            return tokens
        of, rows = self.media_of[begin:end], self.media_row[begin:end]
        numbers, firsts = np.unique(of, return_index=True)
        # Indices of media are valid only in this batch.
        order = numbers[np.argsort(firsts)]
        named = [self.media[n].digest for n in order.tolist() if n >= 0]
        if not named:
            return tokens
        place = np.full(len(self.media) + 1, -1, np.int64)
        place[order] = np.arange(len(order))
        return tokens + repr(named).encode() + place[of].tobytes() + rows.tobytes()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each rollout, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Number of tokens before the first trained one of each rollout, or of all its tokens if
        none is trained: int64 [N]."""
        return prompt_lengths(self.loss_mask, self.offsets)

    @property
    def logical_tokens(self) -> int:
        """Number of tokens of all rollouts: T."""
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    def select(self, indices: Iterable[int]) -> "RolloutBatch":
        """Make a batch of the rollouts at `indices`, in that order. Ids and layout are kept.

        Raises IndexError for an index outside the batch, and RolloutError for a repeated index and
        for a mask.
        """
        given = list(indices)
        kinds = {str(getattr(index, "dtype", type(index).__name__)) for index in given}
        if kinds & {"bool", "torch.bool"}:  # operator.index takes them as 0 and 1
            raise RolloutError(
                "select takes indices, and these are booleans. Give the positions of a mask, as "
                "np.flatnonzero(mask) has them."
            )
        chosen = [operator.index(index) for index in given]
        outside = [index for index in chosen if not -len(self) <= index < len(self)]
        if outside:
            raise IndexError(
                f"select was given the index {short(outside[0])}, and the batch has {len(self)} "
                "rollouts."
            )
        completions = self.completion_layout
        made = Made(
            [self.rollouts[index] for index in chosen],
            self.layout.select(chosen),
            None if completions is None else completions.select(chosen),
            self.has_advantages,
        )
        return self._of(made)

    def with_(self, **fields: ArrayLike | None) -> "RolloutBatch":
        """Make a batch with other values of some fields. Ids and layout are kept.

            batch = batch.with_(reference_logprobs=policy.score(batch).logprobs)

        Args:
            fields: advantages, old_logprobs, reference_logprobs, weights, returns and old_values:
                [T], one entry per token of the batch, such as `scores.logprobs`. Advantages,
                weights and returns may also be [N]. Values may be torch tensors on any device,
                numpy arrays or lists. None removes a field.

        Raises:
            RolloutError: a value has another shape, or is not allowed in a Rollout.
            TypeError: a field does not exist.
        """
        if unknown := fields.keys() - {"advantages", *_OPTIONAL}:
            takes = ", ".join(("advantages", *_OPTIONAL))
            raise TypeError(f"with_ takes no field {min(unknown)}; it takes {takes}.")
        changes: list[dict[str, Any]] = [{} for _ in self.rollouts]
        for name, values in fields.items():
            own = "advantage" if name == "advantages" else name
            for change, part in zip(changes, self._parts(name, values), strict=True):
                change[own] = part
        return self._changed(changes, has_advantages=self.has_advantages or "advantages" in fields)

    def with_media(
        self, media: Sequence[tuple[Media, ...]], media_types: ArrayLike
    ) -> "RolloutBatch":
        """Make a batch of the same rollouts with images and videos. Ids and layout are kept.

        Args:
            media: N tuples, the media of each rollout.
            media_types: [T], one entry per token of the batch: 0 for text, 1 for placeholder tokens
                of images, 2 for those of videos.

        Raises:
            RolloutError: media do not fit the tokens.
        """
        if len(media) != len(self):
            raise RolloutError(
                f"media has {len(media)} entries, and the batch has {len(self)} rollouts; it takes "
                "a tuple for each."
            )
        parts = zip(media, self._parts("media_types", media_types), strict=True)
        changes = [{"media": own, "media_types": types} for own, types in parts]
        return self._changed(changes, has_advantages=self.has_advantages)

    def _changed(
        self, changes: Iterable[dict[str, Any]], *, has_advantages: bool
    ) -> "RolloutBatch":
        pairs = zip(self.rollouts, changes, strict=True)
        rollouts = [replace(rollout, **change) for rollout, change in pairs]
        return self._of(Made(rollouts, self.layout, self.completion_layout, has_advantages))

    def _parts(self, name: str, values: ArrayLike | None) -> Sequence[Any]:
        """The values of a field: N arrays or numbers."""
        if values is None:
            return [None] * len(self)
        takes = "it takes a flat list, array or tensor of numbers."
        read = read_vector("The batch", name, values, "iuf", takes, missing=True)
        if len(read) == self.logical_tokens:
            return np.split(read, self.offsets[1:-1])[: len(self)]
        if len(read) == len(self) and name in _ONE_PER_ROLLOUT:
            return read.tolist()
        or_rollouts = f" or {len(self)} rollouts" if name in _ONE_PER_ROLLOUT else ""
        raise RolloutError(
            f"{name} has {len(read)} entries, and the batch has {self.logical_tokens} "
            f"tokens{or_rollouts}. Give one number per token, rollout after rollout, as "
            "policy.score(batch).logprobs has them."
        )

    def groups(self) -> list[NDArray[np.int64]]:
        """Indices of the rollouts of each group: int64, ascending. Groups are in order of first
        appearance."""
        by_group = np.argsort(self.group_index, kind="stable")
        return np.split(by_group, np.cumsum(np.bincount(self.group_index))[:-1])

    def where_all_trained(self, condition_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether all trained tokens of a rollout meet a condition: bool [N].

        It is True for a rollout without trained tokens. `condition_T` is bool [T].
        """
        missed_T = self.loss_mask & np.logical_not(condition_T)
        return np.logical_not(np.logical_or.reduceat(missed_T, self.offsets[:-1]))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RolloutError, naming the first, for token ids that are not below `vocab_size`."""
        outside = self.token_ids >= vocab_size
        if outside.any():
            flat = int(outside.argmax())
            index = int(np.searchsorted(self.offsets, flat, side="right")) - 1
            raise RolloutError(
                f"{named(self.rollout_ids[index])}: token_ids[{flat - self.offsets[index]}] is "
                f"{self.token_ids[flat]}, but the vocabulary has {vocab_size} entries (ids from 0 "
                f"to {vocab_size - 1}). Use the model whose tokenizer made these rollouts."
            )


def check_rollouts(given: Iterable[Rollout], what: str, *, least: int = 1) -> list[Rollout]:
    """Return the rollouts as a list, after checking them.

    Args:
        given: the rollouts.
        what: the object that takes them, for messages, such as "a batch".
        least: smallest number of rollouts.

    Raises:
        RolloutError: there are too few rollouts, an item is not a Rollout, or two rollout_ids are
            equal. The message has the value and its position.
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


def _keys(token_ids: NDArray[np.int64], media_of: NDArray[np.int64] | None) -> NDArray[np.int64]:
    return token_ids if media_of is None else ((media_of + 1) << 32) | token_ids


def _of_all(rollouts: Sequence[Rollout], field: str) -> list[Any] | None:
    """Values of a field, one for each rollout; None if no rollout has it. Raises RolloutError if
    only some have it."""
    values = [getattr(rollout, field) for rollout in rollouts]
    without = [value is None for value in values]
    if all(without):
        return None
    if any(without):
        has, has_not = (rollouts[without.index(lacks)].rollout_id for lacks in (False, True))
        raise RolloutError(
            f"Rollout {short(has)} has {field} and rollout {short(has_not)} does not; in a batch "
            "all rollouts or none must have it. Add the missing values, or make two batches."
        )
    return values


def _column(rollouts: Sequence[Rollout], field: str) -> NDArray[np.float64] | None:
    """Values of a field, one for each token: float64 [T]; None if no rollout has it."""
    values = _of_all(rollouts, field)
    if values is None:
        return None
    pairs = zip(values, rollouts, strict=True)
    return np.concatenate([np.broadcast_to(value, len(rollout)) for value, rollout in pairs])


def _experts(rollouts: Sequence[Rollout]) -> NDArray[np.int16] | None:
    """routed_experts of all rollouts: int16 [T, L, K]; None if no rollout has them."""
    values = _of_all(rollouts, "routed_experts")
    if values is None:
        return None
    for rollout, experts in zip(rollouts, values, strict=True):
        if experts.shape[1:] != values[0].shape[1:]:
            raise RolloutError(
                f"routed_experts of rollout {short(rollouts[0].rollout_id)} have shape "
                f"{values[0].shape}, and those of rollout {short(rollout.rollout_id)} "
                f"{experts.shape}; all but the first size must be equal. Make two batches."
            )
    return np.concatenate(values)
