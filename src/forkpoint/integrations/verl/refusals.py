"""Options of verl that have not been shown exact, refused by verl's own keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.batch import short

STRATEGY = "fsdp2"
ROLES = {
    "actor": ("actor_rollout_ref.actor.", "fsdp_config.", "actor_rollout_ref.model."),
    "ref": ("actor_rollout_ref.ref.", "fsdp_config.", "actor_rollout_ref.model."),
    "critic": ("critic.", "fsdp.", "critic.model."),
}
"""By role: what the keys of its own options begin with, those of its engine, and its model's."""


@dataclass(frozen=True)
class Refusal:
    """One option.

    key: as verl has it; `{role}`, `{engine}` and `{model}` stand for the beginnings of a role's.
    found: its value where it is refused, None where it is not.
    allowed: values that are taken.
    reason, remedy: sentences.
    """

    key: str
    found: Callable[[Any, Any], object]
    allowed: str
    reason: str
    remedy: str


def _engine(name: str, allowed: object) -> Callable[[Any, Any], object]:
    def found(engine: Any, model: Any) -> object:
        value = engine.get(name, allowed)
        return None if value == allowed else value

    return found


def _model(name: str, allowed: object) -> Callable[[Any, Any], object]:
    def found(engine: Any, model: Any) -> object:
        value = model.get(name, allowed)
        return None if value == allowed else value

    return found


def _enabled(config: Any, name: str) -> object:
    table = config.get(name, None)
    return True if table is not None and table.get("enable", table.get("enabled", False)) else None


def _float16(engine: Any, model: Any) -> object:
    given = (engine.get("mixed_precision", None) or {}).get("param_dtype", "bf16")
    return given if str(given).removeprefix("torch.") in ("fp16", "float16", "half") else None


def _replays(engine: Any, model: Any) -> object:
    mode = engine.router_replay.mode
    return None if mode == "disabled" else mode


REFUSALS = (
    Refusal(
        "{role}ulysses_sequence_parallel_size",
        _engine("ulysses_sequence_parallel_size", 1),
        "1",
        "Sequences are not split over ranks yet.",
        "Set it to 1; rollouts that share tokens need less memory than whole rows do.",
    ),
    Refusal(
        "{model}use_fused_kernels",
        _model("use_fused_kernels", False),
        "false",
        "It replaces the forward of the model's class; forkpoint's head keeps no logits either.",
        "Set it to false.",
    ),
    Refusal(
        "{model}use_liger",
        _model("use_liger", False),
        "false",
        "It replaces the model's modules by others.",
        "Set it to false; decoder blocks are compiled on CUDA.",
    ),
    Refusal(
        "{model}enable_activation_offload",
        _model("enable_activation_offload", False),
        "false",
        "It wraps the forwards of blocks in its own schedule, of one forward and one backward.",
        'Set it to false; [config] activations = "offload" in forkpoint\'s own file offloads too.',
    ),
    Refusal(
        "{model}tiled_mlp.enabled",
        lambda engine, model: _enabled(model, "tiled_mlp"),
        "false",
        "It replaces the forward of the model's MLPs.",
        'Set it to false; [config] checkpointing = "selective" recomputes them.',
    ),
    Refusal(
        "{model}mtp.enable_train",
        lambda engine, model: True if model.mtp.enable_train else None,
        "false",
        "Layers that predict several tokens are not trained.",
        "Set it to false.",
    ),
    Refusal(
        "{engine}qat.enable",
        lambda engine, model: _enabled(engine, "qat"),
        "false",
        "Quantized weights have not been shown exact.",
        "Set it to false.",
    ),
    Refusal(
        "{role}pad_to_length",
        _engine("pad_to_length", False),
        "false",
        "forkpoint packs its own microbatches, so that padding to a length would do nothing.",
        "Set it to false.",
    ),
    Refusal(
        "{engine}offload_policy",
        _engine("offload_policy", False),
        "false",
        "Parameters that stay on the CPU during a step have not been shown exact.",
        "Set it to false, and param_offload and optimizer_offload to true: they keep parameters, "
        "gradients and states on the CPU between steps.",
    ),
    Refusal(
        "{engine}mixed_precision.param_dtype",
        _float16,
        "bf16, fp32",
        "verl scales losses for float16, which has not been shown.",
        "Take bf16.",
    ),
    Refusal(
        "{engine}router_replay.mode",
        _replays,
        "disabled",
        "Experts are chosen by the router in each forward.",
        "Set it to disabled.",
    ),
)


def check_options(engine: Any, model: Any) -> None:
    """Refuse what verl is asked for and forkpoint would not do exactly.

    engine, model: verl's FSDPEngineConfig and HFModelConfig.

    Raises UnsupportedError, which names verl's key.
    """
    role = role_of(engine, model)
    for refusal in REFUSALS:
        found = refusal.found(engine, model)
        if found is not None:
            raise UnsupportedError(
                f"{named(refusal.key, role)} is {_text(found)}; forkpoint's engine takes "
                f"{refusal.allowed}. {refusal.reason} {refusal.remedy} Without "
                "VERL_ENGINE_VENDOR=forkpoint verl's own engine runs."
            )


def role_of(engine: Any, model: Any) -> str:
    """One of ROLES."""
    if model.get("model_type", "language_model") == "value_model":
        return "critic"
    return "ref" if engine.forward_only else "actor"


def named(key: str, role: str) -> str:
    """A key with the beginnings of a role."""
    own, engine, model = ROLES[role]
    return key.format(role=own, engine=own + engine, model=model)


def check_strategy(strategy: str, model_type: str) -> None:
    """Refuse a strategy that forkpoint has no engine for, by verl's key.

    Raises UnsupportedError but for fsdp2.
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


BATCH_OPTIONS = {
    "distillation_use_topk": "its loss reads whole logits. Use a distillation loss of log-probs",
    "distillation_only": "its loss reads whole logits. Use a distillation loss of log-probs",
    "use_fused_kernels": "its head is another. Set use_fused_kernels of the model to false",
    "enable_routing_replay": (
        "experts are chosen by the router in each forward. Set router_replay.mode to disabled"
    ),
}
"""By key of a mini-batch that asks for something: why it is refused, and what to do."""


SCORED_ALONE = "calculate_sum_pi_squared"


def check_batch(data: Any, get: Callable[..., Any], *, scores: bool) -> None:
    """Refuse a mini-batch that asks for what forkpoint does not compute.

    get: verl's get_non_tensor_data.
    scores: whether it is a pass without gradients and without a loss.

    Raises UnsupportedError.
    """
    for key, why in BATCH_OPTIONS.items():
        if get(data=data, key=key, default=False):
            raise UnsupportedError(f"a mini-batch asks for {key}: {why}.")
    if not scores and get(data=data, key=SCORED_ALONE, default=False):
        raise UnsupportedError(
            f"a mini-batch with a loss asks for {SCORED_ALONE}: sums of squared probabilities are "
            "computed with old log-probs alone, as verl's trainer asks for them, and losses do not "
            "get them. Leave the key out of updates."
        )
    keys = set(data.keys())
    if "routed_experts" in keys:
        raise UnsupportedError(
            "a mini-batch has routed_experts: experts are chosen by the router in each forward. "
            "Set router_replay.mode and rollout.enable_rollout_routing_replay off."
        )
    mode = str(getattr(get(data=data, key="pad_mode", default="no_padding"), "value", "no_padding"))
    if mode != "no_padding":
        raise UnsupportedError(
            f"a mini-batch has pad_mode {short(mode)}; forkpoint's engine takes no_padding. Set "
            "data.pad_mode=no_padding."
        )
    media = data.get("multi_modal_inputs", None) if "multi_modal_inputs" in keys else None
    if media is not None and any(len(getattr(one, "data", one) or ()) for one in media):
        raise UnsupportedError(
            "a mini-batch has multi_modal_inputs; images and videos are not supported yet. Train "
            "on a dataset without them."
        )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else short(value)
