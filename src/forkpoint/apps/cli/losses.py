"""The losses that the command line knows by name, and their options. Imports no torch."""

import inspect
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tyro.conf import DisallowNone, arg

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

if TYPE_CHECKING:
    from forkpoint.losses import Loss, RouterLoss

# fmt: off
LossName = Literal["grpo", "ppo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "gspo", "gmpo",
                   "likelihood", "sft", "distillation", "dpo", "simpo"]
# fmt: on
CLASSES: dict[LossName, str] = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "dapo": "DAPO",
    "bnpo": "BNPO",
    "dr_grpo": "DrGRPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "gspo": "GSPO",
    "gmpo": "GMPO",
    "likelihood": "LogLikelihood",
    "sft": "SFT",
    "distillation": "Distillation",
    "dpo": "DPO",
    "simpo": "SimPO",
}
LARGEST = 1e30
"""Of options, which must not overflow float32; the loss itself refuses infinity."""
# Without an advantage they train nothing, KL and entropy aside.
OF_ADVANTAGES = ("grpo", "ppo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "gspo", "gmpo")

_Default: Any = arg(metavar="NUMBER", help_behavior_hint="(default: that of the loss or the model)")
Number = DisallowNone[Annotated[float | None, _Default]]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Loss that is minimised. An option that the loss does not have is refused.

    Attributes:
        loss: grpo is the clipped policy gradient; ppo, dapo, bnpo and dr_grpo are variants with
            other means or clips; cispo, sapo, gspo and gmpo use the ratio of new to old
            probabilities in other ways. All of these need advantages, and are on-policy where the
            file has no old_logprobs. likelihood (or sft) is supervised fine-tuning. distillation
            goes towards reference_logprobs, a teacher's. dpo and simpo need groups that are pairs,
            dpo reference_logprobs as well. auto is grpo, or what a trace was recorded with.
        clip: How far the ratio may fall below 1 before a token's gradient ends; above 1 too, unless
            there is a clip_high. Losses with a ratio; of gmpo, how far its logarithm may leave 0.
        clip_high: How far it may rise above 1.
        kl: Coefficient of the KL divergence from the reference policy. Losses of advantages; needs
            reference_logprobs.
        entropy: Coefficient of a bonus for entropy. Losses of advantages.
        normalize: Mean over all trained tokens, or over rollouts of each one's mean; auto is the
            loss's default.
        max_tokens: The constant that dr_grpo divides by, the most tokens of a response; it has no
            default.
        beta: How strongly dpo holds the policy to the reference; the scale of simpo's rewards.
        variant: Which dpo; auto is sigmoid.
        gamma: The margin by which simpo wants the chosen response to win.
    """

    loss: Literal["auto", LossName] = "auto"
    clip: Number = None
    clip_high: Number = None
    kl: Number = None
    entropy: Number = None
    normalize: Literal["auto", "token", "rollout"] = "auto"
    max_tokens: DisallowNone[
        Annotated[int | None, arg(metavar="N", help_behavior_hint="(dr_grpo needs it)")]
    ] = None
    beta: Number = None
    variant: Literal["auto", "sigmoid", "robust", "hinge", "ipo"] = "auto"
    gamma: Number = None

    @property
    def name(self) -> LossName:
        return "grpo" if self.loss == "auto" else self.loss

    def given(self) -> dict[str, Any]:
        """The options besides the name that are not left to the loss."""
        unset = (None, "auto")
        return {k: v for k, v in asdict(self).items() if k != "loss" and v not in unset}

    def make(self) -> "Loss":
        """The loss with these options and its defaults. Imports torch.

        Raises ConfigError for an option that the loss does not have, or whose value it refuses.
        """
        from forkpoint import losses

        given = self.given()
        kinds = {name: getattr(losses, kind) for name, kind in CLASSES.items()}
        takes = {name: set(inspect.signature(kind).parameters) for name, kind in kinds.items()}
        for option, value in given.items():
            if isinstance(value, int | float) and LARGEST < abs(value) != math.inf:
                raise ConfigError(
                    f"{option} is {value}; it takes a number of at most {LARGEST:g}, since losses "
                    "are computed in float32."
                )
            if option not in takes[self.name]:
                having = ", ".join(name for name, options in takes.items() if option in options)
                raise ConfigError(
                    f"the loss {self.name} has no {option}, which was given as {value}; losses "
                    f"that have it are {having}. Leave --{option.replace('_', '-')} out, or take "
                    "one of them."
                )
        if self.name == "dr_grpo" and self.max_tokens is None:
            raise ConfigError(
                "the loss dr_grpo divides by a constant in place of the tokens, and none is given; "
                "add --max-tokens N, the most tokens that a response may have."
            )
        return kinds[self.name](**given)

    def trains(self, batch: RolloutBatch) -> np.ndarray:
        """The tokens that can have a gradient: bool [T]."""
        if self.name in OF_ADVANTAGES and not self.kl and not self.entropy:
            return batch.loss_mask & (batch.advantages != 0)
        return batch.loss_mask


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Auxiliary losses of the routers of a mixture of experts, which even out their load.

    Attributes:
        router_loss: The tokens that one statistic is taken over: all rollouts of a step (batch), or
            each rollout (then the mean over rollouts). none adds no loss of routers, which a model
            whose configuration sets output_router_logits refuses.
        router_aux_loss_coef: Coefficient of the load-balancing loss. The default is the
            configuration's router_aux_loss_coef where that sets output_router_logits, else 0.
        router_z_loss_coef: Coefficient of the mean of squared logsumexps of router logits; 0
            without it.
        router_last_token: Whether rollouts' last tokens count; no for trainers that run rollouts
            without them.
    """

    router_loss: Literal["none", "batch", "rollout"] = "none"
    router_aux_loss_coef: Number = None
    router_z_loss_coef: Number = None
    router_last_token: Literal["yes", "no"] = "yes"

    def make(self) -> "RouterLoss | None":
        """The loss of routers; None where none is asked for. Imports torch.

        Raises ConfigError for an option without the loss that it belongs to, and for coefficients
        that are not finite.
        """
        if self.router_loss == "none":
            for name, value in asdict(self).items():
                if value not in ("none", None, "yes"):
                    raise ConfigError(
                        f"{name} is {value}, and router_loss is 'none'. Add --router-loss batch or "
                        "--router-loss rollout, the tokens that its statistics are taken over, or "
                        f"leave --{name.replace('_', '-')} out."
                    )
            return None
        from forkpoint.losses import RouterLoss

        return RouterLoss(
            load_balancing=self.router_aux_loss_coef,
            z=self.router_z_loss_coef,
            scope=self.router_loss,
            last_token=self.router_last_token == "yes",
        )


def coupling(name: LossName, batch: RolloutBatch) -> IntArray | None:
    """Which rollouts the loss of that name needs in one graph, for the planner; needs no torch.

    None where every token stands alone.
    """
    if name in ("gspo", "gmpo"):
        return np.arange(len(batch))
    return batch.group_index if name in ("dpo", "simpo") else None


def zero_rollouts(name: LossName, batch: RolloutBatch) -> NDArray[np.bool_]:
    """Rollouts whose terms the loss of that name declares to be 0, with its defaults, bool [N].

    Needs no torch; the losses themselves say the same.
    """
    if name in ("dpo", "simpo"):
        return np.zeros(len(batch), bool)
    nothing_T = np.zeros(batch.logical_tokens, bool)
    weightless_T = nothing_T if batch.weights is None else batch.weights == 0
    if name not in OF_ADVANTAGES:
        return batch.where_all_trained(weightless_T)
    flat_T = batch.advantages == 0
    if name not in ("gspo", "gmpo"):
        return batch.where_all_trained(flat_T | weightless_T)
    return batch.where_all_trained(flat_T) | batch.where_all_trained(weightless_T)
