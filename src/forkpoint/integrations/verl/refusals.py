"""Refusals of options of verl that have not been shown exact. Messages name verl's keys."""

from collections.abc import Callable
from typing import Any

from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.batch import short

STRATEGY = "fsdp2"
ROLES = {
    "actor": ("actor_rollout_ref.actor.", "fsdp_config.", "actor_rollout_ref.model."),
    "ref": ("actor_rollout_ref.ref.", "fsdp_config.", "actor_rollout_ref.model."),
    "critic": ("critic.", "fsdp.", "critic.model."),
}
"""Prefixes of the keys of a role, of its engine and of its model, by role."""


OFF = {
    "{model}use_fused_kernels": "It replaces the forward of the model's class; forkpoint's head "
    "keeps no logits either.",
    "{model}use_liger": "It replaces the model's modules. Decoder blocks are compiled on CUDA.",
    "{model}enable_activation_offload": "It wraps the forwards of blocks for one forward and one "
    'backward; [config] activations = "offload" in forkpoint\'s own file offloads too.',
    "{model}tiled_mlp.enabled": "It replaces the forward of the model's MLPs; [config] "
    'checkpointing = "selective" recomputes them.',
    "{model}mtp.enable_train": "Layers that predict several tokens are not trained.",
    "{engine}qat.enable": "Quantized weights have not been shown exact.",
    "{role}pad_to_length": "forkpoint packs its own microbatches, so padding to a length has no "
    "effect.",
    "{engine}offload_policy": "Parameters that stay on the CPU during a step have not been shown "
    "exact; param_offload and optimizer_offload keep them there between steps.",
}
"""Options that must be off, by verl's keys, with reasons. `{role}`, `{engine}` and `{model}` are
prefixes of a role's keys."""
REFUSALS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    **{key: (bool, "false", reason) for key, reason in OFF.items()},
    "{engine}mixed_precision.param_dtype": (
        lambda dtype: str(dtype).removeprefix("torch.") in ("16", "fp16", "float16", "half"),
        "bf16 or fp32",
        "verl scales losses for float16, which has not been shown exact.",
    ),
    "{engine}router_replay.mode": (
        lambda mode: mode != "disabled",
        "disabled",
        "The router chooses experts in each forward.",
    ),
}
"""Test for refused values, allowed values and reason, by option."""


def check_options(engine: Any, model: Any) -> None:
    """Refuse options of verl that have not been shown exact with forkpoint.

    engine, model: verl's FSDPEngineConfig and HFModelConfig.

    Raises UnsupportedError, which names verl's key, the value and the allowed value.
    """
    critic = model.get("model_type", "language_model") == "value_model"
    own, engines, models = ROLES["critic" if critic else "ref" if engine.forward_only else "actor"]
    for key, (refuses, takes, reason) in REFUSALS.items():
        value: Any = model if key.startswith("{model}") else engine
        for name in key.partition("}")[2].split("."):
            value = None if value is None else value.get(name, None)
        if value is not None and refuses(value):
            name = key.format(role=own, engine=own + engines, model=models)
            text = str(value).lower() if isinstance(value, bool) else short(value)
            raise UnsupportedError(_refusal(name, text, takes, reason))
    config = model.hf_config
    text_config = config.get_text_config()
    trains = not (critic or engine.forward_only)
    if trains and getattr(text_config, "output_router_logits", False):
        name = models + "override_config."
        name += (
            "output_router_logits" if text_config is config else "text_config.output_router_logits"
        )
        reason = (
            "In transformers it adds a load-balancing loss, which verl's engines never do, so "
            "gradients stay the same."
        )
        raise UnsupportedError(_refusal(name, "true", "false", reason))


def _refusal(name: str, value: str, takes: str, reason: str) -> str:
    return (
        f"{name} is {value}; forkpoint's engine takes {takes}. {reason} Without "
        "VERL_ENGINE_VENDOR=forkpoint verl's own engine runs."
    )


def check_strategy(strategy: str, model_type: str) -> None:
    """Refuse a strategy for which forkpoint has no engine, by verl's key.

    Raises UnsupportedError for each strategy except fsdp2.
    """
    if strategy == STRATEGY:
        return
    keys = (
        "critic.strategy"
        if model_type == "value_model"
        else "actor_rollout_ref.actor.strategy (or actor_rollout_ref.ref.strategy)"
    )
    raise UnsupportedError(
        f"{keys} is {strategy!r}; forkpoint's engine takes {STRATEGY!r}. Set it to {STRATEGY}, for "
        "every role, or leave out VERL_ENGINE_VENDOR=forkpoint to run verl's own engine."
    )


LOGITS = "its loss reads whole logits. Use a distillation loss of log-probs"
ROUTES = "the router chooses experts in each forward. Set router_replay.mode to disabled"
FLAGS = ("distillation_use_topk", "distillation_only", "use_fused_kernels", "enable_routing_replay")
BATCH_OPTIONS = {
    "distillation_use_topk": LOGITS,
    "distillation_only": LOGITS,
    "use_fused_kernels": "it has another head. Set use_fused_kernels of the model to false",
    "enable_routing_replay": ROUTES,
    "routed_experts": f"{ROUTES}, and rollout.enable_rollout_routing_replay off",
    "calculate_sum_pi_squared": "only passes for old log-probs compute sums of squared "
    "probabilities. Leave the key out of updates",
}
"""Reason and remedy of each refused key of a mini-batch."""


def check_batch(data: Any, get: Callable[..., Any], *, scores: bool) -> None:
    """Refuse a mini-batch with options that forkpoint does not support.

    Args:
        data: verl's mini-batch.
        get: verl's get_non_tensor_data.
        scores: whether it is a pass without gradients and without a loss.

    Raises:
        UnsupportedError: an option is set. The message names its key.
    """
    asked = {key: get(data=data, key=key, default=False) for key in FLAGS} | {
        "routed_experts": "routed_experts" in set(data.keys()),
        "calculate_sum_pi_squared": not scores
        and get(data=data, key="calculate_sum_pi_squared", default=False),
    }
    for key, why in BATCH_OPTIONS.items():
        if asked[key]:
            raise UnsupportedError(f"a mini-batch asks for {key}: {why}.")
    given = get(data=data, key="pad_mode", default="no_padding")
    mode = str(getattr(given, "value", given))  # verl's enumeration, or its value
    if mode != "no_padding":
        raise UnsupportedError(
            f"a mini-batch has pad_mode {short(mode)}; forkpoint's engine takes no_padding. Set "
            "data.pad_mode=no_padding."
        )
