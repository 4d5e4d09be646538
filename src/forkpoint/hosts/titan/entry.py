"""Models of torchtitan, as `ModelHost` runs them.

While microbatches run, blocks are set to "flex" attention, whose masks carry the microbatch, and
the forward of their inner attention is replaced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.entry import Entry, ExpertCounts, HeldStage, Stock
from forkpoint.hosts.heads import LogprobHead, ModelHead
from forkpoint.hosts.titan import refusals
from forkpoint.hosts.titan.families import (
    Family,
    blocks_of,
    family_of,
    is_checkpointed,
    model_shape,
    shallow_model,
    sizes_of,
)
from forkpoint.hosts.titan.routers import Routers, TitanCounts
from forkpoint.hosts.titan.splits import (
    CONTEXT_HOOKS,
    SPLIT_HOOKS,
    split_modules,
    splits_sequences,
    without_hooks,
)
from forkpoint.hosts.titan.stages import TitanStage
from forkpoint.hosts.titan.stock import TitanStock
from forkpoint.hosts.titan.versions import MASKS, CarriedContext
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import BLOCKS, BOUNDARY
from forkpoint.rollouts.batch import RolloutBatch


class TitanEntry(Entry):
    """A language model of torchtitan."""

    context_argument: str = MASKS
    known_hooks: tuple[Definition, ...] = (*SPLIT_HOOKS, *CONTEXT_HOOKS)

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        """`splits`: the modules that are split over ranks."""
        self.core: Any = model
        self.splits = splits
        self.family: Family = family_of(model)
        self._stage = TitanStage(model)
        self.stage: HeldStage = self._stage
        self.stock: Stock = TitanStock(model, self._stage)
        self.head: ModelHead = LogprobHead(self._stage.head, dict, [m for _, m, _ in splits])
        self.counts: ExpertCounts = TitanCounts(model, self.family.version)
        self._gives_positions: bool = splits_sequences(model)

    @property
    def decoder(self) -> nn.Module:
        """The model, because it has no separate module below its head."""
        return self.core

    @property
    def embeddings(self) -> nn.Module:
        return self._stage.embeddings

    @property
    def blocks(self) -> list[nn.Module]:
        return blocks_of(self.core)

    @property
    def routers(self) -> Routers:
        return Routers(self.core, self.family.version)

    def configs(self) -> list[Any]:
        return [sizes_of(self.core)]

    def shape(self) -> ModelShape:
        return model_shape(self.core, self.splits, checkpointed=self.checkpointed)

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return shallow_model(self.core, layers, device=device, dtype=dtype)

    @property
    def checkpointed(self) -> bool:
        return any(map(is_checkpointed, self.core.layers.values()))

    @property
    def code_dtype(self) -> torch.dtype:
        mixtures = [block.moe for block in self.blocks if "moe" in block._modules]
        return self.family.version.expert_dtype(mixtures[0]) if mixtures else torch.float32

    def check_model(self) -> None:
        self.stage.check()
        refusals.check_model(self.core, self.family)
        refusals.check_split_stage(self.core, split_modules(self.core))

    def check_training(self, *, routed: bool, encodes: bool) -> None:
        refusals.check_checkpointing(self.core)

    def check_batch(self, batch: RolloutBatch) -> None:
        refusals.check_rope(self.core, self.family, int(batch.lengths.max(initial=0)))

    def prepare(self, changes: Changes) -> None:
        self.family.version.give_logits(self.core, changes)

    def attach(self, changes: Changes) -> None:
        self.stock.allow(self.code_dtype, changes)
        self.family.version.set_attention(self.blocks, changes)
        # The head's hooks convert hidden states to and from DTensors. Here it gets whole hidden
        # states and returns log-probs.
        without_hooks(self._stage.head(), SPLIT_HOOKS, changes)

    def run(self, ids_1T: Tensor | None, positions_1T: Tensor | None, context: Any) -> Any:
        given = {MASKS: CarriedContext(context)}
        return self.core(ids_1T, positions=positions_1T, **given)

    def decode(self, ids_1T: Tensor, *, attention_masks: CallContext, positions: Tensor) -> Tensor:
        """Run all of the model below its head, as its own forward does.

        Without the head, the norm does not run either, so there are no `final_norms`: torchtitan
        makes the two one group of fully_shard, which is gathered at the norm and freed after the
        head.
        """
        hidden = self._stage.hidden
        if hidden is None:
            hidden = self.core.tok_embeddings(ids_1T)
        hidden = self.family.version.run_blocks(
            self.core,
            hidden,
            positions,
            attention_masks,
            self.family.rope,
            split=self._gives_positions,
        )
        if attention_masks.instruction.ends_at in (BOUNDARY, BLOCKS):
            return hidden.to_local().clone() if isinstance(hidden, DTensor) else hidden
        hidden = self.core.norm(hidden)
        if isinstance(hidden, DTensor):  # ranks have parts of the sequence
            replicated = [Replicate()] * hidden.device_mesh.ndim
            # The head's gradient is whole on every rank. fully_shard warns of views.
            hidden = hidden.redistribute(placements=replicated).to_local().clone()
        return hidden
