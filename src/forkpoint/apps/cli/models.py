"""Models for commands, with weights from a folder or random weights. Imports torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    __version__,
)
from transformers.utils import logging

from forkpoint.apps.cli.options import Runtime
from forkpoint.errors import ConfigError, ForkpointError, UnsupportedError
from forkpoint.hosts.compiled import one_line
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.hosts.transformers.model_files import read_by_transformers, read_config
from forkpoint.hosts.transformers.shapes import enable_checkpointing, shallow_model
from forkpoint.plan import ModelShape


def load_model(model: Path, options: Runtime) -> PreTrainedModel:
    """Load a model in training mode on its device. Nothing is downloaded.

    Raises:
        ConfigError: the model or the device does not exist, or the model cannot be made.
        UnsupportedError: forkpoint does not know its family.
    """
    device = _device(options.device)
    path, config = read_config(model, multimodal=True)
    if config.get("quantization_config") is not None:
        raise UnsupportedError(
            f"{path} has a quantization_config; quantized parameters have not been shown exact. "
            "Give an unquantized checkpoint, or a config.json without it for random weights."
        )
    dtype = getattr(torch, options.dtype)
    logging.disable_progress_bar()
    # transformers raises errors of many classes. Here they all concern the user's file.
    try:
        if model.is_dir():
            made = _load(model, _class_of(config), dtype)
        else:
            # Billions of random weights take minutes on a CPU, so they are drawn on the device. A
            # seed gives different weights there.
            with torch.device(device):
                made = random_model(config, dtype, options.seed)
        if dtype == torch.float64:  # the default's grouped products of experts have no float64
            made.set_experts_implementation("eager")
        if device.type == "cpu" and not model.is_dir():  # other devices might compile kernels
            _run_once(made)
    except ForkpointError:
        raise
    except Exception as error:
        reason = one_line(error).rstrip(".")
        wrong = f"{path.name} or the weights" if model.is_dir() else path.name
        raise ConfigError(
            f"transformers cannot make and run a model of {model} ({reason}). "
            f"Correct {wrong}, or give a model that this transformers ({__version__}) knows."
        ) from error
    if options.gradient_checkpointing:
        enable_checkpointing(made)
    made.train()
    made.to(device)  # pyright: ignore[reportArgumentType]  (a decorator of transformers)
    return made


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA device. Use --device cpu, or install a "
            "torch built for CUDA; forkpoint doctor shows what there is."
        )
    return torch.device(name)


def random_model(config: dict[str, Any], dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Make a model of a configuration (the keys of a config.json) with random weights from
    transformers."""
    torch.manual_seed(seed)
    return _class_of(config).from_config(AutoConfig.for_model(**config), dtype=dtype)


def _class_of(config: dict[str, Any]) -> Any:
    multimodal = config["model_type"] in MULTIMODAL
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def _run_once(model: PreTrainedModel) -> None:
    """Run two tokens. This fails if sizes of the configuration are inconsistent.

    The state of the random generators is restored afterwards.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        model.eval()(torch.zeros((1, 2), dtype=torch.int64), use_cache=False)


def _load(folder: Path, auto: Any, dtype: torch.dtype) -> PreTrainedModel:
    # Code in the folder is not run, and pickled weights (pytorch_model.bin) are not read.
    loaded: Any = auto.from_pretrained(
        folder,
        local_files_only=True,
        dtype=dtype,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights in {folder} lack {len(missing)} of the model's parameters, among them "
            f"{missing[0]}; transformers would draw them at random. Give a complete checkpoint."
        )
    return model


def shallow_models(
    model: Path, *, dtype: str, device: str
) -> tuple[Callable[[int], PreTrainedModel], ModelShape]:
    """Factory of models of a configuration with a given number of layers, and the shape of the
    whole model.

    Raises as `load_model`.
    """
    where, kind = _device(device), getattr(torch, dtype)
    path, config = read_config(model)
    whole = read_by_transformers(path, config).to_dict()

    def make(layers: int) -> PreTrainedModel:
        return shallow_model(config, layers, device=where, dtype=kind)

    return make, ModelShape.from_config(whole, dtype_bytes=kind.itemsize)


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Replace an error of device memory by a ConfigError with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of device memory: {error}\nLower --max-microbatch-tokens, or add "
            "--gradient-checkpointing."
        ) from error
