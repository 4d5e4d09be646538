"""A stage of torchtitan's models: the model without the modules of other stages, as torchtitan's
own pipelines cut it. Layers keep their numbers."""

from typing import Any

import torch
from torch import nn

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.titan.families import family_of, sizes_of
from forkpoint.plan.stages import Stage


def layers_of_stage(model: Any) -> range:
    """The numbers of the layers that this rank holds."""
    numbers = sorted(map(int, model.layers))
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def hold_stage(model: Any, stage: Stage) -> None:
    """Drop what other stages hold. Where torchtitan has cut the model, layers stay where they are.

    Raises UnsupportedError where stages would share weights.
    """
    args = sizes_of(model)
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


def check_stage(model: Any) -> None:
    """Raise UnsupportedError where embeddings, norm or head are not those of the stage's layers, or
    stages share a weight."""
    held, args, head = layers_of_stage(model), sizes_of(model), family_of(model).version.head
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


def _refuse_tied(args: Any) -> None:
    if getattr(args, "enable_weight_tying", False):
        raise UnsupportedError(
            "the model's arguments have enable_weight_tying, and the first and the last stage of a "
            "pipeline would both have the weight, which has not been shown exact with torchtitan. "
            "Train a model whose weights are not tied."
        )


class AbsentEmbeddings(nn.Module):
    """In place of embeddings of another stage: a weight of zeros without memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        one = next(model.parameters())
        args = sizes_of(model)
        zero = torch.zeros((), dtype=one.dtype, device=one.device)
        self.weight: torch.Tensor = zero.expand(args.vocab_size, args.dim)


def absent_head(model: Any) -> nn.Linear:
    """In place of a head of another stage: one without memory."""
    args, dtype = sizes_of(model), next(model.parameters()).dtype
    return nn.Linear(args.dim, args.vocab_size, bias=False, device="meta", dtype=dtype)
