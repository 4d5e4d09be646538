"""Routers of torchtitan's mixtures of experts, and the counts by which it balances their load."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.routers import ModelRouters

ROUTER = "TokenChoiceTopKRouter"


class Routers(ModelRouters):
    """The routers of a model, in the order of its layers."""

    # Scores of the chosen experts, their first output, stand for logits: no loss is defined.
    chosen_output: int = 1
    defines_loss: bool = False
    coefficient: float = 0.0

    def __init__(self, model: nn.Module) -> None:
        self.found: list[FoundRouter] = [
            FoundRouter(name, module)
            for name, module in every_module(model)
            if type(module).__name__ == ROUTER
        ]
        self.layers: int = len(self.found)
        names = (name.rpartition(".")[0] for name in (r.name for r in self.found))
        self._experts: list[Any] = [model.get_submodule(name) for name in names]

    @property
    def experts(self) -> int:
        """Among how many experts each chooses."""
        return int(self._experts[0].router.num_experts) if self.found else self.elsewhere_experts

    @property
    def chosen(self) -> int | None:
        """To how many experts a token is sent."""
        return int(self._experts[0].router.top_k) if self.found else None

    @property
    def biases(self) -> list[Tensor]:
        return [moe.expert_bias for moe in self._experts if moe.expert_bias is not None]


class ExpertCounts:
    """The buffers in which torchtitan's forwards count tokens for each expert.

    A step leaves in them what ordinary training would: a token counts once for every rollout
    through it. Forwards within the step count otherwise, and are not kept.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, int]] = []
        """Buffers, their values before the step (and then after it), and how often ordinary
        training counts a token: twice where its backward runs the block again. The optimizer's
        hook halves that."""

    def save(self, blocks: Iterable[tuple[Any, bool]], changes: Changes) -> None:
        """Put the buffers back when the changes are undone. blocks: whether each is run again."""
        self._before = []
        for block, again in blocks:
            if "moe" not in block._modules:
                continue
            buffer = block.moe.tokens_per_expert
            before = buffer.clone()
            self._before.append((buffer, before, 2 if again else 1))
            changes.later(buffer.copy_, before)

    @torch.no_grad()
    def add(self, logical_LE: Tensor) -> None:
        """Add a step's counts, int64 [L, E], to what the buffers have after it."""
        for (_, before, times), counts_E in zip(self._before, logical_LE, strict=True):
            before += times * counts_E.to(before)
