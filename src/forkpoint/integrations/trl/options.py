"""Refused options of TRL's configurations, each with a remedy.

TRL's own code computes losses and metrics from log-probs of forkpoint, so all other options of the
tested versions have the effect that they have in TRL. docs/start/trl.md has this table.
"""

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import nn
from transformers import TrainingArguments

from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.wrappers import uncompiled

_log = logging.getLogger("forkpoint")


def _reentrant(name: str) -> Callable[[Any], bool]:
    return lambda args: bool((getattr(args, name, None) or {}).get("use_reentrant"))


def _stepless(args: Any) -> bool:
    name = str(getattr(args.optim, "value", args.optim))
    return "lomo" in name or "layerwise" in name


def _drops(trainer: Any) -> bool:
    """Whether the model has dropout in training."""
    return any(
        getattr(module, "p", 0.0) and type(module).__name__.startswith("Dropout")
        for module in trainer.model.modules()
    )


_REENTRANT = "non-reentrant checkpointing is exact: set use_reentrant to False."
_COMPILES = (
    "forkpoint compiles decoder blocks on CUDA by default. On other devices, pass "
    "forkpoint=Config(compile_blocks=True)."
)
_COMPILED = f"leave it out, because {_COMPILES}"
_NOISE = "differ between copies of a token, and a shared token is computed once"
REFUSED: dict[str, str] = {
    "activation_checkpointing_kwargs": _REENTRANT,
    "activation_offloading": "forkpoint offloads activations itself: pass "
    "forkpoint=Config(activations='offload').",
    "auto_find_batch_size": "forkpoint plans microbatches that fit in memory: set "
    "Config(memory_budget=...).",
    "ddp_static_graph": "a step has several backwards, whose number depends on its plan: leave it "
    "out.",
    "debug": "it registers hooks that would see shared tokens once: leave underflow_overflow out.",
    "deepspeed": "its engine stores gradients itself: use accelerate's FSDP version 2.",
    "gradient_checkpointing_kwargs": _REENTRANT,
    "neftune_noise_alpha": f"noise values {_NOISE}: leave it out.",
    "optim": "it updates weights during a backward, and a step has several: use an optimizer that "
    "updates weights in step().",
    "parallelism_config": "only dp_replicate, dp_shard and cp are supported. Set tp_size=1 and "
    "sp_size=1. To split sequences, use cp_size.",
    "torch_compile": _COMPILED,
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "use_liger_kernel": "liger's layers have not been shown exact: leave it out.",
}
"""Reason and remedy of each refused option: the end of a message."""
FOUND: dict[str, Callable[[Any], bool]] = {
    **{name: _reentrant(name) for name in REFUSED if name.endswith("checkpointing_kwargs")},
    "debug": lambda args: "underflow_overflow" in args.debug,
    "deepspeed": lambda args: any(getattr(args, x, 0) for x in ("deepspeed", "deepspeed_plugin")),
    "optim": _stepless,
    "parallelism_config": lambda args: any(
        getattr(getattr(args, "parallelism_config", None), name, 1) > 1
        for name in ("tp_size", "sp_size")
    ),
}
"""Tests for refused values, by option. For options without a test, each true value is refused."""
OF_TRAINER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cast_lm_head_to_fp32": (
        lambda t: bool(getattr(t.args, "cast_lm_head_to_fp32", False) and t.is_fsdp_enabled),
        "a float32 head under FSDP is not tested when the model has a narrower dtype: leave it "
        "out, or use DDP.",
    ),
    "deepspeed": (lambda t: bool(t.is_deepspeed_enabled), REFUSED["deepspeed"]),
    "disable_dropout": (
        _drops,
        f"dropped elements {_NOISE}: set disable_dropout=True, or the model's and the adapter's "
        "dropout to 0.",
    ),
    "padding_free": (  # TRL 1.15 and 1.16 turn it off themselves
        lambda t: bool(getattr(t, "padding_free", False)),
        "rows are packed by forkpoint: set padding_free=False.",
    ),
}
"""Test of a trainer and reason, for each option that is known only after the trainer is made."""

TESTED = ((1, 15), (1, 16))
"""Oldest and newest version of TRL with which results have been compared."""


@cache
def check_version(found: str) -> None:
    """Log one warning for a version of TRL that has not been tested."""
    if not TESTED[0] <= tuple(int(part) for part in found.split(".")[:2]) <= TESTED[1]:
        _log.warning(
            "TRL %s is installed, and forkpoint's trainers have been compared with TRL %s. Its "
            "log-probs are compared before the first step.",
            found,
            " to ".join(".".join(map(str, version)) for version in TESTED),
        )


def check_arguments(trainer: type, given: Iterable[object]) -> None:
    """Raises UnsupportedError if an argument is a configuration with a refused option, or a model
    that torch.compile returned: TRL would set its head on the compiled code, which steps leave out.
    """
    for value in given:
        if isinstance(value, TrainingArguments):
            check_options(trainer, value)
        if isinstance(value, nn.Module) and (module := uncompiled(value)) is not value:
            raise UnsupportedError(
                f"a model is the result of torch.compile of a {type(module).__name__}, which "
                f"forkpoint's {trainer.__name__} does not take. Pass the module that was compiled, "
                f"model._orig_mod: {_COMPILES}"
            )


def check_options(trainer: type, args: Any) -> None:
    """Raises UnsupportedError, with TRL's name, for an option that is refused."""
    for name, reason in REFUSED.items():
        if FOUND[name](args) if name in FOUND else getattr(args, name, None):
            raise _refused(trainer, args, name, reason)


def check_reference(trainer: Any, error: OSError) -> None:
    """Raises UnsupportedError if TRL has failed to load a reference model that has no name."""
    model = vars(trainer).get("model")
    if model is None or getattr(model.config, "_name_or_path", ""):
        return
    raise UnsupportedError(
        f"{type(trainer.args).__name__} has beta={trainer.beta}, so TRL loads a reference model by "
        "the name of model, and this model has no name and no adapter. Pass model as a name or a "
        "folder, pass peft_config, or set beta=0 (with DPO, pass ref_model)."
    ) from error


def check_trainer(trainer: Any) -> None:
    """Raises UnsupportedError if a finished trainer has a refused option, module or hook."""
    for name, (found, reason) in OF_TRAINER.items():
        if found(trainer):
            raise _refused(type(trainer), trainer.args, name, reason)
    # accelerate's launcher can set it outside of the trainer's configuration.
    config = getattr(trainer.accelerator, "parallelism_config", None)  # since accelerate 1.10
    reasons = {
        "cp_size": "an Accelerator exists already, which gives the ranks of one sequence the same "
        "rows. Make the trainer before any other Accelerator.",
        "sp_size": REFUSED["parallelism_config"],
    }
    for name, reason in reasons.items():
        if (size := getattr(config, name, 1)) > 1:
            raise UnsupportedError(
                f"accelerate has a parallelism_config with {name}={size}, which forkpoint's "
                f"{type(trainer).__name__} does not take: {reason}"
            )
    images = getattr(trainer, "_is_vlm", False) or getattr(trainer, "_is_vision_dataset", False)
    beside = {
        "images": images,
        "a load-balancing loss (router_aux_loss_coef)": getattr(trainer, "aux_loss_enabled", False),
        "a model that FSDP version 2 does not shard": not trainer.is_fsdp_enabled,
    }
    for what, found in beside.items():
        if found and (size := trainer.sharing.context_ranks) > 1:
            raise UnsupportedError(
                f"accelerate has a parallelism_config with cp_size={size}, which has not been "
                f"shown exact with {what}. Set cp_size=1, or use cp_size without it."
            )
    # In training mode, because the checks look for modules that draw random numbers in training.
    before = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.train()
    try:
        refusals.check_random(trainer.model)
    finally:
        for module, training in before:
            module.training = training
    refusals.check_parameter_hooks(trainer.model)


def _refused(trainer: type, args: Any, name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(args).__name__} has {name}={getattr(args, name, None)!r}, which forkpoint's "
        f"{trainer.__name__} does not take: {reason}"
    )
