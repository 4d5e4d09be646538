"""The longest prompt that fits a device. Imports no torch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch

STEP_TOKENS = 1024
MOST_TOKENS = 1 << 21
"""Lengths that are tried: multiples of the one, up to the other."""


def longest_prompt(
    make: Callable[[RolloutBatch], Plan],
    responses: Sequence[int],
    vocab: int,
    fits: Callable[[Plan], bool] = lambda plan: plan.fits,
) -> int:
    """The longest prompt for which a plan fits, with one response of each of these lengths; 0 if
    none does.

    `make`: makes the plan of a batch.
    """

    def found(prompt: int) -> bool:
        try:
            plan = make(one_group(prompt, responses, vocab))
        except PlanError:
            return False
        return fits(plan)

    return longest(found)


def longest(
    fits: Callable[[int], bool], *, step: int = STEP_TOKENS, most: int = MOST_TOKENS
) -> int:
    """The largest multiple of `step` up to `most` for which `fits` is true; 0 if none is.

    `fits` is true up to some length and false beyond. Long lengths are tried last.
    """
    end = 1
    while end * step <= most and fits(end * step):
        end *= 2
    begin = end // 2 + 1
    between = range(begin, min(end, most // step + 1))
    return step * (begin - 1 + bisect_left(between, True, key=lambda n: not fits(n * step)))


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
