"""Configurations of models, as folders, as files and by name. Imports no torch."""

import difflib
import json
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.plan import MODELS, ModelShape, known_name
from forkpoint.plan.device_memory import total_parameters


def config_path(model: Path) -> Path:
    """The configuration of a model given as its folder or as the configuration itself.

    Raises ConfigError where there is none.
    """
    if not model.exists():
        named = "plan knows a shape by that name, but no weights. "
        named *= known_name(str(model)) is not None
        raise ConfigError(
            f"the model {model} does not exist. {named}Give a folder with config.json and weights, "
            "or a config.json alone for random weights; nothing is downloaded."
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
    """The sizes that FLOPs and bytes are counted from.

    Args:
        model: a folder, a config.json, or else a name that `known_name` knows.
        sizes: fields of the shape that no configuration has.

    Raises:
        ConfigError: the configuration does not say the sizes, or there is no such model.
        UnsupportedError: forkpoint does not know the family, so that it cannot count its cost.
    """
    if not model.exists():
        name = known_name(str(model))
        if name is None:
            near = difflib.get_close_matches(model.name.lower(), MODELS, n=1)
            perhaps = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"the model {model} does not exist, as a folder or a config.json{perhaps}; nothing "
                f"is downloaded. By their names these are known: {', '.join(MODELS)}."
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


def parameters_of_model(model: Path, shape: ModelShape) -> int:
    """The number of parameters of a model whose shape `shape_of_model` has read."""
    name = None if model.exists() else known_name(str(model))
    return total_parameters(
        read_config(config_path(model)) if name is None else MODELS[name], shape
    )


def check_family(path: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedError for a model of a family that forkpoint does not know."""
    kind = config["model_type"]
    if kind not in FAMILIES:
        text = config.get("text_config")
        inner = text.get("model_type") if isinstance(text, dict) else None
        hint = f" Its text_config is a {inner}: give that alone." if inner in FAMILIES else ""
        raise UnsupportedError(
            f"{path}: model_type {kind!r} has not been shown exact; supported are "
            f"{', '.join(FAMILIES)}.{hint}"
        )
