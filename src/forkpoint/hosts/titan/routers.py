"""Routers of torchtitan's mixtures of experts, and the counts by which it balances their load."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.routers import ModelRouters
from forkpoint.hosts.titan.versions import Version
from forkpoint.hosts.torch_dist.copies import full

ROUTER = "TokenChoiceTopKRouter"


class Routers(ModelRouters):
    """The routers of a model, in the order of its layers."""

    # Scores of the chosen experts, their first output, stand for logits: no loss is defined.
    chosen_output: int = 1

    def __init__(self, model: nn.Module, version: Version) -> None:
        self.found: list[FoundRouter] = [
            FoundRouter(name, module, version.score_dimensions)
            for name, module in every_module(model)
            if type(module).__name__ == ROUTER
        ]
        self.layers: int = len(self.found)
        names = (name.rpartition(".")[0] for name in (r.name for r in self.found))
        self._experts: list[Any] = [model.get_submodule(name) for name in names]
        self._bias: str = version.bias

    @property
    def experts(self) -> int:
        return int(self._experts[0].router.num_experts) if self.found else self.elsewhere_experts

    @property
    def chosen(self) -> int | None:
        return int(self._experts[0].router.top_k) if self.found else None

    @property
    def biases(self) -> list[Tensor]:
        found = (getattr(moe, self._bias) for moe in self._experts)
        return [full(bias) for bias in found if bias is not None]


class ExpertCounts:
    """The buffers in which torchtitan's forwards count tokens for each expert.

    A step leaves in them what ordinary training would: a token counts once for every rollout
    through it. Forwards within the step count otherwise, and are not kept.
    """

    def __init__(self, buffer: str) -> None:
        """buffer: its name in a mixture."""
        self._buffer = buffer
        self._before: list[tuple[Tensor, Tensor, int]] = []
        """Buffers, their values before the step (and then after it), and how often ordinary
        training counts a token: twice where its backward runs the block again (the optimizer's
        hook halves that), never where another rank's buffer has the counts of both."""

    def save(self, blocks: Iterable[tuple[Any, bool]], changes: Changes) -> None:
        """Put the buffers back when the changes are undone. blocks: whether each is run again."""
        self._before = []
        for block, again in blocks:
            if "moe" not in block._modules:
                continue
            buffer = block.moe.get_buffer(self._buffer)
            times = 2 if again else 1
            if isinstance(buffer, DTensor):
                if not _has_counts(buffer):
                    times = 0
                buffer = buffer.to_local()
            before = buffer.clone()
            self._before.append((buffer, before, times))
            changes.later(buffer.copy_, before)

    @torch.no_grad()
    def add(self, logical_LE: Tensor) -> None:
        """Add a step's counts, int64 [L, E], to what the buffers have after it."""
        for (_, before, times), counts_E in zip(self._before, logical_LE, strict=True):
            before += times * counts_E.to(before)


def _has_counts(buffer: DTensor) -> bool:
    """Whether this rank's part of a buffer has the counts, where ranks' parts are summed."""
    where = buffer.device_mesh.get_coordinate()
    assert where is not None
    return not any(
        place and kind.is_partial() for place, kind in zip(where, buffer.placements, strict=True)
    )
