"""Configurations of models, as folders, as files and by name.

Imports no torch, but where a multimodal configuration is read.
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


def read_config(model: Path, *, multimodal: bool = False) -> tuple[Path, dict[str, Any]]:
    """The file of a model's configuration, and what it says.

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
    if not path.is_file():
        raise ConfigError(
            f"the folder {model} has no config.json. Give the folder that a model's "
            "save_pretrained wrote."
        )
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
    kind, text = config["model_type"], config.get("text_config")
    if kind not in FAMILIES and not (multimodal and kind in MULTIMODAL):
        inner = text.get("model_type") if isinstance(text, dict) else None
        hint = f" Its text_config is a {inner}: give that alone." if inner in FAMILIES else ""
        raise UnsupportedError(
            f"{path}: model_type {kind!r} has not been shown exact; supported are "
            f"{', '.join(FAMILIES)}.{hint}"
        )
    return path, config


def _near(model: Path) -> str:
    name = model.name.lower()
    near = difflib.get_close_matches(name, MODELS, n=1)
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def from_hub(model: Path) -> Path:
    """The config.json of a name on the Hub, OWNER/NAME; anything else as it is.

    Names that `known_name` knows and what exists here are not looked up. Only that file is fetched.

    Raises:
        ConfigError: the Hub does not give it.
    """
    name = model.as_posix()
    if model.exists() or _known(model) is not None or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return model
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # of many kinds: offline, no such name, no access
        reason = f"{type(error).__name__}: {short(str(error))}"
        raise ConfigError(
            f"the model {model} does not exist here{_near(model)}, and the Hub gives no "
            f"config.json of it ({reason}). Give a folder, a config.json or another name."
        ) from None


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers from its folder or its name on the Hub; no code of it is run.

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
    """The sizes that FLOPs and bytes are counted from.

    Args:
        model: a folder, a config.json, or else a name that `known_name` knows.
        sizes: fields of the shape that no configuration has.

    Raises as `read_config`, and ConfigError where the configuration does not say the sizes.
    """
    if (known := _known(model)) is not None:
        return ModelShape.from_config(known, **sizes)
    path, config = read_config(model, multimodal=True)
    if config["model_type"] in MULTIMODAL:
        config = _language_model(path, config)
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


def parameters_of_model(model: Path, shape: ModelShape) -> tuple[int, int]:
    """Parameters of a model whose shape `shape_of_model` has read: all, and of its embeddings.

    Encoders of a multimodal model are counted among all.
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
    """Sizes of the encoder of images or video of a model; None where its media are refused.

    Args:
        model: a folder, a config.json, or else a name that `known_name` knows.
        checkpointed: whether its blocks keep only their inputs for their backward.

    Raises as `read_config`, and ConfigError where transformers makes no model of it.
    """
    if _known(model) is not None:
        return None
    path, config = read_config(model, multimodal=True)
    if config["model_type"] not in MULTIMODAL:
        return None
    shape, _ = _encoder(path, config, checkpointed=checkpointed)
    return None if shape is None else replace(shape, dtype_bytes=dtype_bytes)


def _language_model(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model of a multimodal one, with its defaults.

    Raises UnsupportedError for one that has not been shown exact.
    """
    text = read_by_transformers(path, config).get_text_config()
    kinds = MULTIMODAL[config["model_type"]].decoders or tuple(FAMILIES)
    if text.model_type not in kinds:
        raise UnsupportedError(
            f"{path}: the language model is a {text.model_type!r}, which has not been shown exact; "
            f"supported are {', '.join(kinds)}."
        )
    tied = config.get("tie_word_embeddings", text.tie_word_embeddings)
    return {**text.to_dict(), "tie_word_embeddings": tied}


def read_by_transformers(path: Path, config: dict[str, Any]) -> Any:
    """The configuration of transformers. Raises ConfigError for one that it cannot read."""
    from transformers import AutoConfig

    with _explained(f"transformers cannot read {path}"):
        return AutoConfig.for_model(**config)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise ConfigError for the errors of many kinds that transformers raises for a wrong
    configuration. `what`: the beginning of its message."""
    try:
        yield
    except ForkpointError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {str(error).rstrip('.')}. Correct it.") from error


def _encoder(
    path: Path, config: dict[str, Any], *, checkpointed: bool
) -> tuple[EncoderShape | None, int]:
    """Sizes of the encoder of a multimodal configuration, and its parameters."""
    from forkpoint.hosts.transformers.shapes import encoder_sizes

    with _explained(f"transformers makes no model of {path}"):
        return encoder_sizes(read_by_transformers(path, config), checkpointed=checkpointed)


def dtype_of_model(model: Path) -> str | None:
    """The dtype that a model's configuration names, such as "bfloat16"; None if it names none.

    Raises as `read_config`, and ConfigError where the dtype is not text.
    """
    if _known(model) is not None:
        return "bfloat16"  # as all of their configurations say
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
    """The configuration that plan knows by a name, where no file has the name."""
    name = None if model.exists() else known_name(str(model))
    return None if name is None else MODELS[name]
