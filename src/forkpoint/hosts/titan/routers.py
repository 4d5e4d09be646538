"""Routers of torchtitan's mixtures of experts, and the counts with which it balances their load."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.hosts.entry import ExpertCounts
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.routers import ModelRouters
from forkpoint.hosts.titan.families import blocks_of, first_mixture, is_checkpointed, sizes_of
from forkpoint.hosts.titan.versions import Version
from forkpoint.hosts.torch_dist.copies import full

ROUTER = "TokenChoiceTopKRouter"


class Routers(ModelRouters):
    """The routers of a model, in the order of its layers."""

    # The first output, scores of the chosen experts, is passed as logits. It is not used, because
    # torchtitan defines no router loss.
    chosen_output: int = 1

    def __init__(self, model: nn.Module, version: Version) -> None:
        self.found: Sequence[FoundRouter] = [
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


class TitanCounts(ExpertCounts):
    """The buffers in which torchtitan's forwards count tokens for each expert.

    After a step they have the counts of ordinary training: a token counts once for each of its
    rollouts. Counts of the step's own forwards are discarded.
    """

    def __init__(self, model: Any, version: Version) -> None:
        self._model = model
        self._version = version
        self._before: list[tuple[Tensor, Tensor, int]] = []
        """Buffers, their values before the step (`add` makes these the values after it), and how
        often ordinary training counts a token: 2 if its backward recomputes the block (the
        optimizer's hook halves these counts), 0 if another rank's buffer has this rank's counts."""

    @property
    def kept(self) -> bool:
        routers, args = Routers(self._model, self._version), sizes_of(self._model)
        if routers.found or first_mixture(args) == args.n_layers:
            return bool(routers.biases)
        # This stage has no routers; other stages have some.
        return args.moe_args.load_balance_coeff is not None

    def save(self, changes: Changes) -> None:
        self._before = []
        layers = self._model.layers.values()
        for layer, block in zip(layers, blocks_of(self._model), strict=True):
            moe: Any = block._modules.get("moe")
            if moe is None:
                continue
            buffer = moe.get_buffer(self._version.counts)
            times = 2 if is_checkpointed(layer) else 1
            if isinstance(buffer, DTensor):
                if not _has_counts(buffer):
                    times = 0
                buffer = buffer.to_local()
            before = buffer.clone()
            self._before.append((buffer, before, times))
            changes.later(buffer.copy_, before)

    @torch.no_grad()
    def add(self, logical_LE: Tensor) -> None:
        for (_, before, times), counts_E in zip(self._before, logical_LE, strict=True):
            before += times * counts_E.to(before)


def _has_counts(buffer: DTensor) -> bool:
    """Whether this rank's part of a buffer has the counts, if the parts of ranks are summed."""
    where = buffer.device_mesh.get_coordinate()
    assert where is not None
    return not any(
        place and kind.is_partial() for place, kind in zip(where, buffer.placements, strict=True)
    )
