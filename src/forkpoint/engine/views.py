"""The parts of a batch that a loss is shown, as tensors."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from forkpoint.forest import IntArray
from forkpoint.losses.base import Denominators, LossBatch, LossOutputs
from forkpoint.rollouts import RolloutBatch


class LossViews:
    """Cuts views for a loss from one batch; what they have in common is made once."""

    def __init__(
        self,
        batch: RolloutBatch,
        denominators: Denominators,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.batch, self.denominators = batch, denominators
        self.device, self.dtype = device, dtype
        self.rollout_of = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
        self.trained_of = np.bincount(
            self.rollout_of[batch.loss_mask], minlength=len(batch)
        ).astype(np.float64)

    def of_tokens(self, tokens: IntArray) -> LossBatch:
        """A view that holds exactly these positions of the batch's flat tokens, ascending."""
        rollouts, local = np.unique(self.rollout_of[tokens], return_inverse=True)
        counts = np.bincount(local, minlength=len(rollouts))
        batch = self.batch

        def floats(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else self._tensor(values[tokens], self.dtype)

        advantages = floats(batch.advantages)
        assert advantages is not None
        return LossBatch(
            offsets=self._tensor(np.concatenate([[0], np.cumsum(counts)]), torch.int64),
            token_rollout=self._tensor(local, torch.int64),
            loss_mask=self._tensor(batch.loss_mask[tokens], torch.bool),
            advantages=advantages,
            old_logprobs=floats(batch.old_logprobs),
            reference_logprobs=floats(batch.reference_logprobs),
            weights=floats(batch.weights),
            returns=floats(batch.returns),
            old_values=floats(batch.old_values),
            rollout_tokens=self._tensor(self.trained_of[rollouts], self.dtype),
            rollout_index=self._tensor(rollouts, torch.int64),
            group_index=self._tensor(batch.group_index[rollouts], torch.int64),
            temperatures=self._tensor(batch.temperatures[rollouts], self.dtype),
            denominators=self.denominators,
            rollout_ids=tuple(batch.rollout_ids[r] for r in rollouts.tolist()),
        )

    def of_rollouts(self, rollouts: np.ndarray) -> tuple[LossBatch, IntArray]:
        """A view of whole rollouts (bool [N]), untrained tokens included, and its tokens."""
        tokens = np.flatnonzero(rollouts[self.rollout_of])
        return self.of_tokens(tokens), tokens

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(self.device, dtype)


def batch_denominators(batch: RolloutBatch) -> Denominators:
    """What the means of a step over this batch alone are taken over."""
    return Denominators(
        tokens=float(batch.loss_mask.sum()),
        rollouts=float(len(batch)),
        groups=float(len(np.unique(batch.group_index))),
    )


def spread(values_n: Tensor, entries: Tensor) -> Tensor:
    """The row's values at `entries`; an entry of -1 is 0. Shared tokens' gradients add up."""
    padded = torch.cat([values_n, values_n.new_zeros(1)])
    return padded.index_select(0, entries % len(padded))


def outputs_of(per_token: Mapping[str, Tensor], entries: Tensor) -> LossOutputs:
    """A view's outputs from the row's own."""
    return LossOutputs(**{name: spread(x_n, entries) for name, x_n in per_token.items()})
