"""Stock forwards of torchtitan's models, and the same in higher precision, for references."""

from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.titan.families import head_of
from forkpoint.hosts.upcasts import lift_bfloat16, lift_upcasts
from forkpoint.rollouts.media import ShownMedia


class TitanStock:
    """The forward of a model of torchtitan, or of a copy of one: see `Stock`."""

    is_critic: bool = False

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = model

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        if keep is None:
            return self.model(ids_NL)
        output = head_of(self.model)
        own = output.forward
        with Changes() as changes:
            changes.replace_forward(output, lambda hidden: own(hidden.index_select(1, keep)))
            return self.model(ids_NL)

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        model: Any = self.model
        kept: list[Tensor] = []
        output = head_of(model)
        own = output.forward
        with Changes() as during:
            during.replace_forward(output, lambda hidden: kept.append(hidden) or hidden)
            model(ids_NL)
        changes.replace_forward(model, lambda _: output(kept[0]))
        assert output.forward == own

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        if dtype == torch.float64:
            lift_upcasts(self.model, changes)
        elif dtype == torch.float32:
            lift_bfloat16(changes)
