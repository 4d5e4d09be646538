"""Sizes of transformers' models, for prices of plans, and models of few layers for measurements."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from forkpoint.hosts.heads import ModelHead
from forkpoint.hosts.modules import every_module
from forkpoint.hosts.shapes import divided
from forkpoint.hosts.transformers.encoders import TransformersEncoder
from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL
from forkpoint.hosts.transformers.linear_attention import recurrent_modules
from forkpoint.hosts.transformers.multimodal import decoder_of
from forkpoint.hosts.transformers.refusals import checkpointed_modules
from forkpoint.hosts.transformers.tensor_parallel import DISPATCHED, Split
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.pricing.mixtures import expert_activations


def model_shape(core: Any, head: ModelHead, splits: Sequence[Split]) -> ModelShape:
    """The shape of the part that this rank computes, in the model's present state.

    Raises UnsupportedError if the heads cannot be divided evenly over the ranks.
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
    """The shape with one rank's heads, MLP and vocabulary.

    Plans are priced by this shape, and bytes of prefix caches are counted from its heads. Experts
    that exchange tokens count as split, because each rank sends a part of its tokens and receives
    as many on average.

    Raises UnsupportedError if the heads cannot be divided evenly over the ranks.
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
        next(how.tensor.size() for _, _, how in splits),
        "Choose a tp_size that divides both numbers of heads, or leave the rules of attention out "
        "of tp_plan.",
        heads=heads,
        mlp=mlp,
        experts=any(forward.style in EXPERTS for _, _, forward in splits),
        vocab=any(module is core.get_output_embeddings() for _, module, _ in splits),
    )


VOCABULARY = 1024
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shallow_model(
    config: dict[str, Any], layers: int, *, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A model with few layers and a small vocabulary from a configuration, in training mode.

    Its weights are random, and made on the device. The state of random number generators is
    restored.

    config: the keys of a config.json. For a multimodal model, only its language model is shallow
        and used.
    """
    auto: Any = AutoModelForCausalLM
    outer = config if config["model_type"] in MULTIMODAL else None
    changed = _shallow(outer["text_config"] if outer else config, layers)
    if outer and changed["model_type"] not in FAMILIES:
        # The language model has no class without the multimodal one.
        auto = AutoModelForImageTextToText
        vision = {**outer["vision_config"], "depth": 1}
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = []
        changed = {**outer, "text_config": changed, "vision_config": vision}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        model = auto.from_config(AutoConfig.for_model(**changed), dtype=dtype)
    if dtype == torch.float64:  # the default's grouped products of experts have no float64
        model.set_experts_implementation("eager")
    return model.train()


def encoder_sizes(
    config: PretrainedConfig, *, checkpointed: bool
) -> tuple[EncoderShape | None, int]:
    """Sizes of the encoder of a multimodal configuration, and its number of parameters.

    The model is made on the device "meta", without memory for weights.
    """
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).train()
    if checkpointed:
        enable_checkpointing(model)
    encoder = TransformersEncoder(model)
    parameters = {p: p.numel() for m in encoder.modules for p in m.parameters(recurse=False)}
    return encoder.shape(), sum(parameters.values())


def enable_checkpointing(model: Any) -> None:
    """Enable activation checkpointing of blocks."""
    # Newer transformers warn of the old name; both take the same first argument.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _shallow(config: dict[str, Any], layers: int) -> dict[str, Any]:
    changed = {**config, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    changed |= dict.fromkeys(OF_TOKENS)
    if config.get("output_router_logits"):
        changed["output_router_logits"] = False  # steps without a router loss are refused
    for name in ("layer_types", "no_rope_layers"):
        if kinds := config.get(name):
            # More layers than the model has repeat its pattern.
            changed[name] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if mixed := config.get("moe_layers"):
        count = config["num_hidden_layers"]
        changed["moe_layers"] = [layer for layer in range(layers) if layer % count in mixed]
    if config["model_type"] == "gemma4_text":
        changed["vocab_size_per_layer_input"] = VOCABULARY
        # Layers that read keys and values of other layers need such layers before them.
        changed["num_kv_shared_layers"] = 0
        changed["layer_types"][-1] = "full_attention"  # as its configuration demands
        if "per_layer_config" in config:
            wide = next(iter(config["per_layer_config"].values()), {})
            kinds = enumerate(changed["layer_types"])
            changed["per_layer_config"] = {n: wide for n, k in kinds if k == "full_attention"}
    return changed
