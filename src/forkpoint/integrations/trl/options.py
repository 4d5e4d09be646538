"""Options of TRL's configurations that are refused, each with what to do.

TRL's own code computes losses and metrics of log-probs that forkpoint computes, so that every other
option of the tested versions has the effect that it has in TRL. docs/trl.md has the same table.
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


@dataclass(frozen=True)
class Refused:
    """Values of an option that are refused before training starts.

    reason: why, and what to do; the end of a message.
    of_arguments: whether a configuration has one of them, which is known before TRL's own
        constructor runs. None: any value that is true.
    of_trainer: whether a trainer has one, once it is made.
    """

    reason: str
    of_arguments: Callable[[Any], bool] | None = None
    of_trainer: Callable[[Any], bool] = lambda _: False


def _never(_: Any) -> bool:
    return False


def _reentrant(name: str) -> Callable[[Any], bool]:
    return lambda args: bool((getattr(args, name, None) or {}).get("use_reentrant"))


def _stepless(args: Any) -> bool:
    name = str(getattr(args.optim, "value", args.optim))
    return "lomo" in name or "layerwise" in name


def _drops(trainer: Any) -> bool:
    """Whether the model drops anything out in training."""
    return any(
        getattr(module, "p", 0.0) and type(module).__name__.startswith("Dropout")
        for module in trainer.model.modules()
    )


_REENTRANT = "non-reentrant checkpointing is exact: set use_reentrant to False."
_COMPILED = "blocks are compiled by forkpoint itself: pass forkpoint=Config(compile_blocks=True)."
_NOISE = "differ between copies of a token, so that it cannot be computed once"
REFUSED: dict[str, Refused] = {
    "activation_checkpointing_kwargs": Refused(
        _REENTRANT, _reentrant("activation_checkpointing_kwargs")
    ),
    "activation_offloading": Refused(
        "activations are offloaded by forkpoint itself: pass forkpoint=Config("
        "activations='offload')."
    ),
    "auto_find_batch_size": Refused(
        "a step's microbatches are planned to fit in memory: set Config(memory_budget=...)."
    ),
    "cast_lm_head_to_fp32": Refused(
        "a sharded head that is wider than its model has not been shown exact: leave it out, or "
        "use DDP.",
        _never,
        lambda t: bool(getattr(t.args, "cast_lm_head_to_fp32", False) and t.is_fsdp_enabled),
    ),
    "ddp_static_graph": Refused(
        "a step has several backwards, whose number depends on its plan: leave it out."
    ),
    "deepspeed": Refused(
        "its engine owns backwards and gradients: use accelerate's FSDP version 2.",
        lambda args: any(getattr(args, x, None) for x in ("deepspeed", "deepspeed_plugin")),
        lambda trainer: bool(trainer.is_deepspeed_enabled),
    ),
    "disable_dropout": Refused(
        f"dropped elements {_NOISE}: set disable_dropout=True, or the model's and the adapter's "
        "dropout to 0.",
        _never,
        _drops,
    ),
    "gradient_checkpointing_kwargs": Refused(
        _REENTRANT, _reentrant("gradient_checkpointing_kwargs")
    ),
    "neftune_noise_alpha": Refused(f"noise values {_NOISE}: leave it out."),
    "optim": Refused(
        "it updates weights within a backward, and a step has several: use an optimizer with a "
        "step of its own.",
        _stepless,
    ),
    "padding_free": Refused(
        "rows are packed by forkpoint: set padding_free=False.",
        _never,  # TRL 1.15 and 1.16 turn it off themselves
        lambda trainer: bool(getattr(trainer, "padding_free", False)),
    ),
    "parallelism_config": Refused(
        "data-parallel ranks are supported: use accelerate's DDP or FSDP version 2."
    ),
    "torch_compile": Refused(_COMPILED),
    "torch_compile_backend": Refused(_COMPILED),
    "torch_compile_mode": Refused(_COMPILED),
    "use_liger_kernel": Refused("liger's layers have not been shown exact here: leave it out."),
}

_KNOWN = """
accelerator_config activation_checkpointing adam_beta1 adam_beta2 adam_epsilon
average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval cache_implementation
chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug delta disable_tqdm discopop_tau
do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint entropy_coef
entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
eval_use_gather_object f_alpha_divergence_coef f_divergence_type fp16 fp16_full_eval fsdp
fsdp_config full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
gradient_checkpointing greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
hub_strategy hub_token ignore_data_skip importance_sampling_level include_for_metrics
include_num_input_tokens_seen label_names label_smoothing label_smoothing_factor ld_alpha
learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank
log_completions log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node
log_unique_prompts logging_first_step logging_nan_inf_filter logging_steps logging_strategy
loss_type loss_weights lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions
max_completion_length max_grad_norm max_length max_steps max_tool_calling_iterations
metric_for_best_model min_p model_init_kwargs multi_objective_aggregation normalize_advantages
num_completions_to_print num_generations num_generations_eval num_iterations num_train_epochs
off_policy_mask_threshold optim_args optim_target_modules output_dir pad_to_multiple_of pad_token
per_device_eval_batch_size per_device_train_batch_size precompute_ref_batch_size
precompute_ref_log_probs prediction_loss_only project push_to_hub ref_model_mixup_alpha
ref_model_sync_steps remove_unused_columns repetition_penalty report_to
restore_callback_states_from_checkpoint resume_from_checkpoint reward_clip_range reward_weights
router_aux_loss_coef run_name sapo_temperature_neg sapo_temperature_pos save_on_each_node
save_only_model save_steps save_strategy save_total_limit scale_rewards seed shuffle_dataset
skip_memory_metrics steps_per_generation sync_ref_model temperature tf32 top_entropy_quantile top_k
top_p torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
train_sampling_strategy transformers_continuous_batching_config truncation_mode trust_remote_code
use_adaptive_entropy use_bias_correction_kl use_cache use_cpu use_transformers_continuous_batching
use_transformers_paged use_vllm use_weighting vespo_k_neg vespo_k_pos vespo_lambda_neg
vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode
vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_steps weight_decay
"""
KNOWN = frozenset(_KNOWN.split())
"""Other options of the tested versions: results have been compared, or are not touched by them."""

TESTED = ((1, 15), (1, 16))
"""The first and the last version of TRL with which results have been compared."""


@cache
def check_version(found: str) -> None:
    """Warn once of a version of TRL that has not been tested."""
    if not TESTED[0] <= tuple(int(part) for part in found.split(".")[:2]) <= TESTED[1]:
        _log.warning(
            "TRL %s is installed, and forkpoint's trainers have been compared with TRL %s. Its "
            "log-probs are compared before the first step.",
            found,
            " to ".join(".".join(map(str, version)) for version in TESTED),
        )


def check_arguments(trainer: type, given: Iterable[object]) -> None:
    """Raises UnsupportedError for what the arguments of a trainer alone tell."""
    for value in given:
        if isinstance(value, TrainingArguments):
            check_options(trainer, value)
            check_known(trainer, value)
        if isinstance(value, ProcessorMixin):
            raise _images(trainer)


def check_options(trainer: type, args: Any) -> None:
    """Raises UnsupportedError, with TRL's name, for an option that is refused."""
    for name, refused in REFUSED.items():
        found = refused.of_arguments
        if found(args) if found is not None else getattr(args, name, None):
            raise _refused(trainer, args, name)


def unknown(config: type) -> list[str]:
    """Options of TRL and transformers in a configuration that the tested versions do not have."""
    libraries = [c for c in config.__mro__ if c.__module__.startswith(("trl.", "transformers."))]
    names = {name for library in libraries for name in get_annotations(library)}
    return sorted(
        field.name for field in fields(config) if field.name in names - KNOWN - REFUSED.keys()
    )


def check_known(trainer: type, args: Any) -> None:
    """Raises UnsupportedError for an unknown option that is not at its default."""
    known = {field.name: field for field in fields(args)}
    for name in unknown(type(args)):
        field, value = known[name], getattr(args, name)
        made = MISSING if field.default_factory is MISSING else field.default_factory()
        if value not in (field.default, made):
            raise UnsupportedError(
                f"{type(args).__name__} has {name}={short(value)}, an option that forkpoint's "
                f"{trainer.__name__} has not been compared with. Leave it out, or install a TRL "
                "that has been tested: pip install 'trl<1.17'."
            )


def check_trainer(trainer: Any) -> None:
    """Raises UnsupportedError for what is known once a trainer has been made."""
    for name, refused in REFUSED.items():
        if refused.of_trainer(trainer):
            raise _refused(type(trainer), trainer.args, name)
    if getattr(trainer, "_is_vlm", False) or getattr(trainer, "_is_vision_dataset", False):
        raise _images(type(trainer))
    # In the mode of a training step: the checks ask what draws random numbers in training.
    before = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.train()
    try:
        refusals.check_random(trainer.model)
    finally:
        for module, training in before:
            module.training = training
    refusals.check_parameter_hooks(trainer.model)


def _refused(trainer: type, args: Any, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(args).__name__} has {name}={getattr(args, name, None)!r}, which forkpoint's "
        f"{trainer.__name__} does not take: {REFUSED[name].reason}"
    )


def _images(trainer: type) -> UnsupportedError:
    return UnsupportedError(
        f"{trainer.__name__} was given images or a processor for them, which forkpoint "
        "does not compute yet: train a language model on text."
    )
