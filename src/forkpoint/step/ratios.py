"""A warning of log-probs that are far from those that the rollouts carry."""

import logging

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.rollouts.batch import RolloutBatch

LARGE = 5.0
"""The log of a ratio that is warned of, in either direction."""
_log = logging.getLogger("forkpoint")


class Ratios:
    """Warns once in the life of a model's policies."""

    def __init__(self) -> None:
        self._warned = False

    def read(self, loss: Tensor, logprobs_T: Tensor | None, batch: RolloutBatch) -> float:
        """A step's loss, read from the device together with the largest ratio.

        logprobs_T: of the model; None of a critic.
        """
        old = batch.old_logprobs
        if self._warned or logprobs_T is None or old is None or not batch.trained_tokens:
            return float(loss)
        trained = np.flatnonzero(batch.loss_mask)
        device = logprobs_T.device
        old_t = on_device(old[trained], device, logprobs_T.dtype)
        apart_t = (logprobs_T.detach()[on_device(trained, device)] - old_t).abs()
        apart_t = apart_t.nan_to_num(0.0)  # of rollouts that did not run
        found = (loss.detach(), apart_t.max(), (apart_t >= LARGE).sum())
        value, largest, count = torch.stack([x.double() for x in found]).tolist()
        if count:
            self._warned = True
            _log.warning(
                "%d of %d trained tokens have a ratio of e^%g or more between the model's "
                "log-probs and their old_logprobs (the largest is e^%.1f). The old_logprobs may be "
                "of another model, another temperature or another tokenization, or stand at other "
                "tokens. This is said once.",
                *(count, len(trained), LARGE, largest),
            )
        return value
