"""Arguments that a loss does not have, and what TRL and verl mean by them.

The names are those of TRL 1.16 (GRPOConfig, RLOOConfig, DPOConfig, CPOConfig, PPOConfig), of verl
0.9.1 (ActorConfig, PolicyLossConfig, CriticConfig, AlgoConfig, RolloutCorrectionConfig), and those
that OpenRLHF and slime give to the same numbers.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from forkpoint.errors import ArgumentError

C = TypeVar("C", bound=Callable[..., Any])

TAKES: dict[str, tuple[str, ...]] = {}
"""The arguments of every loss, by the name of its class."""

RENAMED: dict[str, str] = {
    "clip": "epsilon epsilon_low clip_ratio clip_ratio_low cliprange cliprange_low clip_range "
    "clip_eps eps_clip eps_clip_low cliprange_value value_clip clip_range_vf",
    "clip_high": "epsilon_high clip_ratio_high cliprange_high eps_clip_high",
    "dual_clip": "delta clip_ratio_c eps_clip_c",
    "kl": "beta kl_loss_coef",
    "entropy": "entropy_coef entropy_coeff entropy_loss_coef ent_coef",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "max_tokens": "max_completion_length max_response_length loss_scale_factor",
    "gamma": "simpo_gamma discount",
    "lam": "gae_lambda lambd lmbda",
    "cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap tis_imp_ratio_cap",
    "floor": "vllm_importance_sampling_clip_min",
}
"""Names of an argument in other libraries, where its value means the same here."""

Choice = tuple[str | None, Mapping[str, object]]
"""The loss to take (None: the one that was written), and the arguments to give."""
_TOKENS, _ROLLOUTS = {"normalize": "token"}, {"normalize": "rollout"}
CHOICES: dict[str, dict[str, Choice]] = {
    "loss_agg_mode": {
        "token-mean": (None, _TOKENS),
        "seq-mean-token-mean": (None, _ROLLOUTS),
        "seq-mean-token-sum": ("DrGRPO", {"max_tokens": 1}),
    },
    "loss_type": {
        **{name: ("DPO", {"variant": name}) for name in ("sigmoid", "robust", "hinge")},
        "ipo": ("DPO", {"variant": "ipo", "length_normalized": True}),
        "sigmoid_norm": ("DPO", {"length_normalized": True}),
        "grpo": ("GRPO", _ROLLOUTS),
        "dapo": ("GRPO", _TOKENS),
        "bnpo": ("BNPO", {}),
        "cispo": ("CISPO", {}),
        "sapo": ("SAPO", {}),
        "simpo": ("SimPO", {}),
        "sft": ("SFT", {}),
    },
    "loss_mode": {
        "vanilla": ("PPO", {"dual_clip": 3.0}),
        "gspo": ("GSPO", {}),
        "geo_mean": ("GMPO", {}),
        "sapo": ("SAPO", {}),
        "cispo": ("CISPO", {}),
    },
    "importance_sampling_level": {
        "token": ("GRPO", {}),
        "sequence": ("GSPO", {}),
        "sequence_token": ("GSPO", {"level": "token"}),
    },
    "kl_loss_type": {
        "kl": (None, {"kl_estimator": "k1"}),
        "mse": (None, {"kl_estimator": "k2"}),
        "low_var_kl": (None, {"kl_estimator": "k3"}),
        **{name: (None, {"kl_estimator": name}) for name in ("k1", "k2", "k3")},
    },
}
"""For values of an argument, the loss here that computes the same."""
_MEANS_OF = {"DAPO": _TOKENS, "BNPO": _TOKENS, "GSPO": _ROLLOUTS, "GMPO": _ROLLOUTS}
"""Means of losses that have no argument normalize."""

_SAMPLER = (
    "give the rollouts the weights that losses.importance_weights computes; its arguments are mode "
    '("truncate" or "mask"), level ("token" or "sequence"), cap and floor'
)
_NO_LOSS = "no loss here has this value; write it as a function of (outputs, batch)"
_NOTES: dict[str, str] = {
    "CISPO.epsilon_high": "TRL's cispo bounds weights by it, and clip_high is added to 1; give "
    "epsilon_high - 1 as clip_high",
    "CISPO.epsilon": "TRL's cispo does not read it, so leave it out; verl's is clip",
    "SAPO.epsilon SAPO.epsilon_high SAPO.clip_ratio SAPO.clip_ratio_high": "SAPO fades with the "
    "ratio instead of a clip; leave it out",
    "loss_agg_mode": "normalize says what means are taken over, DrGRPO divides by a constant "
    "max_tokens (verl's loss_scale_factor); for a sum take the mean over tokens and give "
    "forward_backward the number of trained tokens as scale",
    "loss_type loss_mode": _NO_LOSS,
    "kl_loss_type": "the estimators here are 'k1', 'k2' and 'k3'; give one of them as kl_estimator",
    "use_kl_loss": "give verl's kl_loss_coef as kl, or leave it out for no such term",
    "num_iterations ppo_epochs num_ppo_epochs": "it counts updates on one batch; call "
    "forward_backward once for each, with the old_logprobs from before the first",
    "num_generations rollout_n": "the rollouts of a group have the same group_id",
    "scale_rewards reward_weights reward_clip_range normalize_advantages whiten_rewards "
    "adv_estimator norm_adv_by_std_in_grpo multi_objective_aggregation": "it is a step in "
    "computing advantages; compute them so, and give them to the rollouts",
    "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold use_tis rollout_is_weights "
    "rollout_is_batch_normalize rollout_correction vllm_importance_sampling_correction "
    f"vllm_importance_sampling_mode {RENAMED['cap']} {RENAMED['floor']}": _SAMPLER,
    "num_items_in_batch batch_num_tokens global_batch_size": "give the counts of the whole step to "
    "forward_backward as denominators",
    "kl_coef init_kl_coef use_kl_in_reward kl_penalty": "it is of a KL penalty in the reward; "
    "subtract kl_coef * (old_logprobs - reference_logprobs) from the advantages, or take the "
    "argument kl",
    "mask_truncated_completions": "clear the loss mask of the rollouts that were cut off",
    "temperature": "give every Rollout its temperature",
    "calculate_entropy": "the argument entropy computes entropies where it is above 0",
    "vf_coef": "a critic is another model; give its forward_backward a scale",
}
NOTES: dict[str, str] = {name: note for names, note in _NOTES.items() for name in names.split()}
"""Advice for arguments, of any loss or of one, that nothing here has."""


def meaning(loss: str, name: str, value: object, takes: Collection[str]) -> str | None:
    """Meaning of an argument in another library and how to write it here; None if it is unknown.

    Args:
        loss: the name of the class of the loss, or of a function of forkpoint.losses.
        takes: its arguments.
    """
    if f"{loss}.{name}" in NOTES:
        return NOTES[f"{loss}.{name}"]
    if isinstance(value, list | tuple) and len(value) == 1:  # TRL's loss_type may be a list
        value = value[0]
    choices = CHOICES.get(name, {})
    if isinstance(value, str) and value in choices:
        take, give = choices[value]
        if give == _MEANS_OF.get(loss) and take is None:
            return f"{loss} does so; leave it out"
        written = [f"{key}={entry!r}" for key, entry in give.items()]
        if take in (None, loss) and give.keys() <= set(takes):
            return f"give {' and '.join(written)}" if give else f"{loss} does so; leave it out"
        if take or give.keys() == {"normalize"}:
            return f"take losses.{take or 'GRPO'}({', '.join(written)})"
    for ours, theirs in RENAMED.items():
        if name in theirs.split() and ours in takes:
            return f"give {ours}={value!r}"
    return NOTES.get(name)


def check_arguments(name: str, takes: tuple[str, ...], given: Mapping[str, object]) -> None:
    """Raises ArgumentError where `given` has arguments that are not among `takes`."""
    messages = []
    for argument, value in given.items():
        if argument in takes:
            continue
        meant = meaning(name, argument, value, takes)
        others = ", ".join(other for other, names in TAKES.items() if argument in names)
        near = difflib.get_close_matches(argument, takes, n=1)
        if meant is not None:
            what = f": {meant}."
        elif others:
            what = f". Leave it out, or take a loss that has it: {others}."
        else:
            perhaps = f" Perhaps {near[0]} is meant." if near else ""
            what = f"; it takes {', '.join(takes) or 'none'}.{perhaps}"
        messages.append(f"{name} has no argument {argument}{what}")
    if messages:
        raise ArgumentError(" ".join(messages))


def explains_arguments(target: C) -> C:
    """Decorator for a loss (above `@dataclass`) or a function, whose signature stays.

    A call raises ArgumentError for an argument that it does not have, with what is meant where TRL
    or verl has one of that name; also for arguments without names, where it takes them by name
    alone.
    """
    name, parameters = target.__name__, inspect.signature(target).parameters
    takes = tuple(parameters)
    by_name = all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    is_loss = isinstance(target, type)
    made: Callable[..., Any] = target.__init__ if is_loss else target

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[is_loss:]  # a loss is given itself first
        if given and by_name:
            raise ArgumentError(
                f"{name} takes arguments by name, and got {', '.join(map(repr, given))} "
                f"without one. Write {name}(name=value); its names are "
                f"{', '.join(takes) or 'none: it has no arguments'}."
            )
        check_arguments(name, takes, kwargs)
        return made(*args, **kwargs)

    if not is_loss:
        return cast(C, checked)
    TAKES[name] = takes
    setattr(target, "__init__", checked)  # noqa: B010 - assigning to a method is a type error
    return cast(C, target)
