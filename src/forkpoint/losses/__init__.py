"""Losses, each of which declares how it decomposes over the batch."""

from forkpoint.losses.base import Denominators, Loss, LossBatch, LossOutputs, as_loss
from forkpoint.losses.dpo import DPO
from forkpoint.losses.grpo import GRPO
from forkpoint.losses.gspo import GSPO
from forkpoint.losses.likelihood import LogLikelihood

__all__ = [
    "DPO",
    "GRPO",
    "GSPO",
    "Denominators",
    "LogLikelihood",
    "Loss",
    "LossBatch",
    "LossOutputs",
    "as_loss",
]
