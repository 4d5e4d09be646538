"""Finds the language model of a multimodal model, which runs text without the encoders."""

from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import HOOKS, every_module, plain_class
from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL


def within_peft(model: nn.Module) -> Any:
    """The base model inside a PeftModel; other models are returned unchanged."""
    found: Any = model
    return found.get_base_model() if plain_class(model).__module__ == "peft.peft_model" else found


def decoder_of(core: PreTrainedModel) -> Any:
    """The decoder below the head of a language model, a critic or a multimodal model."""
    found = core.get_decoder() if core.config.model_type in MULTIMODAL else core.base_model
    # get_decoder of Llama 4's language model returns the language model itself.
    return found.model if plain_class(found).__name__ == "Llama4ForCausalLM" else found


def idle_modules(core: PreTrainedModel) -> frozenset[nn.Module]:
    """Modules that text does not run: encoders of a multimodal model, and projections of their
    features."""
    if core.config.model_type not in MULTIMODAL:
        return frozenset()
    head = cast(nn.Module, core.get_output_embeddings())
    parts = (*every_module(decoder_of(core)), *every_module(head), *_around(core))
    run = {module for _, module in parts}
    return frozenset(module for _, module in every_module(core) if module not in run)


def deep_layers(core: PreTrainedModel) -> int:
    """Number of first layers after which features of images are added (deepstack)."""
    vision = getattr(core.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def packages_of(core: PreTrainedModel) -> tuple[str, ...]:
    """Packages of transformers.models that may define a model's running modules."""
    found = []
    for kind in (core.config.model_type, decoder_of(core).config.model_type):
        family = FAMILIES.get(kind)
        found.append((family and family.package) or kind.removesuffix("_text"))
    return tuple(dict.fromkeys(found))


def check_language_model(core: PreTrainedModel) -> None:
    """Refuse a multimodal model if its language model has not been shown exact, or if there are
    hooks or forwards around the language model, because steps do not run them."""
    family = MULTIMODAL.get(core.config.model_type)
    if family is None:
        return
    kind = decoder_of(core).config.model_type
    known = family.decoders or [name for name, text in FAMILIES.items() if not text.undivided]
    if kind not in known:
        raise UnsupportedError(
            f"the language model of {plain_class(core).__name__} is a {kind!r}, which has not been "
            f"shown exact; supported are {', '.join(known)}."
        )
    for name, module in _around(core)[1:]:
        found = [hooks for hooks in HOOKS if vars(module)[hooks]]
        if isinstance(module, FSDPModule):
            found = ["fully_shard"]
        elif "forward" in vars(module):
            found = ["a custom forward"]
        if found:
            raise UnsupportedError(
                f"{name} has {found[0]}, and a step runs only the language model inside {name}. "
                "Put it on the whole model, or on the language model and its blocks."
            )


def _around(core: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The modules that contain the decoder, the core first."""
    decoder = cast(nn.Module, decoder_of(core))
    name = next(name for name, module in every_module(core) if module is decoder)
    parts = name.split(".")[:-1]
    above = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return [("", core), *((name, core.get_submodule(name)) for name in above)]
