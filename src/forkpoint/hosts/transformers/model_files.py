"""Reads configurations of models from folders, from files and by name.

Imports torch only for multimodal configurations, and for those that lack sizes of attention.
"""

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError, ForkpointError, UnsupportedError
from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL
from forkpoint.plan import MODELS, ModelShape, known_name
from forkpoint.plan.device_memory import embedding_parameters, total_parameters
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError, read_small

MOST_BYTES = 1 << 24
"""Largest config.json that is read."""


def read_config(model: Path, *, multimodal: bool = False) -> tuple[Path, dict[str, Any]]:
    """Find and read a model's configuration. Returns its path and contents.

    Raises:
        ConfigError: there is no configuration.
        UnsupportedError: forkpoint does not know the family.
    """
    if not model.exists():
        raise ConfigError(
            f"the model {model} does not exist, as a folder or a config.json{_near(model)}; "
            "nothing is downloaded. plan knows these by name, without weights: "
            f"{', '.join(MODELS)}."
        )
    path = model / "config.json" if model.is_dir() else model
    if not path.exists() or path.is_dir():
        raise ConfigError(
            f"the folder {model} has no config.json. Give the folder that a model's "
            "save_pretrained wrote."
        )
    try:
        # Not the strict JSON of forkpoint's own files: transformers writes infinities.
        config = json.loads(read_small(path, MOST_BYTES).decode(), object_hook=_infinity)
    except SchemaError as error:
        raise ConfigError(
            f"{path} is {error}. Give a config.json as transformers writes it."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). Give a config.json as transformers writes it."
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{path} is no model configuration: it has no model_type. Give a config.json as "
            'transformers writes it, with "model_type": "qwen3", say.'
        )
    kind, text = config["model_type"], config.get("text_config")
    if kind not in FAMILIES and not (multimodal and kind in MULTIMODAL):
        inner = text.get("model_type") if isinstance(text, dict) else None
        hint = f" Its text_config is a {inner}: give that alone." if inner in FAMILIES else ""
        raise UnsupportedError(
            f"{path}: model_type {kind!r} has not been shown exact; supported are "
            f"{', '.join(FAMILIES)}.{hint}"
        )
    return path, config


def _infinity(found: dict[str, Any]) -> Any:
    """The number of an object by which transformers writes an infinity."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _near(model: Path) -> str:
    name = model.name.lower()
    near = difflib.get_close_matches(name, MODELS, n=1)
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def from_hub(model: Path) -> Path:
    """Download the config.json of a name on the Hub (OWNER/NAME). Other paths are returned
    unchanged.

    Existing paths and names that `known_name` knows are not looked up. Only that file is
    downloaded.

    Raises:
        ConfigError: the Hub does not give it.
    """
    name = model.as_posix()
    if model.exists() or _known(model) is not None or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return model
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # of many classes: offline, no such name, no access
        reason = f"{type(error).__name__}: {short(str(error))}"
        raise ConfigError(
            f"the model {model} does not exist here{_near(model)}, and the Hub gives no "
            f"config.json of it ({reason}). Give a folder, a config.json or another name."
        ) from None


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer of transformers from a folder or by its name on the Hub. Remote code is not
    run.

    Raises:
        ConfigError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"tokenizer {name} cannot be read: {short(str(error))}. Give a tokenizer.json, the "
            "folder that save_pretrained wrote, or a name on the Hub."
        ) from None


def shape_of_model(model: Path, **sizes: Any) -> ModelShape:
    """Sizes of a model from which FLOPs and bytes are counted.

    Args:
        model: a folder, a config.json, or else a name that `known_name` knows.
        sizes: fields of the shape that configurations do not have.

    Raises as `read_config`, and ConfigError if sizes are missing in the configuration.
    """
    if (known := _known(model)) is not None:
        return ModelShape.from_config(known, **sizes)
    path, config = read_config(model, multimodal=True)
    config = _language_model(path, config)
    try:
        return ModelShape.from_config(config, **sizes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parameters_of_model(model: Path, shape: ModelShape) -> tuple[int, int]:
    """Number of all parameters, and of the embeddings' parameters, of a model with this shape.

    Encoders of multimodal models are included.
    """
    config, encoder = _known(model), 0
    if config is None:
        path, config = read_config(model, multimodal=True)
        if config["model_type"] in MULTIMODAL:
            _, encoder = _encoder(path, config, checkpointed=False)
        config = _language_model(path, config)
    return total_parameters(config, shape) + encoder, embedding_parameters(config, shape)


def encoder_of_model(
    model: Path, *, dtype_bytes: int, checkpointed: bool = False
) -> EncoderShape | None:
    """Sizes of a model's encoder of images or video; None if its media are refused.

    Args:
        model: a folder, a config.json, or else a name that `known_name` knows.
        checkpointed: whether its blocks are recomputed in the backward.

    Raises as `read_config`, and ConfigError if transformers cannot make the model.
    """
    if _known(model) is not None:
        return None
    path, config = read_config(model, multimodal=True)
    if config["model_type"] not in MULTIMODAL:
        return None
    shape, _ = _encoder(path, config, checkpointed=checkpointed)
    return None if shape is None else replace(shape, dtype_bytes=dtype_bytes)


def _language_model(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, with the defaults of its family.

    Raises UnsupportedError if it has not been shown exact.
    """
    if config["model_type"] in FAMILIES:
        needed = ["layer_types"] if config.get("use_sliding_window") else []
        if config["model_type"] != "llama":  # others have defaults of their own
            needed += ["num_key_value_heads", "head_dim", "tie_word_embeddings"]
        lacks = any(config.get(key) is None for key in needed)
        return read_by_transformers(path, config).to_dict() if lacks else config
    whole = read_by_transformers(path, config)
    text = whole.get_text_config()
    kinds = MULTIMODAL[config["model_type"]].decoders or tuple(FAMILIES)
    if text.model_type not in kinds:
        raise UnsupportedError(
            f"{path}: the language model is a {text.model_type!r}, which has not been shown exact; "
            f"supported are {', '.join(kinds)}."
        )
    # Some text configurations have no default of their own.
    tied = getattr(text, "tie_word_embeddings", whole.tie_word_embeddings)
    tied = config.get("tie_word_embeddings", tied)
    return {**text.to_dict(), "tie_word_embeddings": tied}


def read_by_transformers(path: Path, config: dict[str, Any]) -> Any:
    """Read a configuration with transformers. Raises ConfigError if that fails."""
    from transformers import AutoConfig

    with _explained(f"transformers cannot read {path}"):
        return AutoConfig.for_model(**config)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert any error that transformers raises for a wrong configuration to ConfigError. `what`:
    the beginning of its message."""
    try:
        yield
    except ForkpointError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {str(error).rstrip('.')}. Correct it.") from error


def _encoder(
    path: Path, config: dict[str, Any], *, checkpointed: bool
) -> tuple[EncoderShape | None, int]:
    """Sizes of the encoder of a multimodal configuration, and its number of parameters."""
    from forkpoint.hosts.transformers.shapes import encoder_sizes

    with _explained(f"transformers makes no model of {path}"):
        return encoder_sizes(read_by_transformers(path, config), checkpointed=checkpointed)


def dtype_of_model(model: Path) -> str | None:
    """The dtype that a model's configuration names, such as "bfloat16"; None if it names none.

    Raises as `read_config`, and ConfigError if the dtype is no string.
    """
    if _known(model) is not None:
        return "bfloat16"  # as in all of their configurations
    path, config = read_config(model, multimodal=True)
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, dict) else (config,)
    names = ("dtype", "torch_dtype")
    given = (part[name] for part in parts for name in names if part.get(name) is not None)
    found = next(given, None)
    if found is None:
        return None
    if not isinstance(found, str):
        raise ConfigError(f"{path}: dtype is {found!r}; it takes the name of a dtype.")
    return found.removeprefix("torch.")


def _known(model: Path) -> dict[str, Any] | None:
    """The built-in configuration of a name, if no file has this name."""
    name = None if model.exists() else known_name(str(model))
    return None if name is None else MODELS[name]
