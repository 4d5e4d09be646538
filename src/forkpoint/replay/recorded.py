"""Replaying a trace: a step for each recorded batch, with what its loss was given."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from forkpoint import losses
from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators, Loss
from forkpoint.replay.batches import StepInput
from forkpoint.rollouts import RolloutBatch, short
from forkpoint.traces import Trace

# How a trace writes the numbers that JSON lacks.
NO_JSON = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}


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
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
            raise ConfigError(f"{where}: scale is {short(scale)}; it takes a number.")
        if denominators is not None:
            denominators = _denominators(denominators, where)
        return StepInput(
            batch=recorded.batch,
            denominators=denominators,
            scale=1.0 if scale is None else float(scale),
        )

    def every(self) -> Iterator[RolloutBatch]:
        return (self.at(step).batch for step in range(self.count))

    def describe(self) -> dict[str, Any]:
        return {
            "trace": self.trace.trace_id,
            "batches": self.count,
            "digest": self.trace.entries[self.count - 1].checksum,
        }


def recorded_loss(trace: Trace) -> Loss | None:
    """The loss that a trace was recorded with, None where it does not say.

    Raises ConfigError for a loss that is not one of `forkpoint.losses`.
    """
    if trace.loss is None:
        return None
    values = dict(trace.loss)
    name = values.pop("name", None)
    kind = getattr(losses, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Loss) and is_dataclass(kind):
        known = fields(kind)
        values = {k: _as_given(v) for k, v in values.items()}
        if values.keys() == {field.name for field in known}:
            made = kind(**{field.name: values[field.name] for field in known if field.init})
            # What is fixed in a loss must be what was recorded as well.
            if all(getattr(made, name) == value for name, value in values.items()):
                return made
    raise ConfigError(
        f"{trace.path} was recorded with the loss {short(dict(trace.loss))}, which is not one of "
        "forkpoint.losses with its options. Say with --loss which to take."
    )


def _denominators(values: Any, where: str) -> Denominators:
    names = {field.name for field in fields(Denominators)}
    if not isinstance(values, dict) or values.keys() != names:
        raise ConfigError(
            f"{where}: denominators are {short(values)}; they take {', '.join(sorted(names))}."
        )
    return Denominators(**values)


def _as_given(value: Any) -> Any:
    """An option of a loss before it became JSON, which knows neither infinity nor tuples."""
    if isinstance(value, list):
        return tuple(value)
    return NO_JSON.get(value, value) if isinstance(value, str) else value
