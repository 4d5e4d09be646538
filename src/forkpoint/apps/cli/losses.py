"""Losses in the syntax of the command line: NAME, or NAME,option=value,... Imports no torch."""

import ast
import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import DisallowNone, arg

from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    from forkpoint.losses import Loss, RouterLoss

# fmt: off
CLASSES = {
    "grpo": "GRPO", "ppo": "PPO", "dapo": "DAPO", "bnpo": "BNPO", "dr_grpo": "DrGRPO",
    "cispo": "CISPO", "sapo": "SAPO", "gspo": "GSPO", "gmpo": "GMPO",
    "likelihood": "LogLikelihood", "sft": "SFT", "distillation": "Distillation",
    "dpo": "DPO", "simpo": "SimPO",
}
# fmt: on
"""Classes of forkpoint.losses, by the names of trainers."""

LossText = DisallowNone[
    Annotated[
        str | None, arg(metavar="NAME[,OPTION=VALUE...]", help_behavior_hint="(default: grpo)")
    ]
]
RouterText = DisallowNone[
    Annotated[
        str | None, arg(metavar="SCOPE[,OPTION=VALUE...]", help_behavior_hint="(default: none)")
    ]
]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss that is minimised.

    Attributes:
        loss: grpo, ppo, dapo, bnpo, dr_grpo, cispo, sapo, gspo or gmpo, which need advantages;
            likelihood or sft; distillation, towards the reference_logprobs of a teacher; dpo or
            simpo, whose groups are pairs. Options are those of the class in forkpoint.losses, as
            in grpo,clip=0.1,kl=0.05 or dr_grpo,max_tokens=4096.
    """

    loss: LossText = None

    def make(self) -> "Loss":
        """Make the loss with its options. Imports torch.

        Raises ConfigError for an unknown name, and for options that the loss does not take.
        """
        from forkpoint import losses

        name, *words = ("grpo" if self.loss is None else self.loss).split(",")
        options = _options(words, "loss")
        if name not in CLASSES:
            raise ConfigError(f"loss is {name!r}; it takes one of {', '.join(CLASSES)}.")
        kind = getattr(losses, CLASSES[name])
        _check_options(kind, options, f"the loss {name}")
        needed = [f.name for f in fields(kind) if f.init and f.default is MISSING]
        for missing in (option for option in needed if option not in options):
            raise ConfigError(
                f"the loss {name} needs {missing}, which has no default; write "
                f"--loss {name},{missing}=..."
            )
        return kind(**options)


@dataclass(frozen=True, kw_only=True)
class RoutedObjective(Objective):
    """Loss that is minimised, and auxiliary loss of routers.

    Attributes:
        router_loss: Auxiliary loss of the routers of a mixture of experts. The scope of a statistic
            is batch or rollout. Options are load_balancing, z and last_token, as in
            batch,load_balancing=0.01. Without load_balancing the coefficient is that of the model's
            configuration.
    """

    router_loss: RouterText = None

    def make_router(self) -> "RouterLoss | None":
        """Make the router loss; None without --router-loss. Imports torch."""
        if self.router_loss is None:
            return None
        from forkpoint.losses import RouterLoss

        options = _options(f"scope={self.router_loss}".split(","), "router_loss")
        _check_options(RouterLoss, options, "router_loss")
        return RouterLoss(**options)


def _check_options(kind: type[Any], options: dict[str, Any], what: str) -> None:
    """Raises ConfigError for options that are not arguments of a dataclass."""
    takes = [f.name for f in fields(kind) if f.init]
    if unknown := [option for option in options if option not in takes]:
        raise ConfigError(
            f"{what} has no option {', '.join(unknown)}; it takes {', '.join(takes) or 'none'}."
        )


def _options(words: list[str], field: str) -> dict[str, Any]:
    """Parse options of the form OPTION=VALUE. Values are Python literals, inf, or else text."""
    options: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals or option in options:
            raise ConfigError(
                f"{field} has {word!r}, which is not OPTION=VALUE or repeats an option; it takes "
                "NAME,OPTION=VALUE,... with each option once."
            )
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = math.inf if value == "inf" else value
    return options
