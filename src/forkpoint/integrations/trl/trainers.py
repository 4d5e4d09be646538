"""TRL's trainers, made to compute every shared token once."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.config import Config
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.integrations.trl.groups import Grouping
from forkpoint.integrations.trl.options import check_options
from forkpoint.integrations.trl.references import ReferenceSharing
from forkpoint.integrations.trl.routers import check_routers
from forkpoint.integrations.trl.stand_ins import StandIn
from forkpoint.rollouts import short

Base: Any = object
"""The trainer of TRL that a class here is put before."""


class _SharedTrainer(Base):
    """Methods of every trainer of ours, before those of TRL's trainer.

    sharing: the policies and the steps; `sharing.last_plan` is the plan of the last step.
    """

    sharing: ReferenceSharing

    def __init__(
        self,
        *args: Any,
        forkpoint: Config | None = None,
        keep_groups: bool | None = None,
        **kwargs: Any,
    ) -> None:
        config = Config() if forkpoint is None else forkpoint
        if not isinstance(config, Config):
            raise ConfigError(
                f"forkpoint is {short(config)} of type {type(config).__name__}; it takes a "
                "forkpoint.Config, such as Config(sharing='tree'), or None."
            )
        if keep_groups not in (True, False, None):
            raise ConfigError(
                f"keep_groups is {short(keep_groups)}; allowed are True, False, None."
            )
        # TRL's metrics read log-probs of all rollouts.
        self.sharing = ReferenceSharing(self, replace(config, all_logprobs=True))
        self._grouping = Grouping(keep_groups)
        super().__init__(*args, **kwargs)
        check_options(self)
        if not self.is_fsdp_enabled:
            # What has not been shown exact is refused here; sharded models are looked at when they
            # have been sharded.
            check_routers(self, self.sharing.policy(self.accelerator.unwrap_model(self.model)))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.sharing.forget()
        return super().train(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss, of log-probs that forkpoint computes; in training of the whole window."""
        compute = super().compute_loss
        if torch.is_grad_enabled() and not return_outputs:
            return self.sharing.step(compute, model, inputs, num_items_in_batch)
        with self.sharing.evaluating():
            return compute(
                self.sharing.scorer(model, entropy=True),
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
            )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        """TRL's passes for old and reference log-probs share as well, over all of their rows."""
        if not isinstance(model, StandIn) and not torch.is_grad_enabled():
            model, batch_size = self.sharing.scorer(model, entropy=compute_entropy), None
        return super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **kwargs,
        )

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """DPO's reference log-probs that are computed beforehand."""
        return super().compute_ref_log_probs(self.sharing.scorer(model, entropy=False), inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        before = getattr(self, "_buffered_inputs", None)
        found = super()._prepare_inputs(inputs)
        return self._grouping.prepared(self, before, found)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            logs.update(self.sharing.counts.taken())
        super().log(logs, start_time)


@cache
def shared_trainer(trainer: type) -> type:
    """A trainer of TRL, or a subclass of one, that computes every shared token once.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer or DPOTrainer, or a class derived from one whose
            loss asks its model for log-probs as theirs do.

    Returns a subclass of the same name. Its constructor takes two more keywords: `forkpoint`, a
    Config, and `keep_groups`.

    Raises UnsupportedError for other classes.
    """
    trl = import_module("trl")
    known = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DPOTrainer)
    if not isinstance(trainer, type) or not issubclass(trainer, known):
        name = getattr(trainer, "__name__", short(trainer))
        raise UnsupportedError(
            f"{name} is no GRPOTrainer, RLOOTrainer or DPOTrainer of TRL and no subclass of one. "
            "KTO, whose second forward has other rows, and the experimental asynchronous GRPO, "
            "which packs its rows itself, are not supported yet; nor is anything else. Use these "
            "trainers as they are."
        )
    if issubclass(trainer, _SharedTrainer):
        return trainer
    mixin = dict(vars(_SharedTrainer))
    bases: tuple[type, ...] = (_SharedTrainer, trainer)
    return type(
        trainer.__name__, bases, {"__doc__": trainer.__doc__, "__module__": mixin["__module__"]}
    )
