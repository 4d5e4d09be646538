"""The longest prompt that fits a device. Imports no torch."""

from collections.abc import Callable, Sequence

import numpy as np

from forkpoint.rollouts.batch import Rollout, RolloutBatch

STEP_TOKENS = 1024
MOST_TOKENS = 1 << 21
"""Lengths that are tried: multiples of the one, up to the other."""


def longest(
    fits: Callable[[int], bool],
    *,
    step: int = STEP_TOKENS,
    most: int = MOST_TOKENS,
    start: int | None = None,
) -> int:
    """The largest multiple of `step` up to `most` for which `fits` is true; 0 if none is.

    `fits` is true up to some length and false beyond. `start`: a guess, near which few are tried.
    """
    low, high = 0, most // step + 1
    tried, stride = max(1, min(most, start or step) // step), 1
    if high > 1 and fits(tried * step):
        low = tried
        while low + stride < high and fits((low + stride) * step):
            low, stride = low + stride, 2 * stride
        high = min(high, low + stride)
    elif high > 1:
        high = tried
        while high - stride > 0 and not fits((high - stride) * step):
            high, stride = high - stride, 2 * stride
        low = max(0, high - stride)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step


def one_group(prompt: int, responses: Sequence[int], vocab: int) -> RolloutBatch:
    """A prompt of so many tokens with responses of these lengths, which share nothing."""
    shared = np.arange(prompt) % vocab
    return RolloutBatch(
        Rollout(
            # First tokens differ.
            np.concatenate([shared, (number + np.arange(length)) % vocab]),
            np.repeat([0, 1], [prompt, length]),
            1.0,
            group_id="longest",
        )
        for number, length in enumerate(responses)
    )


def responses_of(batch: RolloutBatch) -> list[int]:
    """Lengths of the responses of a batch's first group: from its first trained token on."""
    members = np.flatnonzero(batch.group_index == batch.group_index[0]).tolist()
    found = []
    for member in members:
        begin, end = int(batch.offsets[member]), int(batch.offsets[member + 1])
        trained = np.flatnonzero(batch.loss_mask[begin:end])
        if len(trained):
            found.append(end - begin - int(trained[0]))
    return found
