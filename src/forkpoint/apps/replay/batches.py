"""The batch of each step of a replay: of a file of rollouts, or of a trace."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forkpoint import losses
from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators, Loss
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.schema import SchemaError, is_number, read
from forkpoint.rollouts.traces import Trace

_DIGESTED = (
    *("token_ids", "offsets", "loss_mask", "advantages", "old_logprobs", "reference_logprobs"),
    *("weights", "returns", "old_values", "temperatures", "group_index", "routed_experts"),
)
"""All of a batch that a step's result depends on."""
MOST_NUMBER = 1e30
"""Of a loss's options and a step's scale: torch makes float32 of them, which holds 3e38."""
_NOT_JSON = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}
"""Numbers that JSON lacks, by the names that traces have for them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    """Inputs of a step: arguments of `Policy.forward_backward`."""

    batch: RolloutBatch
    denominators: Denominators | None = None
    scale: float = 1.0


class Batches(Protocol):
    """Frozen batches that a replay takes in turn, again from the first after the last."""

    def at(self, step: int) -> StepInput:
        """The batch of a step, counted from 0, and what its loss is given."""
        ...

    def every(self) -> Iterator[RolloutBatch]:
        """All rollouts, to be checked before the first step."""
        ...

    def describe(self) -> dict[str, Any]:
        """Sizes and a digest, ready for JSON: equal only if every step's batch is."""
        ...


class GroupBatches:
    """The groups of one batch of rollouts, so many a step, cycling."""

    def __init__(self, batch: RolloutBatch, groups_per_step: int = 1) -> None:
        self.batch: RolloutBatch = batch
        self.groups_per_step: int = groups_per_step
        self.groups: list[NDArray[np.int64]] = batch.groups()
        if not 1 <= groups_per_step <= len(self.groups):
            raise ConfigError(
                f"groups_per_step is {groups_per_step}, and the rollouts have {len(self.groups)} "
                f"groups; it takes a whole number from 1 to {len(self.groups)}."
            )

    def at(self, step: int) -> StepInput:
        first = step * self.groups_per_step
        chosen = [self.groups[(first + n) % len(self.groups)] for n in range(self.groups_per_step)]
        wanted = (int(index) for members in chosen for index in members)
        return StepInput(batch=self.batch.select(wanted))

    def every(self) -> Iterator[RolloutBatch]:
        yield self.batch

    def describe(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for name in _DIGESTED:
            value = getattr(self.batch, name)
            digest.update(name.encode())
            if value is not None:
                content = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
                digest.update(content.tobytes())
        if self.batch.media:
            digest.update(self.batch.content(0, self.batch.logical_tokens))
        return {
            "rollouts": len(self.batch),
            "groups": len(self.groups),
            "groups_per_step": self.groups_per_step,
            "digest": digest.hexdigest(),
        }


class TraceBatches:
    """The batches of a trace, one a step, again from the first after the last.

    Of the loss inputs, `denominators` and `scale` are what `forward_backward` takes; a batch with
    any other is refused. Every batch is read and checked before the first step.
    """

    def __init__(self, trace: Trace, steps: int) -> None:
        """`steps` is how many the replay has: of a trace that still grows, no more are looked at.

        Raises ConfigError for a trace without batches.
        """
        if not len(trace):
            raise ConfigError(f"{trace.path} has no whole batch yet. Wait for the recorder.")
        self.trace: Trace = trace
        self.count: int = min(steps, len(trace))

    def at(self, step: int) -> StepInput:
        recorded = self.trace[step % self.count]
        inputs = dict(recorded.loss_inputs)
        given, scale = inputs.pop("denominators", None), inputs.pop("scale", None)
        where = f"{self.trace.path}, batch {recorded.index}"
        if inputs:
            raise ConfigError(
                f"{where} was recorded with the loss inputs {', '.join(sorted(inputs))}, and a "
                "replay can give a loss only denominators and scale. Record without them, or put "
                "what the loss needs into the rollouts."
            )
        try:
            if scale is not None and not (is_number(scale) and abs(scale) <= MOST_NUMBER):
                most = f"{-MOST_NUMBER:g} to {MOST_NUMBER:g}"
                raise SchemaError(f"scale is {short(scale)}; it takes a number from {most}")
            return StepInput(
                batch=recorded.batch,
                denominators=read(Denominators | None, given, "denominators"),
                scale=1.0 if scale is None else float(scale),
            )
        except SchemaError as error:
            raise ConfigError(f"{where}: {error}. Record it again.") from None

    def every(self) -> Iterator[RolloutBatch]:
        return (self.at(step).batch for step in range(self.count))

    def describe(self) -> dict[str, Any]:
        return {"batches": self.count, "digest": self.trace.digest(self.count)}


def recorded_loss(trace: Trace) -> Loss | None:
    """The loss that a trace was recorded with, None where it does not say.

    Raises ConfigError for a loss that is not one of `forkpoint.losses`.
    """
    if trace.loss is None:
        return None
    values = dict(trace.loss) if isinstance(trace.loss, Mapping) else {}
    name = values.pop("name", None)
    kind = getattr(losses, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Loss) and is_dataclass(kind):
        given: dict[str, Any] = {}
        try:
            given = {key: _as_given(value) for key, value in values.items()}
            made = kind(**{f.name: given[f.name] for f in fields(kind) if f.init})
        except (KeyError, TypeError, ValueError):  # of the loss, for options that it does not take
            made = None
        # What is fixed in a loss must be what was recorded as well.
        if made is not None and given == {f.name: getattr(made, f.name) for f in fields(kind)}:
            return made
    raise ConfigError(
        f"{trace.path} was recorded with the loss {short(trace.loss)}, which is not one of "
        "forkpoint.losses with its options. Say with --loss which to take."
    )


def _as_given(value: Any) -> Any:
    """An option of a loss before it became JSON, which knows neither infinity nor tuples.

    Raises ValueError for a number that a loss cannot compute with.
    """
    if isinstance(value, list):
        return tuple(value)
    # torch takes whole numbers of 64 bits.
    most = 2**53 if isinstance(value, int) else MOST_NUMBER
    if isinstance(value, int | float) and most < abs(value) != math.inf:
        raise ValueError("the number is too large")
    return _NOT_JSON.get(value, value) if isinstance(value, str) else value
