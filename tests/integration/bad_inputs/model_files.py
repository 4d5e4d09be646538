"""Models that the command line is asked for and cannot make or count."""

import os
from pathlib import Path
from typing import Any

import torch
from commands import write_config

from bad_inputs.kind import Kind
from forkpoint.errors import ConfigError, ForkpointError, UnsupportedError
from forkpoint.testing import tiny_model


def config_kind(
    *,
    message: str,
    command: str = "plan",
    error: type[ForkpointError] = ConfigError,
    **changes: Any,
) -> Kind:
    """A configuration that differs from a good one in some keys."""
    return Kind(
        error=error,
        message=message,
        argv=(command, "ok.jsonl", "--model", "bad.json"),
        prepare=lambda _: write_config(Path("bad.json"), **changes),
    )


def path_kind(*, message: str, content: str | None = None) -> Kind:
    """A path at which there is no model."""
    return Kind(
        error=ConfigError,
        message=message,
        argv=("plan", "ok.jsonl", "--model", "bad.json" if content else "model"),
        prepare=lambda _: Path("bad.json").write_text(content) if content else None,
    )


def without_weights() -> None:
    Path("model").mkdir()
    write_config(Path("model") / "config.json")


def without_some_weights() -> None:
    model = tiny_model("qwen3", dtype=torch.float32)
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained("model", state_dict=state)


MODEL_FILES = (
    path_kind(message="the model model does not exist, as a folder or a config.json;"),
    Kind(
        error=ConfigError,
        message="the model qwen3-8b does not exist, as a folder or a config.json;",
        argv=("replay", "ok.jsonl", "--model", "qwen3-8b"),
    ),
    Kind(
        error=ConfigError,
        message="the folder model has no config.json. Give the folder that a model's",
        argv=("plan", "ok.jsonl", "--model", "model"),
        prepare=lambda _: Path("model").mkdir(),
    ),
    path_kind(
        content="{",
        message="bad.json is not JSON (Expecting property name enclosed in double quotes:",
    ),
    Kind(
        error=ConfigError,
        message=f"{os.devnull} is a pipe or a device. Give a config.json as transformers writes",
        argv=("plan", "ok.jsonl", "--model", os.devnull),
    ),
    path_kind(content=" " * (1 << 24) + "{}", message="bad.json is a file of 16777218 bytes; at"),
    path_kind(content="[]", message="bad.json is no model configuration: it has no model_type."),
    config_kind(
        command="replay",
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
        error=UnsupportedError,
        message="bad.json has a quantization_config; quantized parameters have not been shown",
    ),
    config_kind(
        num_key_value_heads=3,
        message="bad.json: the model has 4 query heads and 3 key-value heads;",
    ),
    config_kind(
        layer_types=["full_attention", "linear_attention"],
        message="bad.json: layer_types has 'linear_attention';",
    ),
    config_kind(
        command="replay",
        hidden_act="sploosh",
        message="transformers cannot make and run a model of bad.json (KeyError:",
    ),
    Kind(
        error=ConfigError,
        message="transformers cannot make and run a model of model (OSError:",
        argv=("replay", "ok.jsonl", "--model", "model"),
        prepare=lambda _: without_weights(),
    ),
    Kind(
        error=ConfigError,
        message="the weights in model lack 1 of the model's parameters, among them",
        argv=("replay", "ok.jsonl", "--model", "model"),
        prepare=lambda _: without_some_weights(),
    ),
)
