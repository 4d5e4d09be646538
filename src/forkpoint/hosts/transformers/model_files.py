"""Configurations of models, as folders, as files and by name. Imports no torch."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL
from forkpoint.plan import MODELS, ModelShape, known_name
from forkpoint.plan.device_memory import embedding_parameters, total_parameters
from forkpoint.rollouts.batch import short


def read_config(model: Path, *, multimodal: bool = False) -> tuple[Path, dict[str, Any]]:
    """The file of a model's configuration, and what it says.

    Args:
        model: its folder, or the configuration itself.

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
    path, config = read_config(model)
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
    """Parameters of a model whose shape `shape_of_model` has read: all, and of its embeddings."""
    config = _known(model) or read_config(model)[1]
    return total_parameters(config, shape), embedding_parameters(config, shape)


def dtype_of_model(model: Path) -> str:
    """The dtype that a model's configuration names, such as "bfloat16"; without one "float32".

    Raises as `read_config`, and ConfigError where the dtype is not text.
    """
    if _known(model) is not None:
        return "bfloat16"  # as all of their configurations say
    path, config = read_config(model)
    names = ("dtype", "torch_dtype")
    found = next((config[name] for name in names if config.get(name) is not None), "float32")
    if not isinstance(found, str):
        raise ConfigError(f"{path}: dtype is {found!r}; it takes the name of a dtype.")
    return found.removeprefix("torch.")


def _known(model: Path) -> dict[str, Any] | None:
    """The configuration that plan knows by a name, where no file has the name."""
    name = None if model.exists() else known_name(str(model))
    return None if name is None else MODELS[name]
