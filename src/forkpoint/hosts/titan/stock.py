"""Stock forwards of torchtitan's models, also in higher precision, for comparisons."""

from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.entry import Stock
from forkpoint.hosts.titan.families import blocks_of, head_of
from forkpoint.hosts.titan.splits import CONTEXT_HOOKS, splits_sequences, without_hooks
from forkpoint.hosts.titan.stages import TitanStage
from forkpoint.hosts.torch_dist.copies import full
from forkpoint.hosts.upcasts import lift_bfloat16, lift_upcasts
from forkpoint.rollouts.media import ShownMedia


class TitanStock(Stock):
    """The stock forward of a model of torchtitan or a copy."""

    def __init__(self, model: nn.Module, stage: TitanStage | None = None) -> None:
        """`stage`: the stage that the model holds."""
        self.model: nn.Module = model
        self._stage: TitanStage = stage or TitanStage(model)
        self._gives_positions: bool = splits_sequences(model)

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        head, hidden, given = head_of(self.model), self._stage.hidden, {}
        if self._gives_positions:
            positions_L = torch.arange(ids_NL.shape[1], device=ids_NL.device)
            given = {"positions": positions_L.expand(ids_NL.shape)}
        with Changes() as changes:
            if keep is not None:
                own = head.forward
                changes.replace_forward(head, lambda hidden: own(hidden.index_select(1, keep)))
            # A later stage reads hidden states instead of tokens.
            found = full(self.model(ids_NL if hidden is None else hidden, **given))
        if head is None:
            return found.new_zeros(*ids_NL.shape, self._stage.head().out_features)
        return found

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        model: Any = self.model
        kept: list[Tensor] = []
        output = head_of(model)
        with Changes() as during:
            during.replace_forward(output, lambda hidden: kept.append(hidden) or hidden)
            model(ids_NL)
        changes.replace_forward(model, lambda _: output(kept[0]))

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        if dtype == torch.float64:
            lift_upcasts(self.model, changes)
        elif dtype == torch.float32:
            lift_bfloat16(changes)

    def allow(self, dtype: torch.dtype, changes: Changes) -> None:
        for block in blocks_of(self.model):  # each rank has whole sequences
            attention: Any = block.attention
            without_hooks(attention.inner_attention, CONTEXT_HOOKS, changes)
