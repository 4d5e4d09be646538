"""Values of a pass by token of the batch, and rollouts whose values no loss is shown."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.host import HeadOutputs
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.plan.plan import Plan
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray


class TokenValues:
    """Values of the head at trained tokens, [T] by name: 0 at other tokens, NaN at trained ones
    that the plan leaves out."""

    def __init__(
        self,
        names: Sequence[str],
        plan: Plan,
        batch: RolloutBatch,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count = plan.logical_tokens
        self.by_name: dict[str, Tensor] = {
            name: torch.zeros(count, dtype=dtype, device=device) for name in names
        }
        self._device = device
        away = np.flatnonzero(batch.loss_mask & ~labels_run(batch.offsets, plan.run_lengths))
        if len(away):
            tokens = on_device(away, device)
            for values_T in self.by_name.values():
                values_T[tokens] = torch.nan

    def collect(self, inputs: MicrobatchInputs, outputs: HeadOutputs) -> None:
        """Take those of a microbatch."""
        if not len(inputs.trained_tokens):
            return
        tokens = on_device(inputs.trained_tokens, self._device)
        entries = on_device(inputs.trained_entry, self._device)
        for name, values_T in self.by_name.items():
            values_T[tokens] = outputs.per_token[name].detach()[entries]


def shown_rollouts(plan: Plan, batch: RolloutBatch, coupling: IntArray) -> NDArray[np.bool_]:
    """The rollouts that a loss is shown: bool [N].

    All but those of which the plan leaves out trained tokens, and those coupled with them, whose
    terms the loss has declared to be 0.

    coupling: int64 [N], equal for rollouts that the loss couples.
    """
    whole = batch.where_all_trained(labels_run(batch.offsets, plan.run_lengths))
    return ~np.isin(coupling, coupling[~whole])
