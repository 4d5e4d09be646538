"""Configurations of models, as folders, as files and by name. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from forkpoint.apps.cli.suggestions import suggested
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.plan import MODELS, ModelShape, known_name


def config_path(model: Path) -> Path:
    """The configuration of a model given as its folder or as the configuration itself.

    Raises ConfigError where there is none.
    """
    if not model.exists():
        named = "By that name a shape is known, which plan and report can count with and nothing "
        named = f"{named}can run. " if known_name(str(model)) else ""
        raise ConfigError(
            f"the model {model} does not exist. {named}Give a folder with a transformers model's "
            "config.json and weights, or a config.json alone for random weights; nothing is "
            "downloaded."
        )
    if not model.is_dir():
        return model
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"the folder {model} has no config.json. Give the folder that a model's "
            "save_pretrained wrote."
        )
    return model / "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """A model configuration as transformers writes it.

    Raises ConfigError for a file that is none.
    """
    try:
        # Not the strict JSON of forkpoint's own files: transformers writes infinities.
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). Give a config.json as transformers writes it."
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{path} is no model configuration: it has no model_type. Give a config.json as "
            'transformers writes it, with "model_type": "qwen3", say.'
        )
    return config


def shape_of_model(model: Path, **sizes: Any) -> ModelShape:
    """The sizes that FLOPs and bytes are counted from: of a configuration, or of a model by name.

    A folder or file of that name comes first; a name is then one that `known_name` knows. `sizes`
    are fields of the shape that no configuration has.

    Raises ConfigError where the configuration does not say them, and for what is neither; and
    UnsupportedError for a family that forkpoint does not know, whose cost it cannot count.
    """
    if not model.exists():
        name = known_name(str(model))
        if name is None:
            raise ConfigError(
                f"the model {model} does not exist, as a folder or a config.json"
                f"{suggested(model.name, MODELS)}; nothing is downloaded. By their names these are "
                f"known: {', '.join(MODELS)}."
            )
        return ModelShape.from_config(MODELS[name], **sizes)
    path = config_path(model)
    config = read_config(path)
    check_family(path, config)
    # What a left out key means is known to the model's code alone, which would need torch.
    needed = ["num_key_value_heads", "head_dim"] if config["model_type"] != "llama" else []
    needed += ["layer_types"] if config.get("use_sliding_window") else []
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ConfigError(
            f"{path} has no {', '.join(missing)}, whose default depends on the model. Add it, or "
            "give the config.json that save_pretrained writes."
        )
    try:
        return ModelShape.from_config(config, **sizes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_family(path: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedError for a model of a family that forkpoint does not know."""
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model_type {kind!r} has not been shown exact; supported are "
            f"{', '.join(FAMILIES)}.{_text_part(config)}"
        )


def _text_part(config: dict[str, Any]) -> str:
    """Where a configuration has one of a known text model within it."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        return ""
    return f" Its text_config is a {kind}: give that alone."
