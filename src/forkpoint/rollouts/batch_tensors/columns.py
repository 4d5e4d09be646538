"""The flat arrays of a batch, made from per-token fields and validated all at once."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.cells import Cells, shown
from forkpoint.rollouts.batch_tensors.identifiers import (
    group_index,
    groups_of_given_prompts,
    prompt_lengths,
    read_extras,
    read_ids,
)
from forkpoint.rollouts.batch_tensors.layout import PaddedLayout
from forkpoint.rollouts.batch_tensors.rows import WHO, dimensions, on_host, shape_text
from forkpoint.rollouts.fields import (
    FINITE,
    FINITE_LOGPROB,
    NUMBER_OR_FLOATS,
    check_logprobs,
    clear_untrained,
    is_number,
    named,
    read_temperature,
    read_vector,
    short,
)


@dataclass(kw_only=True, slots=True)
class Fields:
    """Fields besides the tokens and the loss mask, as they were given; None for those left out."""

    advantages: Any = None
    old_logprobs: Any = None
    reference_logprobs: Any = None
    weights: Any = None
    returns: Any = None
    old_values: Any = None
    temperatures: Any = None
    group_ids: Any = None
    rollout_ids: Any = None
    extras: Any = None


@dataclass(kw_only=True, slots=True)
class Columns:
    """The arrays of a RolloutBatch, by the names of its attributes.

    numbers: of `advantages`, `weights` and `returns` those that were given as one number per
        rollout: N floats.
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
    numbers: dict[str, list[float]]

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def make_columns(
    cells: Cells,
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    given: Fields,
    layout: PaddedLayout,
    completion_layout: PaddedLayout | None,
) -> Columns:
    """The arrays of a batch whose tokens and loss mask have been validated.

    Raises RolloutError for values of `given` that are not allowed.
    """
    count, offsets = len(cells.names), cells.offsets
    reader = _FloatReader(cells, loss_mask, offsets)
    advantages = reader.number_or_floats("advantages", given.advantages)
    group_ids, groups = _groups(cells, token_ids, loss_mask, given.group_ids, completion_layout)
    return Columns(
        token_ids=token_ids,
        offsets=offsets,
        loss_mask=loss_mask,
        advantages=np.zeros(len(token_ids)) if advantages is None else advantages,
        old_logprobs=reader.logprobs("old_logprobs", given.old_logprobs),
        reference_logprobs=reader.logprobs("reference_logprobs", given.reference_logprobs),
        weights=reader.number_or_floats("weights", given.weights),
        returns=reader.number_or_floats("returns", given.returns),
        old_values=reader.floats("old_values", given.old_values),
        temperatures=_temperatures(cells, given.temperatures),
        group_index=groups,
        group_ids=group_ids,
        rollout_ids=cells.names,
        extras=tuple(read_extras(given.extras, count)),
        has_advantages=advantages is not None,
        layout=layout,
        completion_layout=completion_layout,
        numbers=reader.numbers | ({} if advantages is not None else {"advantages": [0.0] * count}),
    )


class _FloatReader:
    """Reads fields of floats; entries of untrained tokens are not read, as in Rollout.

    numbers: the fields that were one number per rollout, N floats each.
    """

    def __init__(
        self, cells: Cells, loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]
    ) -> None:
        self.cells: Cells = cells
        self.loss_mask: NDArray[np.bool_] = loss_mask
        self.offsets: NDArray[np.int64] = offsets
        self.numbers: dict[str, list[float]] = {}

    def floats(self, field: str, values: Any, advice: str = FINITE) -> NDArray[np.float64] | None:
        """One number per token: float64 [T], or None."""
        if values is None:
            return None
        return self._floats(
            field, on_host(field, values), advice, f"it takes numbers, {self.cells.takes}."
        )

    def logprobs(self, field: str, values: Any) -> NDArray[np.float64] | None:
        """Log-probs, float64 [T], 0 at first tokens; or None."""
        logprobs = self.floats(field, values, FINITE_LOGPROB)
        if logprobs is not None:
            logprobs[self.offsets[:-1]] = 0.0
            check_logprobs(field, logprobs, self.loss_mask, self.cells.locate)
        return logprobs

    def number_or_floats(self, field: str, values: Any) -> NDArray[np.float64] | None:
        """One number per rollout, repeated over its tokens, or one per token: float64 [T]; or None.

        A column [N, 1] is one number per rollout. A single number is that of all rollouts.
        """
        if values is None:
            return None
        cells, count = self.cells, len(self.cells.names)
        values = on_host(field, values)
        takes = f"it takes one number per rollout, [{count}], or one per token, {cells.takes}."
        depth = dimensions(values)
        if depth == 0:
            if not is_number(values):
                raise RolloutError(f"{WHO}: {field} is {short(values)}; {takes}")
            return self._per_rollout(field, np.full(count, values, np.float64), "")
        column = isinstance(values, np.ndarray) and values.shape == (count, 1)
        if column:
            values = values[:, 0]
        elif depth == 1:
            self._refuse_ambiguous(field, len(values))
        if column or (depth == 1 and (cells.width is not None or len(values) == count)):
            vector = read_vector(WHO, field, values, "iuf", takes)
            if len(vector) != count:
                raise RolloutError(
                    f"{WHO}: {field} has the shape {shape_text(vector.shape)}; {takes}"
                )
            return self._per_rollout(field, vector.astype(np.float64), "[{}]")
        return self._floats(field, values, FINITE, takes)

    def _refuse_ambiguous(self, field: str, entries: int) -> None:
        """Refuses flat entries that could be one per rollout or one per token of a response."""
        cells = self.cells
        as_many = entries == len(cells.names) == cells.lengths.sum()
        if cells.width is None and as_many and (cells.lengths != 1).any():
            raise RolloutError(
                f"{WHO}: {field} has {entries} entries, and there are as many rollouts as tokens "
                "of responses, so that they could belong to either. Give one number per rollout "
                "as an array [N, 1], or one per token as a list of rows."
            )

    def _per_rollout(
        self, field: str, numbers: NDArray[np.float64], index: str
    ) -> NDArray[np.float64]:
        finite = np.isfinite(numbers)
        if not finite.all():
            trained = np.logical_or.reduceat(self.loss_mask, self.offsets[:-1])
            refused = trained & ~finite
            if refused.any():
                n = int(refused.argmax())
                raise RolloutError(
                    f"{named(self.cells.names[n])}: {field}{index.format(n)} is {numbers[n]}; "
                    f"{NUMBER_OR_FLOATS}"
                )
            numbers[~finite] = 0.0
        self.numbers[field] = numbers.tolist()
        return np.repeat(numbers, np.diff(self.offsets))

    def _floats(self, field: str, values: Any, advice: str, takes: str) -> NDArray[np.float64]:
        cells = self.cells
        rows = cells.rows(field, values, "iuf", takes, missing=True)
        floats = cells.gather(rows, np.float64)

        def given(position: int) -> Any:
            n, column, _ = cells.entry(position)
            return shown(values, rows, n, column)

        clear_untrained(field, floats, self.loss_mask, cells.locate, advice, given)
        return floats


def _groups(
    cells: Cells,
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    given: Any,
    completion_layout: PaddedLayout | None,
) -> tuple[tuple[str | None, ...], NDArray[np.int64]]:
    """The group_ids and the group index; prompts are known where completions are given apart."""
    group_ids = read_ids("group_ids", given, len(cells.names))
    offsets = cells.offsets
    if completion_layout is not None:
        prompts = cells.leading
        return groups_of_given_prompts(group_ids, token_ids, loss_mask, offsets, prompts)
    prompts = prompt_lengths(loss_mask, offsets)
    return tuple(group_ids), group_index(group_ids, token_ids, offsets, prompts)


def _temperatures(cells: Cells, values: Any) -> NDArray[np.float64]:
    """The temperature of each rollout, float64 [N]: one number for all, or N; 1 for None."""
    count = len(cells.names)
    values = on_host("temperatures", values)
    if values is None:
        return np.ones(count)
    if dimensions(values) == 0:
        return np.full(count, read_temperature(WHO, values))
    takes = f"it takes one number, or one per rollout, [{count}]."
    vector = read_vector(WHO, "temperatures", values, "iuf", takes)
    if len(vector) != count:
        raise RolloutError(f"{WHO}: temperatures has the shape {shape_text(vector.shape)}; {takes}")
    for name, temperature in zip(cells.names, vector.tolist(), strict=True):
        read_temperature(named(name), temperature)
    return vector.astype(np.float64)
