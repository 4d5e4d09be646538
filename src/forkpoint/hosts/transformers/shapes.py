"""Sizes of transformers' models, by which plans are priced."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forkpoint.hosts.heads import ModelHead
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.shapes import divided
from forkpoint.hosts.transformers.linear_attention import recurrent_modules
from forkpoint.hosts.transformers.multimodal import decoder_of
from forkpoint.hosts.transformers.refusals import checkpointed_modules
from forkpoint.hosts.transformers.tensor_parallel import DISPATCHED, Split
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.mixtures import expert_activations


def model_shape(core: Any, head: ModelHead, splits: Sequence[Split]) -> ModelShape:
    """The shape of the part that this rank computes, in the model's present state.

    Raises UnsupportedError where a rank would have parts of heads.
    """
    decoder = decoder_of(core)
    sizes = decoder.config.to_dict()
    shape = ModelShape.from_config(
        sizes,
        dtype_bytes=next(decoder.parameters()).element_size(),
        checkpointed=bool(checkpointed_modules(core)),
        **({"vocab": head.width()} if head.gives == "values" else {}),
    )
    if shape.expert_layers:
        kept = expert_activations(sizes, getattr(decoder.config, "_experts_implementation", None))
        shape = replace(shape, expert_activations=kept)
    return _local_shape(shape, core, splits) if splits else shape


EXPERTS = ("MoeExpertsParallel", DISPATCHED)


def _local_shape(shape: ModelShape, core: Any, splits: Sequence[Split]) -> ModelShape:
    """The shape with heads, MLP and vocabulary as they are on one rank.

    Plans are priced by it, and prefix cache is counted by its heads. Experts that exchange tokens
    count as split: each rank sends a part of its tokens, and gets as many on average.

    Raises UnsupportedError where a rank would have parts of heads.
    """
    attention = {m for _, m in every_module(core) if "layer_idx" in vars(m)}
    attention -= set(recurrent_modules(core).values())
    inside = {child for module in attention for child in module.modules()}
    heads = any(forward.gives_part and module in inside for _, module, forward in splits)
    mlp = any(
        forward.style in EXPERTS or (forward.gives_part and module not in inside)
        for _, module, forward in splits
    )
    return divided(
        shape,
        next(how.tensor_mesh.size() for _, _, how in splits),
        "Choose a tp_size that divides both numbers of heads, or leave the rules of attention out "
        "of tp_plan.",
        heads=heads,
        mlp=mlp,
        experts=any(forward.style in EXPERTS for _, _, forward in splits),
        vocab=any(module is core.get_output_embeddings() for _, module, _ in splits),
    )
