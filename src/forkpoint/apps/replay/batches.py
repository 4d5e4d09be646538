"""Batches of the steps of a replay, from a file of rollouts or from a trace."""

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
"""Largest absolute value of a scale. torch converts it to float32, whose largest number is 3e38."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    """Inputs of a step: arguments of `Policy.forward_backward`."""

    batch: RolloutBatch
    denominators: Denominators | None = None
    scale: float = 1.0


class GroupBatches:
    """Batches of consecutive groups of one batch of rollouts, which start again after the last
    group."""

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
        """Inputs of a step, counted from 0."""
        first = step * self.groups_per_step
        chosen = [self.groups[(first + n) % len(self.groups)] for n in range(self.groups_per_step)]
        wanted = (int(index) for members in chosen for index in members)
        return StepInput(batch=self.batch.select(wanted))

    def every(self) -> Iterator[RolloutBatch]:
        """All rollouts, for checks before the first step."""
        yield self.batch

    def describe(self) -> dict[str, Any]:
        """Sizes and a digest for JSON, equal only if the batches of all steps are equal."""
        # Extras have no effect on a step, and JSON cannot represent all of them.
        plain = RolloutBatch(replace(rollout, extras=None) for rollout in self.batch)
        digest = hashlib.blake2b(encode(plain, {}, {}), digest_size=16)
        return {
            "rollouts": len(self.batch),
            "groups": len(self.groups),
            "groups_per_step": self.groups_per_step,
            "digest": digest.hexdigest(),
        }


class TraceBatches:
    """Batches of a trace, one for each step, which start again after the last batch.

    The loss inputs may be `denominators` and `scale`, the arguments of `forward_backward`. Batches
    with other loss inputs are refused. All batches are read and checked before the first step.
    """

    def __init__(self, trace: Trace, steps: int) -> None:
        """`steps`: number of steps of the replay. Later batches of a growing trace are ignored.

        Raises ConfigError for a trace without batches.
        """
        if not len(trace):
            raise ConfigError(f"{trace.path} has no complete batch yet. Wait for the recorder.")
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
                "replay supports only denominators and scale. Record without the others, or put "
                "their values into the rollouts."
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
