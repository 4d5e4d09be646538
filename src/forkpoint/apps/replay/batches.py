"""The batch of each step of a replay: of a file of rollouts, or of a trace."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.schema import SchemaError, is_number, read
from forkpoint.rollouts.traces import Trace
from forkpoint.rollouts.traces.batch_file import encode

MOST_NUMBER = 1e30
"""Of a step's scale: torch makes float32 of it, which holds 3e38."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    """Inputs of a step: arguments of `Policy.forward_backward`."""

    batch: RolloutBatch
    denominators: Denominators | None = None
    scale: float = 1.0


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
        """The batch of a step, counted from 0, and what its loss is given."""
        first = step * self.groups_per_step
        chosen = [self.groups[(first + n) % len(self.groups)] for n in range(self.groups_per_step)]
        wanted = (int(index) for members in chosen for index in members)
        return StepInput(batch=self.batch.select(wanted))

    def every(self) -> Iterator[RolloutBatch]:
        """All rollouts, to be checked before the first step."""
        yield self.batch

    def describe(self) -> dict[str, Any]:
        """Sizes and a digest, ready for JSON: equal only if every step's batch is."""
        # Extras have no effect on a step, and JSON may not hold them.
        plain = RolloutBatch(replace(rollout, extras=None) for rollout in self.batch)
        digest = hashlib.blake2b(encode(plain, {}, {}), digest_size=16)
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


Batches = GroupBatches | TraceBatches
