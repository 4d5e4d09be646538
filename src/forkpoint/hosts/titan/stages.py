"""Pipeline stages of torchtitan's models. A stage is the model without the modules of other stages,
as in torchtitan's own pipelines. Layers keep their indices."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.entry import HeldStage
from forkpoint.hosts.titan.families import blocks_of, family_of, head_of, sizes_of
from forkpoint.hosts.titan.refusals import check_head
from forkpoint.hosts.titan.splits import as_in_blocks
from forkpoint.plan.stages import Stage


class TitanStage(HeldStage):
    """The stage that a model of torchtitan holds."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.hidden: Tensor | None = None
        """Input of the stage's first block; None if that reads embeddings."""

    @property
    def layers(self) -> tuple[range, int]:
        numbers = sorted(map(int, self.model.layers))
        held = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        return held, sizes_of(self.model).n_layers

    @property
    def embeddings(self) -> nn.Module:
        """The model's embeddings, or a substitute if another stage has them."""
        found = self.model.tok_embeddings
        return self._absent_embeddings if found is None else found

    @cached_property
    def _absent_embeddings(self) -> nn.Module:
        return AbsentEmbeddings(self.model)

    def head(self) -> nn.Linear:
        """The model's head, or a substitute without memory if another stage has it."""
        return self._absent_head if head_of(self.model) is None else check_head(self.model)

    @cached_property
    def _absent_head(self) -> nn.Linear:
        args, dtype = sizes_of(self.model), next(self.model.parameters()).dtype
        return nn.Linear(args.dim, args.vocab_size, bias=False, device="meta", dtype=dtype)

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        if hidden_1TC is not None:
            hidden_1TC = as_in_blocks(blocks_of(self.model)[0], hidden_1TC)
        changes.set(vars(self), "hidden", hidden_1TC)

    def check(self) -> None:
        """Raise UnsupportedError if embeddings, norm and head do not fit the stage's layers, or if
        stages share a weight."""
        model, (held, _) = self.model, self.layers
        args, head = sizes_of(model), family_of(model).version.head
        if len(held) < args.n_layers:
            _refuse_tied(args)
        first, last = held.start == 0, held.stop == args.n_layers
        wanted = {"tok_embeddings": first, "norm": last, head: last}
        found = {name: getattr(model, name) is not None for name in wanted}
        if found != wanted or not held or len(held) != len(model.layers):
            has = [name for name, there in found.items() if there]
            raise UnsupportedError(
                f"the model has layers {', '.join(model.layers)} of {args.n_layers} and "
                f"{', '.join(has) or 'no more'}: it is no stage of a pipeline of torchtitan. Set "
                "pipeline_parallel_schedule = '1F1B', or use forkpoint.cut(model, mesh)."
            )

    def hold(self, stage: Stage) -> None:
        """Drop the modules of other stages. If torchtitan has cut the model, nothing changes.

        Raises UnsupportedError if stages would share weights.
        """
        model, args = self.model, sizes_of(self.model)
        _refuse_tied(args)
        if len(model.layers) < args.n_layers:
            return
        wanted = range(stage.first_layer, stage.first_layer + stage.layers)
        for number in range(args.n_layers):
            if number not in wanted:
                del model.layers[str(number)]
        if not stage.is_first:
            model.tok_embeddings = None
        if not stage.is_last:
            model.norm = None
            setattr(model, family_of(model).version.head, None)

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        raise UnsupportedError(
            "verify has not been shown exact with stages of torchtitan's models. Verify the model "
            "without the mesh dimension 'pp', on fewer layers if need be."
        )


def _refuse_tied(args: Any) -> None:
    if getattr(args, "enable_weight_tying", False):
        raise UnsupportedError(
            "the model's arguments have enable_weight_tying, and the first and the last stage of a "
            "pipeline would both have the weight, which has not been shown exact with torchtitan. "
            "Train a model whose weights are not tied."
        )


class AbsentEmbeddings(nn.Module):
    """Substitute for embeddings of another stage: a weight of zeros without memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        one = next(model.parameters())
        args = sizes_of(model)
        zero = torch.zeros((), dtype=one.dtype, device=one.device)
        self.weight: torch.Tensor = zero.expand(args.vocab_size, args.dim)
