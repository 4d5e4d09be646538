"""Options of the command line for the losses of a mixture's routers. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import DisallowNone, arg

from forkpoint.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forkpoint.losses import RouterLoss

Own: Any = arg(metavar="NUMBER", help_behavior_hint="(default: the model's own)")
Zero: Any = arg(metavar="NUMBER", help_behavior_hint="(default: 0)")


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Auxiliary losses of the routers of a mixture of experts, which even out their load.

    Attributes:
        router_loss: The tokens that one statistic is taken over: all rollouts of a step (batch), or
            each rollout (then the mean over rollouts). none adds no loss of routers, which a model
            whose configuration sets output_router_logits refuses.
        router_aux_loss_coef: Coefficient of the load-balancing loss. The model's own is its
            configuration's router_aux_loss_coef where that sets output_router_logits, else 0.
        router_z_loss_coef: Coefficient of the mean of squared logsumexps of router logits.
        router_last_token: Whether rollouts' last tokens count; no for trainers that run rollouts
            without them.
    """

    router_loss: Literal["none", "batch", "rollout"] = "none"
    router_aux_loss_coef: DisallowNone[Annotated[float | None, Own]] = None
    router_z_loss_coef: DisallowNone[Annotated[float | None, Zero]] = None
    router_last_token: Literal["yes", "no"] = "yes"

    def make(self) -> "RouterLoss | None":
        """The loss of routers; None where none is asked for. Imports torch.

        Raises ConfigError for an option without the loss that it belongs to, and for coefficients
        that are not finite.
        """
        given = {
            "router_aux_loss_coef": self.router_aux_loss_coef,
            "router_z_loss_coef": self.router_z_loss_coef,
            "router_last_token": None if self.router_last_token == "yes" else "no",
        }
        if self.router_loss == "none":
            for name, value in given.items():
                if value is not None:
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

    def check(self, model: "PreTrainedModel", *, expert_counts: bool = False) -> None:
        """Refuse what the model's routers do not have, by the names of options.

        `expert_counts`: whether experts are to be counted. Raises UnsupportedError.
        """
        from forkpoint.hosts.transformers.routers import Routers, adds_load_balancing

        asked = self.router_loss != "none"
        routers = Routers(model)
        if (asked or expert_counts) and not routers.layers:
            found, option = (
                (f"router_loss is {self.router_loss!r}", "--router-loss")
                if asked
                else ("experts are to be counted", "--expert-counts")
            )
            raise UnsupportedError(
                f"{found}, and the model has no routers that transformers records logits of: it is "
                "no mixture of experts, or one that only a later transformers knows by its "
                f"routers. Leave {option} out, or update transformers."
            )
        coefficients = {
            "router_aux_loss_coef": self.router_aux_loss_coef,
            "router_z_loss_coef": self.router_z_loss_coef,
        }
        for name, value in coefficients.items():
            if asked and value and not routers.defines_loss:
                raise UnsupportedError(
                    f"{name} is {value}, and transformers defines no router loss for this model. "
                    f"Leave --{name.replace('_', '-')} out."
                )
        if not asked and adds_load_balancing(model):
            raise UnsupportedError(
                "the configuration has output_router_logits=True, so that ordinary training adds a "
                "load-balancing loss, and router_loss is 'none'. Add --router-loss batch or "
                "--router-loss rollout, the tokens that its statistics are taken over, or set "
                "output_router_logits to false in the configuration."
            )
