"""Models that torchtitan's own parallelize functions have split over ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scenarios_of_ranks import DEEP, UNEQUAL, distance, gradients
from steps import ACROSS, VOCAB
from titan_models import BIAS, V03, balancing_optimizer, own_name, titan_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.distributed import ParallelDims

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.hosts.torch_dist.copies import full
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
    counts = {n: b for n, b in other.named_buffers() if ".tokens_per_expert" in n}
    times = 2 if case.options.get("checkpoint") else 1  # as torchtitan's optimizer expects
    own_counts = ((own_name(n), full(b)) for n, b in model.named_buffers())
    apart = (scores.per_token[name] - expected.per_token[name] for name in scores.per_token)
    return {
        "error": distance(found, {name: every[name] for name in found}, list(found)),
        "loss": abs(stats.loss - wanted.loss),
        "scores": max((float(x.abs().max()) for x in apart if x.numel()), default=0.0),
        "counts": all(torch.equal(b, times * counts[n]) for n, b in own_counts if n in counts),
        "shared": stats.computed_tokens < stats.logical_tokens,
    }


def ordinary(model: nn.Module, rollouts: list[Rollout]) -> dict[str, Tensor | None]:
    """Gradients of the model's own forward and backward of one rollout at a time."""
    model.zero_grad()
    trained = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
    for rollout in rollouts:
        ids = torch.tensor(rollout.token_ids)
        logits = model(ids[None, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        labels = torch.where(torch.tensor(rollout.loss_mask), ids, -100)[1:]
        (F.cross_entropy(logits[0], labels, reduction="sum") / trained).backward()
    return {name: None if g is None else g.clone() for name, g in gradients(model).items()}


# Counts of experts
# ------------------------------------------------------------


def biases(case: Case, shared: bool) -> list[Tensor]:
    """Of each layer, after 20 steps of torchtitan's optimizer."""
    if not V03:
        models_on_cpus()
    model: Any = titan_model(case.family, **case.sizes)
    dims = parallelize(model, **case.options)
    optimizers = balancing_optimizer(model, dims)
    policy = forkpoint.wrap(model, ACROSS)
    data = 0 if case.options.get("tp") else dist.get_rank()
    for step in range(20):
        rng = np.random.default_rng((step, data))
        prompt = rng.integers(0, VOCAB, 8)
        answers = rng.integers(0, VOCAB, (4, 5))
        mask = np.repeat([0, 1], [8, 5])
        batch = RolloutBatch(Rollout(np.append(prompt, a), mask, 1.0) for a in answers)
        with lifted_upcasts(model):  # to float64, where rounding changes no choice
            if shared:
                policy.score(batch)
                policy.forward_backward(batch, GRPO())
            else:
                ordinary(model, list(batch.rollouts))
        optimizers.step()
        optimizers.zero_grad()
    return [full(m.get_buffer(BIAS)) for m in model.modules() if BIAS in m._buffers]


def biases_of_both(case: Case) -> tuple[bool, float]:
    """Whether biases move as in dense training, and by how much the least does."""
    dense, shared = biases(case, shared=False), biases(case, shared=True)
    assert dense and len(dense) == len(shared)
    same = all(map(torch.equal, shared, dense))
    return same, min(float(bias.abs().max()) for bias in dense)
