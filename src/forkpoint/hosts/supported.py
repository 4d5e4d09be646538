"""The model of transformers within what was given, where its family has been shown exact."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.families import FAMILIES
from forkpoint.hosts.modules import plain_class
from forkpoint.rollouts.batch import short


def supported_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model within, or a refusal that names what was found."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{short(model)} of type {type(model).__name__} is no model; wrap takes one in memory, "
            "as AutoModelForCausalLM.from_pretrained makes it, and downloads nothing."
        )
    inner: Any = model
    if plain_class(model).__module__.split(".")[0] == "peft":
        refusals.check_adapters(model)
        inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"{type(inner).__module__}.{type(inner).__name__} is not a transformers model; wrap "
            "the model itself, which fully_shard or DistributedDataParallel may hold."
        )
    family = FAMILIES.get(inner.config.model_type)
    kind = plain_class(inner)
    stock = kind.__module__.startswith("transformers.models.")
    name = kind.__name__
    if family is not None and stock and name == family.critic_class:
        refusals.check_critic(inner)
    elif family is None or not stock or name != family.model_class:
        raise UnsupportedError(
            f"{kind.__module__}.{name} (model_type "
            f"{inner.config.model_type!r}) has not been shown exact; supported are "
            f"{', '.join(f.model_class for f in FAMILIES.values())} of transformers, not "
            "subclasses of them, and as critics their ForTokenClassification with one label."
            f"{_text_model_of(inner) if stock else ''}"
        )
    return inner


def _text_model_of(model: PreTrainedModel) -> str:
    """For a model that sees images as well, how to load the part that has been shown exact, where
    that class reads the whole model's weights (of most families it does not)."""
    text = getattr(model.config, "text_config", None)
    family = FAMILIES.get(getattr(text, "model_type", ""))
    if family is None or not family.media or family.package != model.config.model_type:
        return ""
    return (
        f" Load its text model alone, as {family.model_class}.from_pretrained does from the same "
        "folder."
    )
