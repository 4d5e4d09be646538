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
"""The label that torchtitan does not count."""
ROLLOUTS = "rollouts"


class RolloutSteps:
    """Trains on rollouts: `class MyTrainer(RolloutSteps, torchtitan.train.Trainer)`.

    The model, its parallelism, the optimizer, clipping, checkpoints and logs stay torchtitan's.
    Each of its steps is one step of forkpoint, which plans microbatches by itself.

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
        """The number of this rank's rollouts. Ranks that share a batch (tensor and context
        parallelism) have the same one."""
        trainer: Any = self
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def policy(self) -> Policy:
        """The policy of the trainer's model. Made when it is first used; collective then."""
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
        """Batches of rollouts, and labels by which torchtitan counts trained tokens.

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
        """One step of forkpoint. Returns this rank's part of the loss, which torchtitan adds up.

        input_dict: what `batch_generator` gives; pipelines of torchtitan 0.3 give a list of it.
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
        """Its configuration for torchtitan 0.3's trainer."""

        def build(self, **_: object) -> "NoData":
            """Takes what torchtitan gives configurations of data loaders."""
            return NoData()

    def __init__(self, **_: object) -> None:
        """Takes what torchtitan gives builders of data loaders."""

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
