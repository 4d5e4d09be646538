"""Views of a batch for losses, as tensors."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.errors import RolloutError
from forkpoint.losses.base import SOURCES, Denominators, LossBatch, LossOutputs
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray


class LossViews:
    """Cuts views for a loss from one batch. Arrays of the whole batch are computed once."""

    def __init__(
        self,
        batch: RolloutBatch,
        denominators: Denominators,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.batch: RolloutBatch = batch
        self.denominators: Denominators = denominators
        self.device: torch.device = device
        self.dtype: torch.dtype = dtype
        self.rollout_of: IntArray = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
        self.trained_of: NDArray[np.float64] = np.bincount(
            self.rollout_of[batch.loss_mask], minlength=len(batch)
        ).astype(np.float64)

    def of_tokens(self, tokens: IntArray) -> LossBatch:
        """Make a view of these positions of the batch's flat tokens, which must ascend."""
        rollouts, local = np.unique(self.rollout_of[tokens], return_inverse=True)
        counts = np.bincount(local, minlength=len(rollouts))
        batch = self.batch

        def floats(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else self._tensor(values[tokens], self.dtype)

        return LossBatch(
            offsets=self._tensor(np.concatenate([[0], np.cumsum(counts)]), torch.int64),
            token_index=self._tensor(tokens, torch.int64),
            token_rollout=self._tensor(local, torch.int64),
            loss_mask=self._tensor(batch.loss_mask[tokens], torch.bool),
            advantages=self._tensor(batch.advantages[tokens], self.dtype),
            rollout_tokens=self._tensor(self.trained_of[rollouts], self.dtype),
            rollout_index=self._tensor(rollouts, torch.int64),
            group_index=self._tensor(batch.group_index[rollouts], torch.int64),
            temperatures=self._tensor(batch.temperatures[rollouts], self.dtype),
            denominators=self.denominators,
            rollout_ids=tuple(batch.rollout_ids[r] for r in rollouts.tolist()),
            **{name: floats(getattr(batch, name)) for name in SOURCES},
        )

    def of_rollouts(self, rollouts: np.ndarray) -> tuple[LossBatch, IntArray]:
        """Make a view of whole rollouts (bool [N]), with untrained tokens. Returns the view and its
        tokens."""
        tokens = np.flatnonzero(rollouts[self.rollout_of])
        return self.of_tokens(tokens), tokens

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return on_device(values, self.device, dtype)


def batch_denominators(batch: RolloutBatch) -> Denominators:
    """Denominators of a step over this batch alone."""
    return Denominators(
        tokens=float(batch.loss_mask.sum()),
        rollouts=float(len(batch)),
        groups=float(len(np.unique(batch.group_index))),
    )


def check_range(batch: RolloutBatch, dtype: torch.dtype) -> None:
    """Raises RolloutError if a number overflows, or a temperature becomes 0, in the dtype of
    losses.

    Rollouts have float64. Losses are computed in float32, or in float64 for float64 models.
    """
    most = torch.finfo(dtype).max
    kind = str(dtype).removeprefix("torch.")
    fields = {"advantage": batch.advantages} | {name: getattr(batch, name) for name in SOURCES}
    for name, values in fields.items():
        if values is not None and (beyond := batch.loss_mask & (abs(values) > most)).any():
            token = int(beyond.argmax())
            rollout = int(np.searchsorted(batch.offsets, token, side="right")) - 1
            raise RolloutError(
                f"Rollout {batch.rollout_ids[rollout]!r}: {name} is {values[token]} at its token "
                f"{token - batch.offsets[rollout]}; this model's losses are computed in {kind}, "
                f"up to {most:.3g}. Look for a division by nearly 0 in the code that makes it."
            )
    least = 1 / most
    cold = batch.temperatures < least
    if cold.any():
        rollout = int(cold.argmax())
        raise RolloutError(
            f"Rollout {batch.rollout_ids[rollout]!r}: temperature is "
            f"{batch.temperatures[rollout]}; this model's log-probs are computed in {kind}, where "
            f"it takes at least {least:.3g}. For greedy decoding give 1."
        )


def spread(values_n: Tensor, entries: Tensor) -> Tensor:
    """Select the values of a microbatch at `entries`. An entry of -1 gives 0.

    Gradients of shared tokens are summed.
    """
    padded = torch.cat([values_n, values_n.new_zeros(1)])
    return padded.index_select(0, entries % len(padded))


def outputs_of(per_token: Mapping[str, Tensor], entries: Tensor) -> LossOutputs:
    """Outputs of a view, from the outputs of its microbatch."""
    return LossOutputs(**{name: spread(x_n, entries) for name, x_n in per_token.items()})
