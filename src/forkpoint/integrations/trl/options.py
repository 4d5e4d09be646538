"""Every option of TRL's configurations, and what becomes of it.

The table in docs/trl.md is made of these lists (`scripts/trl_options.py`), and tests compare them
with the fields of TRL's classes, so that an option that is not here is found.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from inspect import get_annotations
from typing import Any

from transformers import ProcessorMixin, TrainingArguments

from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.rollouts.batch import short

_log = logging.getLogger("forkpoint")


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


MATCHED = _split(
    # losses of GRPO and RLOO
    "beta delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target "
    "epsilon epsilon_high importance_sampling_level loss_type mask_truncated_completions "
    "multi_objective_aggregation normalize_advantages num_iterations off_policy_mask_threshold "
    "reward_clip_range reward_weights router_aux_loss_coef sapo_temperature_neg "
    "sapo_temperature_pos scale_rewards steps_per_generation temperature top_entropy_quantile "
    "use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg "
    "vespo_lambda_pos vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode "
    # losses of DPO
    "discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights "
    "precompute_ref_batch_size precompute_ref_log_probs use_weighting "
    # reference models
    "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model "
    # steps
    "bf16 bf16_full_eval fp16 fp16_full_eval fsdp fsdp_config gradient_accumulation_steps "
    "max_grad_norm per_device_eval_batch_size per_device_train_batch_size resume_from_checkpoint"
)
"""Options of what is computed, whose results are those of TRL."""

UNTOUCHED = _split(
    # sampling and its engines
    "cache_implementation chat_template_kwargs ds3_gather_for_generation generation_batch_size "
    "generation_kwargs max_completion_length max_tool_calling_iterations min_p num_generations "
    "num_generations_eval repetition_penalty top_k top_p transformers_continuous_batching_config "
    "use_transformers_continuous_batching use_transformers_paged use_vllm "
    "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length "
    "vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size "
    # data
    "accelerator_config data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ignore_data_skip "
    "label_names length_column_name max_length pad_to_multiple_of pad_token "
    "remove_unused_columns shuffle_dataset train_sampling_strategy truncation_mode "
    # models and optimizers
    "adam_beta1 adam_beta2 adam_epsilon learning_rate lr_scheduler_kwargs lr_scheduler_type "
    "model_init_kwargs optim_args optim_target_modules trust_remote_code use_cache warmup_steps "
    "weight_decay "
    # loops, evaluation and processes
    "average_tokens_across_devices batch_eval_metrics ddp_backend ddp_broadcast_buffers "
    "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug do_eval "
    "do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay "
    "eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object "
    "full_determinism include_for_metrics include_num_input_tokens_seen label_smoothing_factor "
    "local_rank max_steps num_train_epochs prediction_loss_only seed tf32 "
    "torch_empty_cache_steps use_cpu "
    # files, logs and hubs
    "disable_tqdm greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision "
    "hub_strategy hub_token load_best_model_at_end log_completions log_completions_hub_repo "
    "log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts "
    "logging_first_step logging_nan_inf_filter logging_steps logging_strategy "
    "metric_for_best_model num_completions_to_print output_dir project push_to_hub report_to "
    "restore_callback_states_from_checkpoint run_name save_on_each_node save_only_model save_steps "
    "save_strategy save_total_limit skip_memory_metrics trackio_bucket_id trackio_space_id "
    "trackio_static_space_id"
)
"""Options that TRL and transformers act on by themselves, before or after what is computed here."""


@dataclass(frozen=True)
class Refused:
    """Values of an option that are refused before training starts.

    values: those that are, for the table.
    reason: why, and what to do; the end of a message.
    of_arguments: whether a configuration has one of them, which is known before TRL's own
        constructor runs.
    of_trainer: whether a trainer has, once it is made.
    """

    values: str
    reason: str
    of_arguments: Callable[[Any], bool] = lambda _: False
    of_trainer: Callable[[Any], bool] = lambda _: False


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _reentrant(name: str) -> Callable[[Any], bool]:
    return lambda args: bool((getattr(args, name, None) or {}).get("use_reentrant"))


def _stepless(args: Any) -> bool:
    name = str(getattr(args.optim, "value", args.optim))
    return "lomo" in name or "layerwise" in name


def _dropout(trainer: Any) -> bool:
    """Whether the model drops anything out in training."""
    return any(
        getattr(module, "p", 0.0) and type(module).__name__.startswith("Dropout")
        for module in trainer.model.modules()
    )


_REENTRANT = "non-reentrant checkpointing is exact: set use_reentrant to False."
_PARALLEL = "data-parallel ranks are supported: use accelerate's DDP or FSDP version 2."
_COMPILED = "blocks are compiled by forkpoint itself: pass forkpoint=Config(compile_blocks=True)."
REFUSED: dict[str, Refused] = {
    "activation_offloading": Refused(
        "True",
        "activations are offloaded by forkpoint itself: pass forkpoint=Config("
        "activations='offload').",
        _set("activation_offloading"),
    ),
    "activation_checkpointing": Refused("", ""),
    "activation_checkpointing_kwargs": Refused(
        "use_reentrant", _REENTRANT, _reentrant("activation_checkpointing_kwargs")
    ),
    "auto_find_batch_size": Refused(
        "True",
        "a step's microbatches are planned to fit in memory: set Config(memory_budget=...).",
        _set("auto_find_batch_size"),
    ),
    "cast_lm_head_to_fp32": Refused(
        "True, with FSDP",
        "a sharded head that is wider than its model has not been shown exact: leave it out, or "
        "use DDP.",
        of_trainer=lambda t: _set("cast_lm_head_to_fp32")(t.args) and t.is_fsdp_enabled,
    ),
    "ddp_static_graph": Refused(
        "True",
        "a step has several backwards, whose number depends on its plan: leave it out.",
        _set("ddp_static_graph"),
    ),
    "deepspeed": Refused(
        "a configuration",
        "its engine owns backwards and gradients: use accelerate's FSDP version 2.",
        lambda args: _set("deepspeed")(args) or _set("deepspeed_plugin")(args),
        lambda trainer: bool(trainer.is_deepspeed_enabled),
    ),
    "disable_dropout": Refused(
        "False, with a model that has dropout",
        "dropped elements differ between copies of a token, so that it cannot be computed once: "
        "set disable_dropout=True, or the model's and the adapter's dropout to 0.",
        of_trainer=_dropout,
    ),
    "gradient_checkpointing": Refused("", ""),
    "gradient_checkpointing_kwargs": Refused(
        "use_reentrant", _REENTRANT, _reentrant("gradient_checkpointing_kwargs")
    ),
    "liger_kernel_config": Refused("", ""),
    "neftune_noise_alpha": Refused(
        "a number",
        "noise differs between copies of a token, so that it cannot be computed once: leave it "
        "out.",
        _set("neftune_noise_alpha"),
    ),
    "optim": Refused(
        "lomo, adalomo, layerwise ones",
        "these update weights within a backward, and a step has several: use an optimizer with a "
        "step of its own.",
        _stepless,
    ),
    "padding_free": Refused(
        "True, in a TRL that does not set it to False itself, as 1.15 and 1.16 do",
        "rows are packed by forkpoint: set padding_free=False.",
        of_trainer=_set("padding_free"),
    ),
    "parallelism_config": Refused("a configuration", _PARALLEL, _set("parallelism_config")),
    "torch_compile": Refused("True", _COMPILED, _set("torch_compile")),
    "torch_compile_backend": Refused("a name", _COMPILED, _set("torch_compile_backend")),
    "torch_compile_mode": Refused("a name", _COMPILED, _set("torch_compile_mode")),
    "use_liger_kernel": Refused(
        "True",
        "liger's layers have not been shown exact here: leave it out.",
        _set("use_liger_kernel"),
    ),
}
"""By option; those without values are matched, or go with another that is refused."""

OF_MODELS = (
    (
        "`model`",
        "refused: families that are not listed in the README, and models of images",
        "train a language model of a family that is listed.",
    ),
    (
        "`peft_config`: `modules_to_save`",
        "refused: with the output head (`lm_head`)",
        "log-probs are computed from a plain head: leave it out. Embeddings and other modules are "
        "matched.",
    ),
    (
        "`peft_config`: others",
        "refused: prompt learning (prompt, prefix and P-tuning), and dropout above 0",
        "use adapters that change weights, such as LoRA, which are matched.",
    ),
)
"""Rows of the table for arguments of trainers besides their configuration."""

ALL = frozenset((*MATCHED, *UNTOUCHED, *REFUSED))
TESTED = ((1, 15), (1, 16))
"""The first and the last version of TRL with which results have been compared."""
LIBRARIES = ("trl.trainer.", "transformers.")


def unknown(config: type) -> list[str]:
    """Options of a configuration of TRL that the lists do not have."""
    return sorted(field.name for field in fields(config) if field.name not in ALL)


@cache
def check_version(found: str) -> None:
    """Warn once of a version of TRL that has not been tested."""
    parts = tuple(int(part) for part in found.split(".")[:2])
    first, last = (".".join(map(str, version)) for version in TESTED)
    if not TESTED[0] <= parts <= TESTED[1]:
        _log.warning(
            "TRL %s is installed, and forkpoint's trainers have been compared with TRL %s to %s. "
            "Its log-probs are compared before the first step, and its options as far as they are "
            "known.",
            found,
            first,
            last,
        )


def check_arguments(trainer: type, given: Iterable[object]) -> None:
    """Refuse what the arguments of a trainer alone tell.

    Raises UnsupportedError.
    """
    for value in given:
        if isinstance(value, TrainingArguments):
            check_options(trainer, value)
            check_known(trainer, value)
        if isinstance(value, ProcessorMixin):
            raise _images(trainer)


def check_options(trainer: type, args: Any) -> None:
    """Raises UnsupportedError, with TRL's name, for an option that is refused."""
    for name, refused in REFUSED.items():
        if refused.of_arguments(args):
            raise _refused(trainer, args, name)


def check_known(trainer: type, args: Any) -> None:
    """Refuse options of TRL that are not in the lists and have been set, and warn of a subclass's.

    Raises UnsupportedError.
    """
    known = {field.name: field for field in fields(args)}
    for name in unknown(type(args)):
        field, value = known[name], getattr(args, name)
        made = MISSING if field.default_factory is MISSING else field.default_factory()
        if value in (field.default, made):
            continue
        owner = next(c for c in reversed(type(args).__mro__) if name in get_annotations(c))
        if owner.__module__.startswith(LIBRARIES):
            raise UnsupportedError(
                f"{type(args).__name__} has {name}={short(value)}, an option that forkpoint's "
                f"{trainer.__name__} does not know, so that nothing shows that it is honoured. "
                "Leave it out, or install a TRL that has been tested: pip install 'trl<1.17'."
            )
        _log.warning(
            "%s has %s=%s, an option that forkpoint does not know: it has no effect but in code of "
            "your own.",
            type(args).__name__,
            name,
            short(value),
        )


def check_trainer(trainer: Any) -> None:
    """Refuse what is known once a trainer has been made.

    Raises UnsupportedError.
    """
    for name, refused in REFUSED.items():
        if refused.of_trainer(trainer):
            raise _refused(type(trainer), trainer.args, name)
    if getattr(trainer, "_is_vlm", False) or getattr(trainer, "_is_vision_dataset", False):
        raise _images(type(trainer))
    # As every training step puts it; the checks ask what draws random numbers in training.
    before = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.train()
    try:
        refusals.check_random(trainer.model)
    finally:
        for module, training in before:
            module.training = training
    refusals.check_parameter_hooks(trainer.model)


def _refused(trainer: type, args: Any, name: str) -> UnsupportedError:
    found = getattr(args, name, None)
    return UnsupportedError(
        f"{type(args).__name__} has {name}={found!r}, which forkpoint's "
        f"{trainer.__name__} does not take: {REFUSED[name].reason}"
    )


def _images(trainer: type) -> UnsupportedError:
    return UnsupportedError(
        f"{trainer.__name__} was given images or a processor for them, which forkpoint "
        "does not compute yet: train a language model on text."
    )


def table() -> list[tuple[str, str, str]]:
    """Rows of docs/trl.md: options, what becomes of them, and what to do."""
    refused = [
        (f"`{name}`", f"refused: {one.values}", one.reason)
        for name, one in sorted(REFUSED.items())
        if one.values
    ]
    with_others = sorted(name for name, one in REFUSED.items() if not one.values)
    return [
        (_names([*MATCHED, *with_others]), "matched", "results are TRL's"),
        *refused,
        *OF_MODELS,
        (_names(UNTOUCHED), "TRL's own", "nothing to do with what is shared"),
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
