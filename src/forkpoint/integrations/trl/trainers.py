"""TRL's trainers with forkpoint's steps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from forkpoint.config import Config
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.integrations.trl import options
from forkpoint.integrations.trl.calls import StandIn
from forkpoint.integrations.trl.groups import Grouping
from forkpoint.integrations.trl.losses import check_routers
from forkpoint.integrations.trl.sharing import Sharing
from forkpoint.rollouts.batch import short

Base: Any = object
"""Base class of _SharedTrainer, for type checkers. At run time a trainer of TRL follows it."""
_LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Environment variable that accelerate's launcher sets if it has a configuration."""


class _Finished(TrainerCallback):
    """Optimizer callback that refuses a step whose gradients have not been computed."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._sharing.check_finished()


class _SharedTrainer(Base):
    """Methods of forkpoint's trainers that override those of TRL's trainer.

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
        options.check_version(import_module("trl").__version__)
        given = (*args, *kwargs.values())
        options.check_arguments(type(self), given)
        # TRL's metrics read log-probs of all rollouts.
        self.sharing = Sharing(self, replace(config, all_logprobs=True))
        self._grouping = Grouping(keep_groups)
        try:
            super().__init__(*args, **kwargs)
        except OSError as error:
            options.check_reference(self, error)
            raise
        _ = self.sharing.temperature  # read once, as TRL does
        # TRL changes some arguments, and a subclass may have made them.
        options.check_options(type(self), self.args)
        if not any(self.args is value for value in given):
            options.check_arguments(type(self), (self.args,))
        options.check_trainer(self)
        if not self.is_fsdp_enabled:
            # Features that have not been shown exact are refused here. Sharded models are checked
            # after they are sharded.
            check_routers(self, self.sharing.policy(self.accelerator.unwrap_model(self.model)))
        self.add_callback(_Finished(self.sharing))

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator in which context-parallel ranks are data ranks."""
        with _as_data_ranks(self.args) as self.sharing.context_ranks:
            super().create_accelerator_and_postprocess()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.sharing.forget()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.sharing.forget()
            # A loss that is computed later must not belong to an earlier window.
            self.accelerator.gradient_state._set_sync_gradients(True)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run TRL's training step. The backward of the last micro-batch runs forkpoint's step."""
        run = partial(super().training_step, *args, **kwargs)
        return self.sharing.training_step(run, foreign_method(self))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute TRL's loss from log-probs of forkpoint."""
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
        """Compute TRL's old and reference log-probs with sharing over all rows."""
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
        """Compute DPO's reference log-probs before training."""
        return super().compute_ref_log_probs(self.sharing.scorer(model, entropy=False), inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        before = getattr(self, "_buffered_inputs", None)
        found = super()._prepare_inputs(inputs)
        return self._grouping.prepared(self, before, found)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            logs.update(self.sharing.counts.taken())
        super().log(logs, start_time)


@contextmanager
def _as_data_ranks(args: Any) -> Iterator[int]:
    """Replace context-parallel ranks by data ranks in the parallelism configuration, inside the
    block.

    The configuration is that of the arguments, or of accelerate's launcher. accelerate would give
    the ranks of one sequence the same rows, which TRL's generating trainers refuse. As data ranks
    they have different rows. Batch sizes, generation, rewards, advantages and metrics then equal
    those of training without context parallelism. A step runs the rows of all of these ranks
    together (`calls.PackedRows`).

    Yields the number of ranks that run one sequence together.
    """
    given: Any = args.parallelism_config
    config = given
    if config is None and os.environ.get(_LAUNCHED, "").lower() == "true":
        config = import_module("accelerate").ParallelismConfig()
    size = 1 if config is None else config.cp_size
    if config is not None and size > 1:
        args.parallelism_config = import_module("accelerate").ParallelismConfig(
            dp_replicate_size=config.dp_replicate_size,
            dp_shard_size=config.dp_shard_size * size,
            tp_size=config.tp_size,
            cp_size=1,
            sp_size=config.sp_size,
        )
    try:
        yield size
    finally:
        args.parallelism_config = given


LOSS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
"""Methods that make a loss."""
STEP = "training_step"
"""Method that calls `compute_loss` and the backward of its result."""
_PACKAGES = ("trl.trainer.", "trl.extras.", "transformers.")


def foreign_method(trainer: Any) -> str | None:
    """Name of a method that is not TRL's code, with its class; None if all are TRL's.

    forkpoint may compute TRL's loss several times, after all micro-batches of an optimizer step
    have arrived. Other code may draw random numbers, count its calls or use parameters directly, so
    it runs once per micro-batch. A `training_step` of a class before _SharedTrainer is not checked:
    it calls that of _SharedTrainer, or runs without forkpoint.
    """
    ours, classes = _SharedTrainer, type(trainer).__mro__
    for name in LOSS:
        if name in vars(trainer):
            return f"trainer.{name}"
    for name in (*LOSS, STEP):
        begin = classes.index(ours) if name == STEP else 0
        owners = (c for c in classes[begin:] if c is not ours and name in vars(c))
        owner = next(owners, None)
        if owner is not None and not _is_known(vars(owner)[name]):
            return f"{owner.__name__}.{name}"
    return None


def _is_known(function: Any) -> bool:
    """Whether TRL or transformers define a function, and all functions that it wraps."""
    while function is not None:
        if not isinstance(function, FunctionType):
            return False
        # Not __module__, because functools.wraps copies it.
        if not function.__globals__["__name__"].startswith(_PACKAGES):
            return False
        function = vars(function).get("__wrapped__")
    return True


PACKAGE = "forkpoint.integrations.trl"
NAMES = ("GRPOTrainer", "RLOOTrainer", "DPOTrainer")


@cache
def shared_trainer(trainer: type) -> type:
    """Make a trainer that computes each shared token once, from a trainer of TRL.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer or DPOTrainer, or a subclass of one. Its loss must
            call the model with fused_lm_head=True, as TRL's losses do.

    Returns:
        A subclass of the same name. Equal arguments give the same class. Its constructor has two
        additional keywords: `forkpoint`, a Config, and `keep_groups`, whether the completions of a
        prompt stay in one optimizer step. keep_groups=None means False, with a warning.

    Raises:
        UnsupportedError: the class is not such a trainer.
    """
    trl = import_module("trl")
    known = tuple(getattr(trl, name) for name in NAMES)
    if not isinstance(trainer, type) or not issubclass(trainer, known):
        name = getattr(trainer, "__name__", short(trainer))
        raise UnsupportedError(
            f"{name} is not TRL's GRPOTrainer, RLOOTrainer or DPOTrainer, nor a subclass of one. "
            "forkpoint does not support other trainers, such as KTO and asynchronous GRPO. Use "
            "them without forkpoint."
        )
    if issubclass(trainer, _SharedTrainer):
        return trainer
    names = {"__doc__": trainer.__doc__, "__module__": PACKAGE}
    return type(trainer.__name__, (_SharedTrainer, trainer), names)
