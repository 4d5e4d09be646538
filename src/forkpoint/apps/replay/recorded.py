"""Replaying a trace: a step for each recorded batch, with what its loss was given."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from forkpoint import losses
from forkpoint.apps.replay.batches import StepInput
from forkpoint.apps.replay.schema import MOST_NUMBER, NOT_JSON, is_too_large
from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators, Loss
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.schema import SchemaError, number, record
from forkpoint.rollouts.traces import Trace

_DENOMINATORS = record({field.name: number(0) for field in fields(Denominators)})


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
        denominators, scale = inputs.pop("denominators", None), inputs.pop("scale", None)
        where = f"{self.trace.path}, batch {recorded.index}"
        if inputs:
            raise ConfigError(
                f"{where} was recorded with the loss inputs {', '.join(sorted(inputs))}, and a "
                "replay can give a loss only denominators and scale. Record without them, or put "
                "what the loss needs into the rollouts."
            )
        try:
            return StepInput(
                batch=recorded.batch,
                denominators=None
                if denominators is None
                else Denominators(**_DENOMINATORS(denominators, "denominators")),
                scale=1.0 if scale is None else number(-MOST_NUMBER, MOST_NUMBER)(scale, "scale"),
            )
        except SchemaError as error:
            raise ConfigError(f"{where}: {error}. Record it again.") from None

    def every(self) -> Iterator[RolloutBatch]:
        return (self.at(step).batch for step in range(self.count))

    def describe(self) -> dict[str, Any]:
        return {
            "batches": self.count,
            "digest": self.trace.entries[self.count - 1].checksum,
        }


def recorded_loss(trace: Trace) -> Loss | None:
    """The loss that a trace was recorded with, None where it does not say.

    Raises ConfigError for a loss that is not one of `forkpoint.losses`.
    """
    if trace.loss is None:
        return None
    if isinstance(trace.loss, Mapping):
        made = _made(trace.loss)
        if made is not None:
            return made
    raise ConfigError(
        f"{trace.path} was recorded with the loss {short(trace.loss)}, which is not one of "
        "forkpoint.losses with its options. Say with --loss which to take."
    )


def _made(recorded: Mapping[str, Any]) -> Loss | None:
    """The loss of `forkpoint.losses` that is recorded so, None where there is none."""
    values = {name: _as_given(value) for name, value in recorded.items()}
    name = values.pop("name", None)
    kind = getattr(losses, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Loss) and is_dataclass(kind)):
        return None
    known = fields(kind)
    if values.keys() != {field.name for field in known} or any(map(is_too_large, values.values())):
        return None
    try:
        made = kind(**{field.name: values[field.name] for field in known if field.init})
    except (TypeError, ValueError):  # of the loss, for options that it does not take
        return None
    # What is fixed in a loss must be what was recorded as well.
    same = all(getattr(made, name) == value for name, value in values.items())
    return made if same else None


def _as_given(value: Any) -> Any:
    """An option of a loss before it became JSON, which knows neither infinity nor tuples."""
    if isinstance(value, list):
        return tuple(value)
    return NOT_JSON.get(value, value) if isinstance(value, str) else value
