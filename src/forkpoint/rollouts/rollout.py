"""One rollout, validated when it is made. Imports no torch.

Every per-token array has the length of `token_ids` and entry i belongs to token i. Arrays are
stored as read-only copies.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.experts import read_routed_experts
from forkpoint.rollouts.fields import (
    MAX_TOKEN_ID,
    as_float,
    host_values,
    is_number,
    named,
    read_identifier,
    read_mask,
    read_temperature,
    read_vector,
    refuse_where,
    short,
)
from forkpoint.rollouts.media import Media, read_media

LARGEST_LOGPROB = 0.125
"""Largest allowed log-prob of a trained token. A log-prob is a logit minus the logarithm of a sum.
Both may be rounded to 16 bits, and bfloat16 numbers from 16 to 32 are 1/8 apart. Values from 0 to
this bound are kept, as trainers keep them in their ratios."""
LOGPROBS_ARE_NEGATIVE = (
    "the logarithm of a probability is at most 0, and rounding to 16 bits adds at most "
    f"{LARGEST_LOGPROB}. Give log-probs rather than probabilities or their negatives."
)
IDS = f"it takes whole numbers from 0 to {MAX_TOKEN_ID}, the ids that the model read"
PER_TOKEN = "one per token, in a one-dimensional list or array"
_NUMBER_OR_FLOATS = (
    "it takes one finite number, or one per token. Look for a division by 0 or for text in the "
    "code that computes it."
)
_FINITE = "Its number must be finite; look for a division by 0 in the code that computes it."
_FINITE_LOGPROB = (
    "The log-prob of a token that was sampled is finite; compute it again, as policy.score(batch) "
    "does, or set loss_mask to 0 at that token."
)


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Rollout:
    """Prompt and response of one sample, with the inputs of the loss.

    T is the number of tokens. Per-token values may be lists, tuples, numpy arrays or torch tensors
    of any real dtype (bfloat16 and float8 too), on any device. The rollout stores read-only copies
    of the types below.

    Floats of tokens outside the loss mask are not read. NaN, infinite numbers, and None in a list
    are accepted there and stored as 0. Finite numbers are stored unchanged. For trained tokens,
    None in a list is refused.

    Attributes:
        token_ids: int64 [T], T >= 1. Prompt and response, without padding.
        loss_mask: bool [T], from booleans or numbers 0 and 1. True for trained tokens. It must be
            False for token 0, because no earlier token predicts it.
        advantage: a float, or float64 [T]. A single number of a rollout without trained tokens may
            be NaN or infinite; it is stored as 0. The same holds for weights and returns.
        old_logprobs: float64 [T] or None; natural logarithms of the probability of token i given
            the tokens before it, under the policy that sampled. At trained tokens they must be
            finite and at most 1/8, because rounding to 16 bits can raise a log-prob above 0. Entry
            0 is stored as 0.
        reference_logprobs: the same under the reference policy.
        weights: a float, float64 [T], or None; factors on the loss terms of tokens, such as
            importance weights.
        returns: a float, float64 [T], or None; targets for the values of a critic.
        old_values: float64 [T] or None; values of the critic before its update.
        temperature: sampling temperature, finite and above 0.
        group_id, rollout_id: text or None. Whole numbers are stored as text.
        extras: a dict with anything, or None. forkpoint does not read it.
        routed_experts: int16 [T, L, K] or None; the K experts that the sampler sent token i to, in
            each of the L layers with a router. Steps send the token to the same experts. The shape
            [T - 1, L, K] leaves out the last token, which samplers do not run; its entries are
            stored as -1. If all K entries are -1, the router chooses.
        media: images and videos, in the order of their tokens. A medium that appears at several
            places is listed once for each place.
        media_types: int8 [T], or None without media: 0 for text, 1 for placeholder tokens of
            images, 2 for those of videos. Placeholder tokens must not be trained. If no rollout of
            a batch has media and all have media_types, placeholder tokens run as text, as in the
            model's own forward.

    Raises:
        RolloutError: a value is not allowed. The message names the rollout, the field, the value
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
    media: tuple[Media, ...]
    media_types: NDArray[np.int8] | None

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
        media: Sequence[Media] = (),
        media_types: ArrayLike | None = None,
    ) -> None:
        rollout_id = read_identifier("A rollout", "rollout_id", rollout_id)
        who = "A rollout without rollout_id" if rollout_id is None else named(rollout_id)
        if advantage is None:
            raise RolloutError(f"{who}: advantage is None; {_NUMBER_OR_FLOATS}")
        if extras is not None and not isinstance(extras, dict):
            raise RolloutError(f"{who}: extras is {short(extras)}; it takes a dict or None.")
        reader = _Reader(who, token_ids, loss_mask)
        media, types = read_media(who, media, media_types, reader.loss_mask)
        store(
            self,
            token_ids=reader.token_ids,
            loss_mask=reader.loss_mask,
            advantage=reader.number_or_floats("advantage", advantage),
            old_logprobs=reader.logprobs("old_logprobs", old_logprobs),
            reference_logprobs=reader.logprobs("reference_logprobs", reference_logprobs),
            weights=reader.number_or_floats("weights", weights),
            returns=reader.number_or_floats("returns", returns),
            old_values=reader.floats("old_values", old_values),
            temperature=read_temperature(who, temperature),
            group_id=read_identifier(who, "group_id", group_id),
            rollout_id=rollout_id,
            extras=extras,
            routed_experts=None
            if routed_experts is None
            else read_routed_experts(who, routed_experts, len(reader.token_ids)),
            media=media,
            media_types=types,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        pairs = ((getattr(self, x.name), getattr(other, x.name)) for x in fields(self))
        return all(
            type(one) is type(two) and np.array_equal(one, two)
            if isinstance(one, np.ndarray) or isinstance(two, np.ndarray)
            else one == two
            for one, two in pairs
        )

    def __setstate__(self, state: list[Any]) -> None:
        restore(self, state)

    def __repr__(self) -> str:
        return (
            f"Rollout(rollout_id={short(self.rollout_id)}, group_id={short(self.group_id)}, "
            f"{len(self)} tokens, {np.count_nonzero(self.loss_mask)} trained)"
        )


def store(target: object, **attributes: Any) -> None:
    """Set attributes of a frozen object. Arrays become read-only."""
    for name, value in attributes.items():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        object.__setattr__(target, name, value)


def restore(target: Any, state: list[Any]) -> None:
    """Set the fields of a frozen dataclass from its pickled state. Pickles and deep copies of
    arrays are not read-only by themselves."""
    store(target, **{field.name: value for field, value in zip(fields(target), state, strict=True)})


def with_id(rollout: Rollout, rollout_id: str) -> Rollout:
    """The same rollout with an id. Its arrays, which are read-only, are shared and not checked
    again."""
    found = copy(rollout)
    store(found, rollout_id=rollout_id)
    return found


class _Reader:
    """Reads and validates the per-token fields of one rollout. `who`: its name in errors."""

    def __init__(self, who: str, token_ids: Any, loss_mask: Any) -> None:
        self.who = who
        ids = read_vector(who, "token_ids", token_ids, "iu", f"{IDS}, {PER_TOKEN}.")
        if not ids.size:
            raise RolloutError(
                f"{who}: token_ids is empty; a rollout has at least one token. Leave this rollout "
                "out."
            )
        refuse_where(who, "token_ids", (ids < 0) | (ids > MAX_TOKEN_ID), ids, f"; {IDS}.")
        self.token_ids = ids.astype(np.int64)

        takes = f"it takes 0 and 1, or booleans: 1 where the token is trained, {PER_TOKEN}."
        self.loss_mask = read_mask(who, "loss_mask", loss_mask, takes)
        self._check_length("loss_mask", self.loss_mask)
        if self.loss_mask[0]:
            raise RolloutError(
                f"{who}: loss_mask[0] is 1, but no earlier token predicts token 0. Set it to 0, or "
                "put the prompt (at least a start token) before the trained tokens."
            )

    def floats(self, field: str, values: Any, advice: str = _FINITE) -> NDArray[np.float64] | None:
        """Read one number per token: float64 [T], or None."""
        if values is None:
            return None
        takes = f"it takes numbers, {PER_TOKEN}."
        floats = read_vector(self.who, field, values, "iuf", takes, missing=True)
        self._check_length(field, floats)
        floats = floats.astype(np.float64)
        finite = np.isfinite(floats)
        if not finite.all():
            shown = values if isinstance(values, list | tuple) else floats  # None is NaN in floats
            rule = f", and this token is trained. {advice}"
            refuse_where(self.who, field, self.loss_mask & ~finite, shown, rule)
            floats[~finite] = 0.0
        return floats

    def logprobs(self, field: str, values: Any) -> NDArray[np.float64] | None:
        """Read log-probs: float64 [T], 0 at the first token; or None."""
        logprobs = self.floats(field, values, _FINITE_LOGPROB)
        if logprobs is not None:
            logprobs[0] = 0.0
            above = self.loss_mask & (logprobs > LARGEST_LOGPROB)
            refuse_where(self.who, field, above, logprobs, f"; {LOGPROBS_ARE_NEGATIVE}")
        return logprobs

    def number_or_floats(self, field: str, values: Any) -> float | NDArray[np.float64] | None:
        """Read one number, or float64 [T]; or None."""
        if values is None:
            return None
        values = host_values(self.who, field, values)
        if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim):
            return self.floats(field, values)
        if isinstance(values, np.ndarray):
            values = values.item()
        finite = is_number(values) and math.isfinite(as_float(values))
        if not is_number(values) or not (finite or not self.loss_mask.any()):
            raise RolloutError(f"{self.who}: {field} is {short(values)}; {_NUMBER_OR_FLOATS}")
        return float(values) if finite else 0.0

    def _check_length(self, field: str, vector: NDArray[Any]) -> None:
        if len(vector) != len(self.token_ids):
            raise RolloutError(
                f"{self.who}: {field} has {len(vector)} entries, but token_ids has "
                f"{len(self.token_ids)}. Every per-token field has one entry per token, and it "
                "belongs to that token. Use 0 for tokens without a value, such as the prompt."
            )
