"""TRL's trainers, made to compute every shared token once."""

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from forkpoint.config import Config
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.integrations.trl.groups import Grouping
from forkpoint.integrations.trl.options import (
    check_arguments,
    check_options,
    check_trainer,
    check_version,
)
from forkpoint.integrations.trl.routers import check_routers
from forkpoint.integrations.trl.sharing import Sharing
from forkpoint.integrations.trl.stand_ins import StandIn
from forkpoint.rollouts.batch import short

Base: Any = object
"""The trainer of TRL that a class here is put before."""


class _Finished(TrainerCallback):
    """Refuses an optimizer's step whose gradients have not been computed."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._sharing.check_finished()


class _SharedTrainer(Base):
    """Methods of every trainer of ours, before those of TRL's trainer.

    sharing: the policies and the steps; `sharing.last_plan` is the plan of the last step.
    """

    sharing: Sharing

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
        check_version(import_module("trl").__version__)
        given = (*args, *kwargs.values())
        check_arguments(type(self), given)
        # TRL's metrics read log-probs of all rollouts.
        self.sharing = Sharing(self, replace(config, all_logprobs=True))
        self._grouping = Grouping(keep_groups)
        super().__init__(*args, **kwargs)
        self.sharing.keep_temperature()
        # TRL changes some of its arguments, and a subclass may have made them.
        check_options(type(self), self.args)
        if not any(self.args is value for value in given):
            check_arguments(type(self), (self.args,))
        check_trainer(self)
        if not self.is_fsdp_enabled:
            # What has not been shown exact is refused here; sharded models are looked at when they
            # have been sharded.
            check_routers(self, self.sharing.policy(self.accelerator.unwrap_model(self.model)))
        self.add_callback(_Finished(self.sharing))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.sharing.forget()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.sharing.forget()
            # A loss that is computed later is of no window that has been left.
            self.accelerator.gradient_state._set_sync_gradients(True)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, whose backward runs the step at a window's last micro-batch."""
        run = partial(super().training_step, *args, **kwargs)
        return self.sharing.training_step(run, _SharedTrainer)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss, of log-probs that forkpoint computes."""
        return self.sharing.loss(
            super().compute_loss,
            model,
            inputs,
            return_outputs=return_outputs,
            num_items=num_items_in_batch,
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
        if not isinstance(model, StandIn):
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


PACKAGE = "forkpoint.integrations.trl"
NAMES = ("GRPOTrainer", "RLOOTrainer", "DPOTrainer")
SHARED = "shared_trainer:"
"""The start of the names by which pickle finds classes that `shared_trainer` has made."""


@cache
def shared_trainer(trainer: type) -> type:
    """A trainer of TRL, or a subclass of one, that computes every shared token once.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer or DPOTrainer, or a class derived from one whose
            loss asks its model for log-probs as theirs do.

    Returns a subclass of the same name, the same one at every call. Its constructor takes two more
    keywords: `forkpoint`, a Config, and `keep_groups`. It can be pickled where `trainer` is found
    by its module and name, also where it takes that name itself, as a decorator's result does.

    Raises UnsupportedError for other classes.
    """
    trl = import_module("trl")
    known = tuple(getattr(trl, name) for name in NAMES)
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
    # pickle asks the module for the qualified name, and takes dots in it for attributes.
    place = f"{trainer.__module__}:{trainer.__qualname__}".replace(".", "/")
    name = trainer.__name__ if trainer in known else SHARED + place
    namespace = {"__doc__": trainer.__doc__, "__module__": PACKAGE, "__qualname__": name}
    bases: tuple[type, ...] = (_SharedTrainer, trainer)
    return type(trainer.__name__, bases, namespace)


def found_trainer(name: str) -> type:
    """The class of a name in `forkpoint.integrations.trl`: that of a trainer of TRL, or one by
    which pickle finds a class that `shared_trainer` has made.

    Raises AttributeError for other names.
    """
    if name in NAMES:
        return shared_trainer(getattr(import_module("trl"), name))
    if not name.startswith(SHARED):
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
    module, _, names = name.removeprefix(SHARED).replace("/", ".").partition(":")
    return shared_trainer(attrgetter(names)(import_module(module)))
