"""The part of a decoder that one rank computes, where transformers splits it over ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.linear_attention import recurrent_modules
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.parallel_forwards import DISPATCHED, ParallelForward
from forkpoint.plan.pricing.cost import ModelShape

EXPERTS = ("MoeExpertsParallel", DISPATCHED)


def local_shape(
    shape: ModelShape,
    causal: Any,
    splits: Sequence[tuple[str, nn.Module, ParallelForward]],
) -> ModelShape:
    """The shape with heads, MLP and vocabulary as they are on one rank.

    Plans are priced by it, and prefix cache is counted by its heads. Experts that exchange tokens
    count as split: each rank sends a part of its tokens, and gets as many on average.

    Raises UnsupportedError where a rank would have parts of heads.
    """
    size = splits[0][2].tensor_mesh.size()
    attention = {m for _, m in every_module(causal) if "layer_idx" in vars(m)}
    attention -= set(recurrent_modules(causal).values())
    inside = {child for module in attention for child in module.modules()}
    heads = any(forward.gives_part and module in inside for _, module, forward in splits)
    mlp = any(
        forward.style in EXPERTS or (forward.gives_part and module not in inside)
        for _, module, forward in splits
    )
    changes: dict[str, int | None] = {}
    if heads:
        for name, count in (("query", shape.heads), ("key-value", shape.kv_heads)):
            if count % size:
                raise UnsupportedError(
                    f"the model has {count} {name} heads, which are split over {size} ranks: some "
                    "would have parts of a head. Choose a tp_size that divides both numbers of "
                    "heads, or leave the rules of attention out of tp_plan."
                )
        changes = {"heads": shape.heads // size, "kv_heads": shape.kv_heads // size}
        if shape.attention_parameters is not None:
            changes["attention_parameters"] = shape.attention_parameters // size
        changes["attention_activations"] = shape.attention_activations // size
    if any(forward.style in EXPERTS for _, _, forward in splits):
        changes["expert_activations"] = shape.expert_activations // size
    if mlp:
        changes["intermediate"] = shape.intermediate // size
    if any(module is causal.get_output_embeddings() for _, module, _ in splits):
        changes["vocab"] = -(-shape.vocab // size)
    return replace(shape, **changes)  # type: ignore[arg-type]
