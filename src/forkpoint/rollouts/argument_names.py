"""Arguments of other libraries' losses, and the arguments of forkpoint's losses that they mean.

The names are those of TRL 1.16 (GRPOConfig, RLOOConfig, DPOConfig, CPOConfig, PPOConfig), of verl
0.9.1 (ActorConfig, PolicyLossConfig, CriticConfig, AlgoConfig, RolloutCorrectionConfig), and those
that OpenRLHF and slime give to the same numbers. Imports no torch.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CLIPPED = frozenset({"GRPO", "PPO", "DAPO", "BNPO", "DrGRPO"})
OF_A_RATIO = CLIPPED | {"GSPO", "GMPO", "CISPO", "Distillation"}
POLICY = CLIPPED | {"GSPO", "GMPO", "CISPO", "SAPO"}
NORMALIZED = POLICY - {"DAPO", "BNPO", "DrGRPO", "GSPO", "GMPO"}
NORMALIZED |= {"LogLikelihood", "ValueLoss", "Distillation"}
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
VALUE = object()
"""Stands in a row of the table for the value that the user gave."""


@dataclass(frozen=True)
class Row:
    """Names of one argument in other libraries, and its meaning here.

    names: names of the argument.
    why: a clause; "{loss}" and "{value}" in it become those that the user wrote.
    losses: the losses, or functions of forkpoint.losses, that the row is for; None for all.
    values: the values of the argument that the row is for; none for all.
    take: the loss to take, unless it is the one that was written.
    give: arguments to give instead, or a function that makes them of the value. If it raises
        TypeError or ValueError the row does not apply.
    """

    names: tuple[str, ...]
    why: str = ""
    losses: Collection[str] | None = None
    values: tuple[object, ...] = ()
    take: str | None = None
    give: Mapping[str, object] | Callable[[Any], dict[str, object]] = field(default_factory=dict)

    def meaning(self, loss: str, value: Any, spelling: Spelling) -> str | None:
        """The clause for a user's loss and value, or None if the row does not apply."""
        if self.losses is not None and loss not in self.losses:
            return None
        if self.values and value not in self.values:
            return None
        try:
            given = self.give(value) if callable(self.give) else self.give
        except (TypeError, ValueError):
            return None
        arguments = {n: value if v is VALUE else v for n, v in given.items()}
        clauses = [self.why.format(loss=loss, value=repr(value))] if self.why else []
        if self.take not in (None, loss):
            clauses.append(f"take {spelling.loss(self.take, **arguments)}")
        elif arguments:
            written = " and ".join(spelling.argument(n, v) for n, v in arguments.items())
            clauses.append(f"give {written}")
        elif self.take is not None:
            clauses.append(f"{loss} does so; leave it out")
        return "; ".join(clauses)


def _less_one(value: Any) -> dict[str, object]:
    """clip_high for TRL's epsilon_high of CISPO, which is not added to 1."""
    if not float(value) >= 1:
        raise ValueError
    return {"clip_high": round(float(value) - 1, 12)}


def _level_and_mode(value: Any) -> dict[str, object]:
    """TRL's vllm_importance_sampling_mode and verl's rollout_is, such as "sequence_mask"."""
    level, _, mode = str(value).partition("_")
    if level not in ("token", "sequence") or mode not in ("", "truncate", "mask"):
        raise ValueError
    return {"level": level, **({"mode": mode} if mode else {})}


def _bounds(value: Any) -> dict[str, object]:
    """verl's rollout_is_threshold: a cap, or text of two bounds such as "0.5_5.0"."""
    low, two, high = str(value).partition("_")
    if two:
        return {"mode": "mask", "cap": float(high), "floor": float(low)}
    return {"cap": float(low)}


_LOW = ("epsilon", "epsilon_low", "clip_ratio", "clip_ratio_low", "cliprange", "cliprange_low")
_LOW += ("clip_range", "clip_eps", "eps_clip", "eps_clip_low")
_HIGH = ("epsilon_high", "clip_ratio_high", "cliprange_high", "eps_clip_high")
_OF_VALUES = ("cliprange_value", "value_clip", "clip_range_vf", "cliprange", "clip_range")
_CAPS = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "tis_imp_ratio_cap")
_WEIGHTS = ("importance_weights",)
_LEAVE_OUT = "{loss} does so; leave it out"
_WRITE = "no loss here is {library}'s {{value}}; write it as a function of (outputs, batch)"
_CISPO_HIGH = "TRL's cispo bounds weights by it, and clip_high is added to 1"
_TOKENS, _ROLLOUTS = {"normalize": "token"}, {"normalize": "rollout"}

_RENAMED: tuple[tuple[Collection[str], tuple[str, ...], str], ...] = (
    (OF_A_RATIO, _LOW, "clip"),
    (OF_A_RATIO, _HIGH, "clip_high"),
    (("ValueLoss",), _OF_VALUES, "clip"),
    (CLIPPED, ("delta", "clip_ratio_c", "eps_clip_c"), "dual_clip"),
    (POLICY, ("beta", "kl_loss_coef"), "kl"),
    (POLICY, ("entropy_coef", "entropy_coeff", "entropy_loss_coef", "ent_coef"), "entropy"),
    (("SAPO",), ("sapo_temperature_pos",), "tau_pos"),
    (("SAPO",), ("sapo_temperature_neg",), "tau_neg"),
    (
        ("DrGRPO",),
        ("max_completion_length", "max_response_length", "loss_scale_factor"),
        "max_tokens",
    ),
    (("SimPO",), ("simpo_gamma",), "gamma"),
    (_WEIGHTS, _CAPS, "cap"),
    (_WEIGHTS, ("vllm_importance_sampling_clip_min",), "floor"),
    (("gae",), ("gae_lambda", "lambd", "lmbda"), "lam"),
    (("gae",), ("discount",), "gamma"),
)
"""For these losses, names of an argument whose value means the same here, and its name here."""

_COMPUTED_BY: tuple[tuple[str, tuple[str, ...], str, Mapping[str, object]], ...] = (
    ("loss_agg_mode", ("token-mean",), "GRPO", _TOKENS),
    ("loss_agg_mode", ("seq-mean-token-mean",), "GRPO", _ROLLOUTS),
    ("loss_agg_mode", ("seq-mean-token-sum",), "DrGRPO", {"max_tokens": 1}),
    ("loss_type", ("sigmoid", "hinge", "robust"), "DPO", {"variant": VALUE}),
    ("loss_type", ("ipo",), "DPO", {"variant": "ipo", "length_normalized": True}),
    ("loss_type", ("sigmoid_norm",), "DPO", {"length_normalized": True}),
    ("loss_type", ("grpo",), "GRPO", _ROLLOUTS),
    ("loss_type", ("dapo",), "GRPO", _TOKENS),
    ("loss_type", ("bnpo",), "BNPO", {}),
    ("loss_type", ("cispo",), "CISPO", {}),
    ("loss_type", ("sapo",), "SAPO", {}),
    ("loss_type", ("simpo",), "SimPO", {}),
    ("loss_type", ("sft",), "SFT", {}),
    ("loss_mode", ("vanilla",), "PPO", {"dual_clip": 3.0}),
    ("loss_mode", ("gspo",), "GSPO", {}),
    ("loss_mode", ("geo_mean",), "GMPO", {}),
    ("loss_mode", ("sapo",), "SAPO", {}),
    ("loss_mode", ("cispo",), "CISPO", {}),
    ("importance_sampling_level", ("sequence",), "GSPO", {}),
    ("importance_sampling_level", ("sequence_token",), "GSPO", {"level": "token"}),
)
"""For values of an argument, the loss here that computes the same, and its arguments."""

TABLE: tuple[Row, ...] = (
    # Where a value has another meaning for some losses than the tables above say.
    Row(("loss_agg_mode",), _LEAVE_OUT, ("DAPO", "BNPO"), ("token-mean",)),
    Row(("loss_agg_mode",), _LEAVE_OUT, ("GSPO", "GMPO"), ("seq-mean-token-mean",)),
    Row(("loss_agg_mode",), "", NORMALIZED, ("token-mean",), give=_TOKENS),
    Row(("loss_agg_mode",), "", NORMALIZED, ("seq-mean-token-mean",), give=_ROLLOUTS),
    Row(("loss_agg_mode",), "", ("LogLikelihood",), ("token-sum",), give={"normalize": "none"}),
    Row(
        ("loss_type",),
        "DAPO takes the same mean; leave it out, and give TRL's epsilon_high as clip_high, or its "
        "epsilon where there is none",
        ("DAPO",),
        ("dapo",),
    ),
    Row(
        ("loss_mode",),
        "it is this loss with verl's clip_ratio_c",
        CLIPPED,
        ("vanilla",),
        give={"dual_clip": 3.0},
    ),
    *(Row((name,), "", None, values, take, give) for name, values, take, give in _COMPUTED_BY),
    # Other values.
    Row(
        ("loss_agg_mode",),
        "take losses.DrGRPO, whose max_tokens is loss_scale_factor",
        values=("seq-mean-token-sum-norm",),
    ),
    Row(
        ("loss_agg_mode",),
        'take the mean over tokens, normalize="token", and give forward_backward the number of '
        "trained tokens as scale",
        values=("token-sum",),
    ),
    Row(
        ("loss_agg_mode",),
        "normalize says what means are taken over, DrGRPO divides by a constant",
    ),
    Row(
        ("loss_type",),
        "take losses.DrGRPO, whose max_tokens is max_completion_length",
        values=("dr_grpo",),
    ),
    Row(("loss_type",), _WRITE.format(library="TRL")),
    Row(("loss_mode",), _WRITE.format(library="verl")),
    Row(
        ("importance_sampling_level",), "a ratio per token is that of GRPO", ("GSPO",), take="GRPO"
    ),
    Row(("importance_sampling_level",), _LEAVE_OUT),
    # Clips.
    Row(("epsilon_high",), _CISPO_HIGH, ("CISPO",), give=_less_one),
    Row(("epsilon_high",), f"{_CISPO_HIGH}; give epsilon_high - 1 as clip_high", ("CISPO",)),
    Row(
        ("epsilon", "epsilon_low"),
        "TRL's cispo does not read it, so leave it out; verl's is clip",
        ("CISPO",),
        give={"clip": VALUE},
    ),
    Row((*_LOW, *_HIGH), "SAPO fades with the ratio in place of a clip; leave it out", ("SAPO",)),
    # The term of the KL divergence.
    Row(("kl_loss_type",), "", POLICY, ("kl", "k1"), give={"kl_estimator": "k1"}),
    Row(("kl_loss_type",), "", POLICY, ("mse", "k2"), give={"kl_estimator": "k2"}),
    Row(("kl_loss_type",), "", POLICY, ("low_var_kl", "k3"), give={"kl_estimator": "k3"}),
    Row(
        ("kl_loss_type",),
        "the estimators here are 'k1', 'k2' and 'k3'; give one of them as kl_estimator, k2 for one "
        "that ends in +",
        POLICY,
    ),
    Row(
        ("use_kl_loss",),
        "a kl above 0 adds the term; give verl's kl_loss_coef as kl, or leave it out for none",
        POLICY,
    ),
    # Importance weights.
    Row(("vllm_importance_sampling_mode", "rollout_is"), "", _WEIGHTS, give=_level_and_mode),
    Row(
        ("vllm_importance_sampling_mode", "rollout_is"),
        'mode is "truncate" or "mask" here, and level "token" or "sequence"',
        _WEIGHTS,
    ),
    Row(("rollout_is_threshold",), "", _WEIGHTS, give=_bounds),
    Row(("rollout_is_threshold",), "the bounds of ratios are floor and cap here", _WEIGHTS),
    *(
        Row(names, f"it is {ours} here", losses, give={ours: VALUE})
        for losses, names, ours in _RENAMED
    ),
    # Arguments that no loss has here.
    Row(
        ("num_iterations", "ppo_epochs", "num_ppo_epochs"),
        "it counts updates on one batch; call forward_backward once for each, with the "
        "old_logprobs from before the first",
    ),
    Row(
        ("num_generations", "rollout_n"),
        "the rollouts of a group have the same group_id, as many as there are",
    ),
    Row(
        (
            *("scale_rewards", "reward_weights", "reward_clip_range", "normalize_advantages"),
            *("whiten_rewards", "adv_estimator", "norm_adv_by_std_in_grpo"),
            "multi_objective_aggregation",
        ),
        "it is a step in computing advantages; compute them so, and give them to the rollouts",
    ),
    Row(
        (
            *("rollout_is", "rollout_is_threshold", "rollout_rs", "use_tis", "rollout_is_weights"),
            *("rollout_rs_threshold", "rollout_is_batch_normalize", "rollout_correction"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", *_CAPS),
            "vllm_importance_sampling_clip_min",
        ),
        "a sampler that is not the trainer is corrected for before the step; give the rollouts the "
        "weights that losses.importance_weights computes",
    ),
    Row(
        ("num_items_in_batch", "batch_num_tokens", "global_batch_size"),
        "give the counts of the whole step to forward_backward as denominators",
    ),
    Row(
        ("kl_coef", "init_kl_coef", "use_kl_in_reward", "kl_penalty"),
        "it is of a KL penalty in the reward; subtract kl_coef * (old_logprobs - "
        "reference_logprobs) from the advantages, or take the argument kl for a KL term in the "
        "loss",
    ),
    Row(("mask_truncated_completions",), "clear the loss mask of the rollouts that were cut off"),
    Row(("temperature",), "every Rollout has a temperature of its own"),
    Row(("calculate_entropy",), "the argument entropy computes entropies where it is above 0"),
    Row(("vf_coef",), "a critic is a model of its own; give its forward_backward a scale"),
)
"""The first row that applies to a name, a loss and a value gives the meaning."""


def meaning(loss: str, name: str, value: Any, spelling: Spelling = PYTHON) -> str | None:
    """The meaning of an argument that a loss does not have, and what to give for it.

    A clause without a full stop, or None for a name that no other library has for such a loss.

    loss: name of the loss's class, or of a function of forkpoint.losses.
    value: the value that was given.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:  # TRL's loss_type may be a list
        value = value[0]
    rows = (row.meaning(loss, value, spelling) for row in TABLE if name in row.names)
    return next((clause for clause in rows if clause is not None), None)


def is_known(name: str) -> bool:
    """Whether some loss of another library has an argument of that name."""
    return any(name in row.names for row in TABLE)


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
