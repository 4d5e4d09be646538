"""Scores that a loss is computed from: this rank's, or those of all ranks as one batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.views import LossViews
from forkpoint.parallel.step import RankStep, SingleProcessStep
from forkpoint.rollouts.batch import RolloutBatch


@dataclass(frozen=True)
class LossInputs:
    """A batch and its scores."""

    views: LossViews
    per_token: Mapping[str, Tensor]
    """[T] by name: "logprobs", "entropies", a critic's "values"."""
    own: slice
    """The part of T that is this rank's."""
    shown: NDArray[np.bool_]
    """Rollouts that the loss is shown."""
    counts: bool = True
    """Whether this rank's value of the loss counts. All ranks compute the same, of which one
    counts."""


def loss_inputs(
    ranks: RankStep,
    per_token: Mapping[str, Tensor],
    views: LossViews,
    shown: NDArray[np.bool_],
) -> LossInputs:
    """This rank's scores or, where the step gathers rollouts, those of all ranks. Collective then.

    Args:
        ranks: of the step.
        per_token: [T] by name, this rank's scores.
        views: of this rank's batch.
        shown: bool [N], rollouts of this rank that the loss is shown.
    """
    if isinstance(ranks, SingleProcessStep) or not ranks.parts:
        return LossInputs(views, per_token, slice(None), shown)
    found = ranks.gather({name: x_T.cpu() for name, x_T in per_token.items()})
    # Ranks of one batch have the same scores, and are one part.
    batches = ranks.ranks.batches
    found = [found[batches.index(batch)] for batch in range(len(ranks.parts))]
    index = batches[ranks.ranks.index]
    begin = sum(part.logical_tokens for part in ranks.parts[:index])
    joined = _joined(ranks.parts)
    return LossInputs(
        LossViews(joined, views.denominators, views.device, views.dtype),
        {name: torch.cat([each[name] for each in found]).to(views.device) for name in per_token},
        own=slice(begin, begin + ranks.parts[index].logical_tokens),
        # No rank leaves out what rollouts of another may be coupled with.
        shown=np.ones(len(joined), bool),
        counts=index == 0,
    )


def _joined(parts: tuple[RolloutBatch, ...]) -> RolloutBatch:
    """The rollouts of all ranks. Names that occur on several ranks get the rank's number."""
    names = [name for part in parts for name in part.rollout_ids]
    if len(set(names)) == len(names):
        return RolloutBatch([rollout for part in parts for rollout in part.rollouts])
    return RolloutBatch(
        [
            replace(rollout, rollout_id=f"{rank}/{rollout.rollout_id}")
            for rank, part in enumerate(parts)
            for rollout in part.rollouts
        ]
    )
