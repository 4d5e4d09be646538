"""Checks that ranks which hold one copy of a model together have the same batch and plan.

With tensor parallelism, each rank has a part of every layer, and partial results of a token are
summed over ranks. If the ranks had different tokens, the sums would be wrong without an error.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.errors import ForkpointError, RankError
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch

T = TypeVar("T")
RELATIVE = 1e-3
"""Relative tolerance of numbers that ranks compute from the same values."""


@dataclass(frozen=True)
class Contents:
    """Digests and numbers that ranks with the same batch compare before a step."""

    rollouts: str
    """Digest of all fields of the batch that a loss may read."""
    plan: str
    """Digest of microbatches and programs."""
    numbers: tuple[float, ...] = ()
    """Factors of the loss, and sums of gradients that a caller's loss passes."""
    config: Config | None = None
    """Options of the policy, to name those that differ."""


def contents_of(
    batch: RolloutBatch,
    plans: Sequence[Plan],
    numbers: Sequence[float],
    config: Config | None = None,
) -> Contents:
    """The contents of one rank's step, or of several plans of one batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (
        *("token_ids", "offsets", "loss_mask", "advantages", "old_logprobs"),
        *("reference_logprobs", "weights", "returns", "old_values", "temperatures", "group_index"),
        "routed_experts",
    ):
        array = getattr(batch, name)
        digest.update(f"{name} {array is not None};".encode())
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    if batch.media:
        digest.update(batch.content(0, batch.logical_tokens))
    for part in _contents((batch.group_ids, batch.extras)):
        digest.update(part)
    microbatches = hashlib.blake2b(digest_size=16)
    for plan in plans:
        microbatches.update(repr(plan.microbatches).encode())
        microbatches.update(repr(plan.program).encode())
    return Contents(digest.hexdigest(), microbatches.hexdigest(), tuple(numbers), config)


def _contents(value: object) -> Iterator[bytes]:
    """Contents of an object, in parts. Dicts that differ only in the order of keys are equal."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype} {value.shape};".encode()
        yield value.tobytes()
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"dict {len(value)};".encode()
        for key in sorted(value, key=repr):
            yield from _contents(key)
            yield from _contents(value[key])
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)};".encode()
        for item in value:
            yield from _contents(item)
    else:
        # The repr of some objects has their address, which differs between ranks.
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode(errors="replace")
        yield f"{len(text)};".encode()
        yield text


def check_copies(
    values: Sequence[T],
    names: Sequence[int],
    batches: Sequence[int],
    difference: Callable[[T, T], str | None],
    error: type[ForkpointError] = RankError,
) -> None:
    """Check that values agree between ranks that hold one copy of the model together.

    Args:
        values: by rank.
        names: by rank, its number in messages.
        batches: number of the batch, by rank. Ranks of one copy have the same batch.
        difference: returns how two values differ, with a remedy; None if they agree.
        error: class of the error.

    Raises `error` on every rank that calls this. It names two ranks that differ.
    """
    leaders: dict[int, int] = {}
    for rank, batch in enumerate(batches):
        leader = leaders.setdefault(batch, rank)
        text = difference(values[leader], values[rank]) if rank != leader else None
        if text is not None:
            raise error(
                f"ranks {names[leader]} and {names[rank]} hold one copy of the model, and {text}"
            )


def check_same_batches(
    contents: Sequence[Contents | None], names: Sequence[int], batches: Sequence[int]
) -> None:
    """Check that ranks with the same batch have the same rollouts, plans and numbers, as
    `check_copies`."""
    no_step = "so no rank runs this step, and gradients are unchanged."

    def difference(one: Contents | None, other: Contents | None) -> str | None:
        assert one is not None and other is not None
        if one.rollouts != other.rollouts:
            return (
                f"have different batches, {no_step} Give both the same rollouts, with the same "
                "advantages, log-probs and extras."
            )
        if one.plan != other.plan:
            return (
                f"planned the same batch differently{_differences(one.config, other.config)}, "
                f"{no_step} Give both the same Config; where their memory or calibrations differ, "
                "set memory_budget, host_memory and calibration in it."
            )
        if not alike(one.numbers, other.numbers):
            return (
                f"scale the loss or its gradients differently ({list(one.numbers)} and "
                f"{list(other.numbers)}), {no_step} Compute the loss from the same values on both."
            )
        return None

    check_copies(contents, names, batches, difference)


def _differences(one: Config | None, other: Config | None) -> str:
    """The options that differ, with both values, for a message; empty if there are none."""
    names = [field.name for field in fields(Config)]
    found = [
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in names
        if one is not None and getattr(one, name) != getattr(other, name)
    ]
    return f" ({', '.join(found)})" if found else ""


def check_same_losses(
    losses: Sequence[float], names: Sequence[int], batches: Sequence[int]
) -> None:
    """Check that ranks with the same batch have computed the same loss, as `check_copies`."""

    def difference(one: float, other: float) -> str | None:
        if alike([one], [other]):
            return None
        return (
            f"came to different losses ({one:.6g} and {other:.6g}), so no rank keeps its "
            "gradients. Use the same random numbers on both, and no loss that depends on the rank."
        )

    check_copies(losses, names, batches, difference)


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers agree up to rounding."""
    return len(one) == len(other) and all(
        x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=RELATIVE)
        for x, y in zip(one, other, strict=True)
    )
