"""Ranks that hold one copy of a model together: they have the same batch, and run the same plan.

Under tensor parallelism each rank has a part of every layer. What one computes of a token is added
to what the others compute of it, so ranks with other tokens would add what does not belong
together, and nothing would tell.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.errors import RankError
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch

RELATIVE = 1e-3
"""Numbers that ranks compute from the same values on different devices may differ by so much."""


@dataclass(frozen=True)
class Contents:
    """Digests and numbers that ranks with the same batch compare before a step."""

    rollouts: str
    """A digest of everything that a loss may read of the batch."""
    plan: str
    """A digest of the microbatches and what each holds."""
    numbers: tuple[float, ...] = ()
    """Factors of the loss, and sums of gradients that a caller's loss has given."""


def contents_of(batch: RolloutBatch, plans: Sequence[Plan], numbers: Sequence[float]) -> Contents:
    """The contents of one rank's step, or of several plans of one batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (
        *("token_ids", "offsets", "loss_mask", "advantages", "old_logprobs"),
        *("reference_logprobs", "weights", "returns", "old_values", "temperatures", "group_index"),
    ):
        array = getattr(batch, name)
        digest.update(f"{name} {array is not None};".encode())
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    # Objects that print their address are other objects on every rank.
    extras = re.sub(r" at 0x[0-9a-f]+", "", repr((batch.group_ids, batch.extras)))
    digest.update(extras.encode(errors="replace"))
    microbatches = hashlib.blake2b(digest_size=16)
    for plan in plans:
        microbatches.update(repr(plan.microbatches).encode())
        microbatches.update(repr(plan.program).encode())
    return Contents(digest.hexdigest(), microbatches.hexdigest(), tuple(numbers))


def check_same_batches(
    contents: Sequence[Contents | None], names: Sequence[int], batches: Sequence[int]
) -> None:
    """Ranks with the same batch have the same rollouts, plans and numbers.

    Args:
        contents: by rank.
        names: by rank, its number in messages.
        batches: by rank, which batch it has.

    Raises RankError on every rank that calls this, naming two that differ.
    """
    firsts: dict[int, int] = {}
    for rank, batch in enumerate(batches):
        first = firsts.setdefault(batch, rank)
        one, other = contents[first], contents[rank]
        assert one is not None and other is not None
        who = (
            f"ranks {names[first]} and {names[rank]} hold one copy of the model together (tensor "
            "parallelism)"
        )
        if one.rollouts != other.rollouts:
            raise RankError(
                f"{who}, and were given different batches, so no rank runs this step, and "
                "gradients are as they were. Give both the same rollouts, with the same "
                "advantages, log-probs and extras: one batch for each place in the data "
                "dimensions of the mesh."
            )
        if one.plan != other.plan:
            raise RankError(
                f"{who}, and planned the same batch differently, so no rank runs this step, and "
                "gradients are as they were. Give both the same Config; where their free memory "
                "or calibrations differ, set memory_budget and calibration in it."
            )
        if not alike(one.numbers, other.numbers):
            raise RankError(
                f"{who}, and scale the loss or its gradients differently ({list(one.numbers)} and "
                f"{list(other.numbers)}), so no rank runs this step, and gradients are as they "
                "were. Compute the loss from the same values on both, without random numbers of "
                "a rank's own."
            )


def check_same_losses(
    losses: Sequence[float], names: Sequence[int], batches: Sequence[int]
) -> None:
    """Ranks with the same batch have come to the same loss.

    Raises RankError on every rank that calls this, naming two that differ.
    """
    firsts: dict[int, int] = {}
    for rank, batch in enumerate(batches):
        first = firsts.setdefault(batch, rank)
        if not alike([losses[first]], [losses[rank]]):
            raise RankError(
                f"ranks {names[first]} and {names[rank]} hold one copy of the model together "
                f"(tensor parallelism), and came to different losses ({losses[first]:.6g} and "
                f"{losses[rank]:.6g}), so no rank keeps its gradients. A loss there must not draw "
                "random numbers of a rank's own, nor depend on the rank."
            )


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers agree but for rounding."""
    return len(one) == len(other) and all(
        x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=RELATIVE)
        for x, y in zip(one, other, strict=True)
    )
