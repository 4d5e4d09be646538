"""Models that torchtitan's own parallelize functions have split over ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cpu_trainer import own_name
from scenarios_of_ranks import DEEP, UNEQUAL, distance, gradients
from titan_models import V03, titan_model
from torch import nn
from torchtitan.distributed import ParallelDims

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.losses import GRPO
from forkpoint.testing import lifted_upcasts

if V03:
    from titan_parallel_03 import parallelize
else:
    from benchmarks.ranks.titan import models_on_cpus, parallelize


@dataclass(frozen=True)
class Case:
    """One step of a model that torchtitan has split over ranks, and of the model by itself."""

    family: str = "qwen3"
    options: dict[str, Any] = field(default_factory=lambda: {"tp": 2})
    """Of `parallelize`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    config: Config = DEEP
    rollouts: tuple[list[Rollout], ...] = (UNEQUAL[0],)
    """By data rank."""
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    steps: int = 1
    wrap: Callable[[nn.Module, Config, ParallelDims], forkpoint.Policy] = (
        lambda model, config, dims: forkpoint.wrap(model, config)
    )


def compared(case: Case) -> dict[str, Any]:
    """Run the case on this rank; differences from one process."""
    if not V03:
        models_on_cpus()
    model, other = (titan_model(case.family, **case.sizes) for _ in range(2))
    dims = parallelize(model, **case.options)
    batches = dims.get_optional_mesh("batch")
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = case.wrap(model, case.config, dims)
        own = RolloutBatch(case.rollouts[batches.get_local_rank() if batches else 0])
        stats = [policy.forward_backward(own, case.loss) for _ in range(case.steps)][-1]
        alone = forkpoint.wrap(other, case.config)
        whole = RolloutBatch([r for part in case.rollouts for r in part])
        wanted = [alone.forward_backward(whole, case.loss) for _ in range(case.steps)][-1]
        scores = policy.score(own, entropy=True)
        expected = alone.score(own, entropy=True) if len(own) else scores
    found = {own_name(name): gradient for name, gradient in gradients(model).items()}
    every = gradients(other)
    counts = {n: b for n, b in other.named_buffers() if n.endswith("tokens_per_expert")}
    times = 2 if case.options.get("checkpoint") else 1  # as torchtitan's optimizer expects
    own_counts = ((own_name(n), b) for n, b in model.named_buffers())
    apart = (scores.per_token[name] - expected.per_token[name] for name in scores.per_token)
    return {
        "error": distance(found, {name: every[name] for name in found}, list(found)),
        "loss": abs(stats.loss - wanted.loss),
        "scores": max((float(x.abs().max()) for x in apart if x.numel()), default=0.0),
        "counts": all(torch.equal(b, times * counts[n]) for n, b in own_counts if n in counts),
        "shared": stats.computed_tokens < stats.logical_tokens,
    }
