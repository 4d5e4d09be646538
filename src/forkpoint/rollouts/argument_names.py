"""Arguments of other libraries' losses, and the arguments of forkpoint's losses that they mean.

The names are those of TRL 1.16 (GRPOConfig, RLOOConfig, DPOConfig, CPOConfig, PPOConfig), of verl
0.9.1 (ActorConfig, PolicyLossConfig, CriticConfig, AlgoConfig, RolloutCorrectionConfig), and those
that OpenRLHF and slime give to the same numbers. Imports no torch.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real

CLIPPED = frozenset({"GRPO", "PPO", "DAPO", "BNPO", "DrGRPO"})
OF_A_RATIO = CLIPPED | {"GSPO", "CISPO", "Distillation"}
POLICY = CLIPPED | {"GSPO", "CISPO", "SAPO"}
NORMALIZED = POLICY - {"DAPO", "BNPO", "DrGRPO", "GSPO"} | {"LogLikelihood", "ValueLoss"}
NORMALIZED |= {"Distillation"}
"""Losses with the argument normalize."""


@dataclass(frozen=True)
class Spelling:
    """How an argument and a loss are written: in Python, or as options of the command line."""

    argument: Callable[[str, object], str]
    loss: Callable[..., str]


def _python_argument(name: str, value: object) -> str:
    return f"{name}={value!r}"


def _python_loss(name: str, **arguments: object) -> str:
    return f"losses.{name}({', '.join(_python_argument(n, v) for n, v in arguments.items())})"


PYTHON = Spelling(_python_argument, _python_loss)

_LOW = ("epsilon", "epsilon_low", "clip_ratio", "clip_ratio_low", "cliprange", "cliprange_low")
_LOW += ("clip_range", "clip_eps", "eps_clip", "eps_clip_low")
_HIGH = ("epsilon_high", "clip_ratio_high", "cliprange_high", "eps_clip_high")
_OF_VALUES = ("cliprange_value", "value_clip", "clip_range_vf")
_CAPS = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "tis_imp_ratio_cap")
_ENTROPY = ("entropy_coef", "entropy_coeff", "entropy_loss_coef", "ent_coef")
_MOST_TOKENS = ("max_completion_length", "max_response_length", "loss_scale_factor")
_WEIGHTS = frozenset({"importance_weights"})

RENAMED: tuple[tuple[frozenset[str], tuple[str, ...], str], ...] = (
    (OF_A_RATIO, _LOW, "clip"),
    (OF_A_RATIO, _HIGH, "clip_high"),
    (frozenset({"ValueLoss"}), (*_OF_VALUES, "cliprange", "clip_range"), "clip"),
    (CLIPPED, ("delta", "clip_ratio_c", "eps_clip_c"), "dual_clip"),
    (POLICY, ("beta", "kl_loss_coef"), "kl"),
    (POLICY, _ENTROPY, "entropy"),
    (frozenset({"SAPO"}), ("sapo_temperature_pos",), "tau_pos"),
    (frozenset({"SAPO"}), ("sapo_temperature_neg",), "tau_neg"),
    (frozenset({"DrGRPO"}), _MOST_TOKENS, "max_tokens"),
    (frozenset({"SimPO"}), ("simpo_gamma",), "gamma"),
    (_WEIGHTS, _CAPS, "cap"),
    (_WEIGHTS, ("vllm_importance_sampling_clip_min",), "floor"),
    (frozenset({"gae"}), ("gae_lambda", "lambd", "lmbda"), "lam"),
    (frozenset({"gae"}), ("discount",), "gamma"),
)
"""For these losses, names of an argument whose value means the same here, and its name here."""

_UPDATES = (
    "it counts updates on one batch; call forward_backward once for each, with the old_logprobs "
    "from before the first"
)
_GROUPS = "the rollouts of a group have the same group_id, as many as there are"
_ADVANTAGES = "it is a step in computing advantages; compute them so, and give them to the rollouts"
_SAMPLER = (
    "a sampler that is not the trainer is corrected for before the step; give the rollouts the "
    "weights that losses.importance_weights computes"
)
_WHOLE_STEP = "give the counts of the whole step to forward_backward as denominators"
_REWARD_KL = (
    "it is of a KL penalty in the reward; subtract kl_coef * (old_logprobs - reference_logprobs) "
    "from the advantages, or take the argument kl for a KL term in the loss"
)
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs"), _UPDATES),
    **dict.fromkeys(("num_generations", "rollout_n"), _GROUPS),
    **dict.fromkeys(("scale_rewards", "reward_weights", "reward_clip_range"), _ADVANTAGES),
    **dict.fromkeys(("normalize_advantages", "whiten_rewards", "adv_estimator"), _ADVANTAGES),
    **dict.fromkeys(("norm_adv_by_std_in_grpo", "multi_objective_aggregation"), _ADVANTAGES),
    **dict.fromkeys(("rollout_is", "rollout_is_threshold", "rollout_rs", "use_tis"), _SAMPLER),
    **dict.fromkeys(("rollout_rs_threshold", "rollout_is_batch_normalize"), _SAMPLER),
    **dict.fromkeys(("rollout_correction", "vllm_importance_sampling_correction"), _SAMPLER),
    **dict.fromkeys(("vllm_importance_sampling_mode", *_CAPS), _SAMPLER),
    **dict.fromkeys(("vllm_importance_sampling_clip_min", "rollout_is_weights"), _SAMPLER),
    **dict.fromkeys(("num_items_in_batch", "batch_num_tokens", "global_batch_size"), _WHOLE_STEP),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "use_kl_in_reward", "kl_penalty"), _REWARD_KL),
    "mask_truncated_completions": "clear the loss mask of the rollouts that were cut off",
    "temperature": "every Rollout has a temperature of its own",
    "calculate_entropy": "the argument entropy computes entropies where it is above 0",
    "vf_coef": "a critic is a model of its own; give its forward_backward a scale",
}
"""Arguments that no loss has here, and where what they do is done."""

WITHOUT = frozenset(
    (
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "dro_beta"),
        *("top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl"),
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
        *("entropy_target", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"),
        *("ppo_kl_coef", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "rpo_alpha"),
        *("use_weighting", "discopop_tau", "cpo_alpha", "alpha", "loss_weights", "reference_free"),
    )
)
"""Arguments of losses that forkpoint does not have."""
NO_SUCH_LOSS = (
    "no loss here does that; leave it out, or write the loss as a function of (outputs, batch)"
)
LEFT_OUT = "{loss} does so; leave it out"


@dataclass(frozen=True)
class Given:
    """An argument that a loss does not have."""

    loss: str
    name: str
    value: object
    spelling: Spelling

    def instead(self, **arguments: object) -> str:
        return "give " + " and ".join(self.spelling.argument(n, v) for n, v in arguments.items())

    def take(self, loss: str, **arguments: object) -> str:
        """Another loss, or this one without the argument where it is the one that is meant."""
        if loss == self.loss and not arguments:
            return LEFT_OUT.format(loss=loss)
        return f"take {self.spelling.loss(loss, **arguments)}"


def _denominator(given: Given) -> str:
    """The sentence for verl's loss_agg_mode."""
    mode, choice = given.value, given.loss in NORMALIZED
    if mode == "token-mean":
        if given.loss in ("DAPO", "BNPO"):
            return LEFT_OUT.format(loss=given.loss)
        return given.instead(normalize="token") if choice else given.take("GRPO", normalize="token")
    if mode == "seq-mean-token-mean":
        if given.loss == "GSPO":
            return LEFT_OUT.format(loss=given.loss)
        if choice:
            return given.instead(normalize="rollout")
        return given.take("GRPO", normalize="rollout")
    if mode == "seq-mean-token-sum-norm":
        if given.loss == "DrGRPO":
            return "DrGRPO does so, and its max_tokens is loss_scale_factor; leave it out"
        return "take losses.DrGRPO, whose max_tokens is loss_scale_factor"
    if mode == "seq-mean-token-sum":
        return given.take("DrGRPO", max_tokens=1)
    if mode == "token-sum":
        if given.loss == "LogLikelihood":
            return given.instead(normalize="none")
        return (
            'take the mean over tokens, normalize="token", and give forward_backward the number of '
            "trained tokens as scale"
        )
    return "normalize says what means are taken over, DrGRPO divides by a constant"


def _loss_type(given: Given) -> str:
    """The sentence for TRL's loss_type, of GRPOConfig, DPOConfig and CPOConfig."""
    kind = given.value
    if isinstance(kind, (list, tuple)) and len(kind) == 1:
        kind = kind[0]
    if kind in ("sigmoid", "hinge", "robust"):
        return (
            given.instead(variant=kind) if given.loss == "DPO" else given.take("DPO", variant=kind)
        )
    if kind in ("ipo", "sigmoid_norm"):
        variant = {"variant": "ipo"} if kind == "ipo" else {}
        arguments = {**variant, "length_normalized": True}
        return given.instead(**arguments) if given.loss == "DPO" else given.take("DPO", **arguments)
    losses: dict[object, tuple[str, dict[str, object]]] = {
        "grpo": ("GRPO", {"normalize": "rollout"}),
        "dapo": ("GRPO", {"normalize": "token"}),
        "bnpo": ("BNPO", {}),
        "cispo": ("CISPO", {}),
        "sapo": ("SAPO", {}),
        "simpo": ("SimPO", {}),
        "sft": ("SFT", {}),
    }
    if kind == "dr_grpo":
        return "take losses.DrGRPO, whose max_tokens is max_completion_length"
    if not isinstance(kind, str) or kind not in losses:
        return f"no loss here is TRL's {kind!r}; write it as a function of (outputs, batch)"
    if (kind, given.loss) == ("dapo", "DAPO"):
        return (
            "DAPO takes the same mean; leave it out, and give TRL's epsilon_high as clip_high, or "
            "its epsilon where there is none"
        )
    loss, arguments = losses[kind]
    if loss == given.loss and arguments:
        return given.instead(**arguments)
    return given.take(loss, **arguments)


def _loss_mode(given: Given) -> str:
    """The sentence for verl's policy_loss.loss_mode."""
    if given.value == "vanilla":
        if given.loss in CLIPPED:
            return f"it is this loss with verl's clip_ratio_c; {given.instead(dual_clip=3.0)}"
        return given.take("PPO", dual_clip=3.0)
    names = {"gspo": "GSPO", "sapo": "SAPO", "cispo": "CISPO"}
    if not isinstance(given.value, str) or given.value not in names:
        return f"no loss here is verl's {given.value!r}; write it as a function of (outputs, batch)"
    return given.take(names[given.value])


def _level(given: Given) -> str:
    """The sentence for TRL's importance_sampling_level."""
    if given.value == "sequence":
        return given.take("GSPO")
    if given.value == "sequence_token":
        return (
            given.instead(level="token")
            if given.loss == "GSPO"
            else given.take("GSPO", level="token")
        )
    if given.loss == "GSPO":
        return "a ratio per token is that of GRPO; take losses.GRPO"
    return LEFT_OUT.format(loss=given.loss)


def _estimator(given: Given) -> str | None:
    """The sentence for verl's kl_loss_type."""
    if given.loss not in POLICY:
        return None
    known = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = str(given.value)
    if kind.endswith("+") and kind[:-1] in known:
        return f"its gradient is that of k2; {given.instead(kl_estimator='k2')}"
    if kind not in known:
        return "the estimators here are 'k1', 'k2' and 'k3'; give one of them as kl_estimator"
    return given.instead(kl_estimator=known[kind])


def _use_kl(given: Given) -> str | None:
    if given.loss not in POLICY:
        return None
    return "a kl above 0 adds the term; " + (
        "give verl's kl_loss_coef as kl" if given.value else "leave it out"
    )


def _trl_cispo(given: Given) -> str | None:
    """The sentence for epsilon_high, which TRL's CISPO does not add to 1, and for epsilon."""
    if given.loss != "CISPO":
        return None
    if given.name != "epsilon_high":
        return (
            "TRL's cispo does not read it, and verl's is clip; leave it out, or "
            + given.instead(clip=given.value)
        )
    why = "TRL's cispo bounds weights by it, and clip_high is added to 1; "
    if isinstance(given.value, Real) and float(given.value) >= 1:
        return why + given.instead(clip_high=round(float(given.value) - 1, 12))
    return why + "give epsilon_high - 1 as clip_high"


def _no_clip(given: Given) -> str | None:
    if given.loss == "SAPO":
        return "SAPO fades with the ratio in place of a clip; leave it out"
    return None


def _weights_mode(given: Given) -> str | None:
    """The sentence for TRL's vllm_importance_sampling_mode and verl's rollout_is."""
    if given.loss != "importance_weights":
        return None
    level, _, mode = str(given.value).partition("_")
    if level not in ("token", "sequence") or mode not in ("", "truncate", "mask"):
        return 'mode is "truncate" or "mask" here, and level "token" or "sequence"'
    return given.instead(level=level, **({"mode": mode} if mode else {}))


def _threshold(given: Given) -> str | None:
    """The sentence for verl's rollout_is_threshold: a cap, or text of two bounds."""
    if given.loss != "importance_weights":
        return None
    low, between, high = str(given.value).partition("_")
    try:
        bounds = {"cap": float(high), "floor": float(low)} if between else {"cap": float(low)}
    except ValueError:
        return "the bounds of ratios are floor and cap here"
    return given.instead(**({"mode": "mask"} if between else {}), **bounds)


CONVERTED: dict[str, Callable[[Given], str | None]] = {
    "loss_agg_mode": _denominator,
    "loss_type": _loss_type,
    "loss_mode": _loss_mode,
    "importance_sampling_level": _level,
    "kl_loss_type": _estimator,
    "use_kl_loss": _use_kl,
    "vllm_importance_sampling_mode": _weights_mode,
    "rollout_is": _weights_mode,
    "rollout_is_threshold": _threshold,
    **dict.fromkeys((*_LOW, *_HIGH), _no_clip),
    **dict.fromkeys(
        ("epsilon", "epsilon_low", "epsilon_high"), lambda g: _trl_cispo(g) or _no_clip(g)
    ),
}
"""Arguments whose value has another meaning here. None where the name means nothing to a loss."""


def meaning(loss: str, name: str, value: object, spelling: Spelling = PYTHON) -> str | None:
    """The meaning of an argument that a loss does not have, and what to give for it.

    A clause without a full stop, or None for a name that no other library has for such a loss.

    loss: name of the loss's class, or of a function of forkpoint.losses.
    value: the value that was given.
    """
    given = Given(loss, name, value, spelling)
    converted = CONVERTED[name](given) if name in CONVERTED else None
    if converted is not None:
        return converted
    for losses, names, ours in RENAMED:
        if loss in losses and name in names:
            return f"it is {ours} here; {given.instead(**{ours: value})}"
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return NO_SUCH_LOSS if name in WITHOUT else None


def is_known(name: str) -> bool:
    """Whether some loss of another library has an argument of that name."""
    return (
        name in CONVERTED
        or name in ELSEWHERE
        or name in WITHOUT
        or any(name in names for _, names, _ in RENAMED)
    )


def unknown_argument(
    loss: str,
    name: str,
    value: object,
    takes: Collection[str],
    taken_by: Mapping[str, Collection[str]],
) -> str:
    """The message for an argument that a loss, or a function of forkpoint.losses, does not have.

    takes: the arguments that it has.
    taken_by: the arguments of every loss, by the name of its class.
    """
    meant = meaning(loss, name, value)
    if meant is not None:
        return f"{loss} has no argument {name}: {meant}."
    having = ", ".join(other for other, names in taken_by.items() if name in names)
    if having:
        return f"{loss} has no argument {name}. Leave it out, or take a loss that has it: {having}."
    near = difflib.get_close_matches(name, takes, n=1)
    perhaps = f" Perhaps {near[0]} is meant." if near else ""
    return f"{loss} has no argument {name}; it takes {', '.join(takes)}.{perhaps}"
