"""Models of torchtitan, as `ModelHost` runs them.

While microbatches run, blocks are set to "flex" attention, whose masks carry the microbatch, and
the forward of their inner attention is replaced.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.entry import Entry
from forkpoint.hosts.heads import LogprobHead, ModelHead
from forkpoint.hosts.shapes import divided
from forkpoint.hosts.titan import calls, refusals
from forkpoint.hosts.titan.families import Family, family_of, head_of, sizes_of
from forkpoint.hosts.titan.routers import ExpertCounts, Routers
from forkpoint.hosts.titan.shapes import first_mixture, model_shape, shallow_model
from forkpoint.hosts.titan.splits import (
    CONTEXT_HOOKS,
    SPLIT_HOOKS,
    as_in_blocks,
    split_modules,
    splits_sequences,
    without_hooks,
)
from forkpoint.hosts.titan.stages import (
    AbsentEmbeddings,
    absent_head,
    check_stage,
    hold_stage,
    layers_of_stage,
)
from forkpoint.hosts.torch_dist.copies import full
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import BLOCKS, BOUNDARY
from forkpoint.plan.stages import Stage
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import ShownMedia


class TitanEntry(Entry):
    """A language model of torchtitan."""

    known_hooks: tuple[Definition, ...] = (*SPLIT_HOOKS, *CONTEXT_HOOKS)

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        """`splits`: modules that are split over ranks."""
        self.core: Any = model
        self.family: Family = family_of(model)
        self._counts = ExpertCounts(self.family.version.counts)
        self._gives_positions: bool = splits_sequences(model)
        split = [module for _, module, _ in splits]
        self.head: ModelHead = LogprobHead(self._output, dict, split)
        self._hidden: Tensor | None = None
        """Hidden states that the first block here reads; None if that reads embeddings."""

    @property
    def decoder(self) -> nn.Module:
        """The model, which has no module of its own below its head."""
        return self.core

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks within torchtitan's wrappers for activation checkpointing."""
        return [refusals.within_checkpoint(block) for block in self.core.layers.values()]

    @property
    def embeddings(self) -> nn.Module:
        found = self.core.tok_embeddings
        return self._absent_embeddings if found is None else found

    @cached_property
    def _absent_embeddings(self) -> nn.Module:
        return AbsentEmbeddings(self.core)

    @cached_property
    def _absent_head(self) -> nn.Linear:
        return absent_head(self.core)

    def _output(self) -> nn.Linear:
        return self._absent_head if head_of(self.core) is None else refusals.check_head(self.core)

    @property
    def routers(self) -> Routers:
        return Routers(self.core, self.family.version)

    @property
    def code_dtype(self) -> torch.dtype:
        mixtures = [block.moe for block in self.blocks if "moe" in block._modules]
        return self.family.version.expert_dtype(mixtures[0]) if mixtures else torch.float32

    def configs(self) -> list[Any]:
        return [sizes_of(self.core)]

    def shape(self, splits: Sequence[Any]) -> ModelShape:
        shape = model_shape(self.core, self.blocks, checkpointed=self.checkpointed)
        tensor = next((s.tensor for _, _, s in splits if s.tensor is not None), None)
        if tensor is None:
            return shape
        remedy = "Choose a tensor_parallel_degree that divides both numbers of heads."
        return divided(shape, tensor.size(), remedy)

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return shallow_model(self.core, layers, device=device, dtype=dtype)

    @property
    def checkpointed(self) -> bool:
        return any(map(refusals.is_checkpointed, self.core.layers.values()))

    def check_model(self) -> None:
        check_stage(self.core)
        refusals.check_model(self.core, self.family)
        refusals.check_split_stage(self.core, split_modules(self.core))

    def hold_stage(self, stage: Stage) -> None:
        hold_stage(self.core, stage)

    @property
    def layers(self) -> tuple[range, int]:
        return layers_of_stage(self.core), sizes_of(self.core).n_layers

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        raise UnsupportedError(
            "verify has not been shown exact with stages of torchtitan's models. Verify the model "
            "without the mesh dimension 'pp', on fewer layers if need be."
        )

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        if hidden_1TC is not None:
            hidden_1TC = as_in_blocks(self.blocks[0], hidden_1TC)
        changes.set(vars(self), "_hidden", hidden_1TC)

    def check_state(self, *, training: bool, routed: bool, encodes: bool) -> None:
        if training:
            refusals.check_checkpointing(self.core)

    def check_batch(self, batch: RolloutBatch) -> None:
        if batch.media:
            raise UnsupportedError(
                "the rollouts have media, and torchtitan's models have been shown exact for text "
                "alone. Leave these rollouts out, or train them by ordinary steps."
            )
        refusals.check_rope(self.core, self.family, int(batch.lengths.max(initial=0)))

    def prepare(self, changes: Changes) -> None:
        self.family.version.give_logits(self.core, changes)
        layers = self.core.layers.values()
        again = map(refusals.is_checkpointed, layers)
        self._counts.save(zip(self.blocks, again, strict=True), changes)

    @property
    def keeps_counts(self) -> bool:
        routers, args = self.routers, sizes_of(self.core)
        if routers.found or first_mixture(args) == args.n_layers:
            return bool(routers.biases)
        # Of a stage without routers: those of the others do.
        return args.moe_args.load_balance_coeff is not None

    def add_counts(self, logical_LE: Tensor) -> None:
        self._counts.add(logical_LE)

    def attach(self, changes: Changes) -> None:
        self.allow_stock(self.code_dtype, changes)
        self.family.version.set_attention(self.blocks, changes)
        # Its hooks give logits; here it gets whole hidden states, and gives log-probs.
        without_hooks(self._output(), SPLIT_HOOKS, changes)

    def run(self, ids_1T: Tensor, positions_1T: Tensor, context: CallContext) -> Any:
        given = {calls.MASKS: calls.CarriedContext(context)}
        return self.core(ids_1T, positions=positions_1T, **given)

    def context_of(self, kwargs: dict[str, Any]) -> CallContext | None:
        found = kwargs.get(calls.MASKS)
        return found if isinstance(found, CallContext) else None

    def decode(self, ids_1T: Tensor, *, attention_masks: CallContext, positions: Tensor) -> Tensor:
        """Run all of the model below its head, as its own forward does.

        Without the head the norm does not run either (so that there are no `final_norms`):
        torchtitan gives fully_shard the two as one group, which is gathered at the norm and freed
        after the head.
        """
        hidden = self._hidden
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
            # The head gives the whole gradient on every rank. Of views fully_shard warns.
            hidden = hidden.redistribute(placements=replicated).to_local().clone()
        return hidden

    def stock(self, ids_NL: Tensor, shown: ShownMedia | None = None) -> Tensor:
        given = {}
        if self._gives_positions:
            positions_L = torch.arange(ids_NL.shape[1], device=ids_NL.device)
            given = {"positions": positions_L.expand(ids_NL.shape)}
        # A stage reads hidden states where a whole model reads tokens.
        found = full(self.core(ids_NL if self._hidden is None else self._hidden, **given))
        if head_of(self.core) is not None:
            return found
        return found.new_zeros(*ids_NL.shape, self.head.width())

    def allow_stock(self, dtype: torch.dtype, changes: Changes) -> None:
        for block in self.blocks:  # each rank has whole sequences
            attention: Any = block.attention
            without_hooks(attention.inner_attention, CONTEXT_HOOKS, changes)
