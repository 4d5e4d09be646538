"""Losses, each of which declares how it decomposes over the batch."""

from forkpoint.losses.base import Denominators, FunctionLoss, Loss, LossBatch, LossOutputs, as_loss
from forkpoint.losses.cispo import CISPO
from forkpoint.losses.distillation import Distillation
from forkpoint.losses.dpo import DPO, SimPO
from forkpoint.losses.gmpo import GMPO
from forkpoint.losses.grpo import BNPO, DAPO, GRPO, PPO, DrGRPO
from forkpoint.losses.gspo import GSPO
from forkpoint.losses.importance import importance_weights
from forkpoint.losses.likelihood import SFT, LogLikelihood
from forkpoint.losses.policy_loss import PolicyLoss
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.sapo import SAPO
from forkpoint.losses.value import Estimates, ValueLoss, gae

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
    "Estimates",
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
    "gae",
    "importance_weights",
]
