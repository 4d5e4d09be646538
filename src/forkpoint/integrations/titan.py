"""Steps of forkpoint in torchtitan's trainer."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkpoint import Config, Policy, Rollout, RolloutBatch, UnsupportedError, wrap
from forkpoint.hosts.titan.families import family_of
from forkpoint.losses import Loss

IGNORED = -100
"""Label of tokens that torchtitan does not count."""
ROLLOUTS = "rollouts"


class RolloutSteps:
    """Trains on rollouts: `class MyTrainer(RolloutSteps, torchtitan.train.Trainer)`.

    The model, the optimizer, clipping and checkpoints stay torchtitan's. forkpoint runs the forward
    and the backward, including the order of pipeline microbatches and, with torchtitan 0.2.2,
    context parallelism. Each step of the trainer is one step of forkpoint, which plans
    microbatches.

    Subclasses define `rollouts`, and set `loss` and perhaps `forkpoint_config`.
    """

    loss: Loss
    forkpoint_config: Config = Config()
    _policy: Policy | None = None

    def rollouts(self) -> Iterable[Rollout]:
        """The rollouts of the next step for this `data_rank`."""
        raise NotImplementedError(f"{type(self).__name__} has no method rollouts()")

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks with different rollouts.

        Ranks that share a batch (tensor, context and pipeline parallelism) have the same index.
        """
        trainer: Any = self
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def policy(self) -> Policy:
        """Policy of the trainer's model. The first use makes it, and is collective.

        Raises UnsupportedError for several stages on one rank, and for accumulated batches.
        """
        if self._policy is None:
            trainer: Any = self
            if len(trainer.model_parts) != 1:
                raise UnsupportedError(
                    f"the trainer has {len(trainer.model_parts)} stages of a pipeline on a rank, "
                    "which has not been shown exact. Set parallelism.pipeline_parallel_schedule to "
                    "'1F1B'."
                )
            if trainer.gradient_accumulation_steps != 1:
                raise UnsupportedError(
                    f"the trainer accumulates {trainer.gradient_accumulation_steps} batches, and "
                    "the mean of a loss is over one batch. Give rollouts() all rollouts of a step "
                    "and set training.global_batch_size to -1."
                )
            dims = trainer.parallel_dims
            names = [name for name in ("pp", "cp") if dims.get_optional_mesh(name) is not None]
            mesh = dims.get_mesh(names) if names else None
            self._policy = wrap(trainer.model_parts[0], self.forkpoint_config, mesh=mesh)
        return self._policy

    def batch_generator(self, data_iterable: object) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield batches of rollouts, and labels int64 [T], by which torchtitan counts tokens.

        torchtitan 0.3 takes a batch for each microbatch of its pipeline. All rollouts are in the
        first.
        """
        trainer: Any = self
        more = family_of(trainer.model_parts[0]).version.microbatches(trainer) - 1
        while True:
            begin = time.perf_counter()
            batch = RolloutBatch(self.rollouts())
            trainer.ntokens_seen += batch.logical_tokens
            trainer.metrics_processor.ntokens_since_last_log += batch.logical_tokens
            trainer.metrics_processor.data_loading_times.append(time.perf_counter() - begin)
            trained_T = torch.from_numpy(batch.loss_mask.copy())
            labels_T = torch.where(trained_T, 0, IGNORED)
            yield {ROLLOUTS: batch}, labels_T
            for _ in range(more):
                yield {}, labels_T[:0]

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor
    ) -> Tensor:
        """Run one step of forkpoint.

        Args:
            input_dict: the dict that `batch_generator` yields, or a list of such dicts.
            labels: not used.
            global_valid_tokens: not used.

        Returns:
            This rank's part of the loss, a scalar. torchtitan sums the parts over ranks.
        """
        trainer: Any = self
        policy = self.policy
        batch = (input_dict[0] if isinstance(input_dict, list) else input_dict)[ROLLOUTS]
        with family_of(trainer.model_parts[0]).version.autocast(trainer):
            stats = policy.forward_backward(batch, self.loss)
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        return torch.tensor(
            stats.loss / (1 if mesh is None else mesh.size()), device=trainer.device
        )


class NoData:
    """The data loader of a trainer whose rollouts do not come from one."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Configuration of NoData for the trainer of torchtitan 0.3."""

        def build(self, **_: object) -> "NoData":
            """Make a NoData. Arguments of torchtitan are ignored."""
            return NoData()

    def __init__(self, **_: object) -> None:
        """Arguments of torchtitan are ignored."""

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
