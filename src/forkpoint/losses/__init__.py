"""Losses. Each one declares how it decomposes over the batch."""

from forkpoint.losses.base import Denominators, FunctionLoss, Loss, LossBatch, LossOutputs, as_loss
from forkpoint.losses.dpo import DPO, SimPO
from forkpoint.losses.likelihood import SFT, Distillation, LogLikelihood
from forkpoint.losses.policy_loss import (
    BNPO,
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    DrGRPO,
    PolicyLoss,
)
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.value import ValueLoss

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "DPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "PPO",
    "SAPO",
    "SFT",
    "Denominators",
    "Distillation",
    "DrGRPO",
    "FunctionLoss",
    "LogLikelihood",
    "Loss",
    "LossBatch",
    "LossOutputs",
    "PolicyLoss",
    "RouterLoss",
    "SimPO",
    "ValueLoss",
    "as_loss",
]
