"""Which batch each step of a replay trains on. Imports no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from forkpoint.losses import Denominators

DIGESTED = (
    *("token_ids", "offsets", "loss_mask", "advantages", "old_logprobs", "reference_logprobs"),
    *("weights", "returns", "old_values", "temperatures", "group_index"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    """Inputs of a step: arguments of `Policy.forward_backward`."""

    batch: RolloutBatch
    denominators: "Denominators | None" = None
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
        return {
            "rollouts": len(self.batch),
            "groups": len(self.groups),
            "groups_per_step": self.groups_per_step,
            "logical_tokens": self.batch.logical_tokens,
            "trained_tokens": self.batch.trained_tokens,
            "digest": batch_digest(self.batch),
        }


def batch_digest(batch: RolloutBatch) -> str:
    """A digest of everything of a batch that a step's result depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for name in DIGESTED:
        array = getattr(batch, name)
        digest.update(name.encode())
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    if batch.routed_experts is not None:
        digest.update(b"routed_experts")
        digest.update(batch.routed_experts.tobytes())
    return digest.hexdigest()
