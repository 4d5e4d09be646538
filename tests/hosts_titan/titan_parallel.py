"""Models that torchtitan's own parallelize functions have split over ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cpu_trainer import on_cpus, own_name
from scenarios_of_ranks import DEEP, UNEQUAL, distance, gradients
from titan_models import titan_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.moe import kernels, utils
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.losses import GRPO
from forkpoint.testing import lifted_upcasts

PARALLELIZE = {
    "Transformer": parallelize_llama,
    "Qwen3Model": parallelize_qwen3,
    "DeepSeekV3Model": parallelize_deepseekv3,
}


def parallelize(
    model: nn.Module, *, checkpoint: str = "none", loss_parallel: bool = True, **degrees: int
) -> ParallelDims:
    """Do with a model as torchtitan's trainer does; gives the dimensions that it is split over."""
    on_cpus()
    # Of torch, where fully_shard holds an embedding by itself; nothing writes into its output.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    # Of torch, for modules of other stages of a pipeline.
    warnings.filterwarnings("ignore", "Parallelize plan key", UserWarning)
    TORCH_DTYPE_MAP["float64"] = torch.float64
    given: dict[str, int] = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    given |= {"etp": 1, **degrees}
    size = given["dp_replicate"] * given["dp_shard"] * given["cp"] * given["tp"] * given["pp"]
    dims = ParallelDims(**given, world_size=size)
    job = JobConfig()
    job.activation_checkpoint.mode = checkpoint  # type: ignore[assignment]
    job.parallelism.disable_loss_parallel = not loss_parallel
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    job.training.mixed_precision_param = dtype  # type: ignore[assignment]
    job.training.mixed_precision_reduce = dtype  # type: ignore[assignment]
    if dims.pp_enabled:
        forkpoint.cut(model, dims.get_mesh("pp"))
    PARALLELIZE[type(model).__name__](model, dims, job)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    return dims


def local_attention(_: nn.Module, *qkv: Any, scale: float | None = None, **__: Any) -> Any:
    q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in qkv)
    options: dict[str, Any] = {"scale": scale, "is_causal": True, "enable_gqa": True}
    found = F.scaled_dot_product_attention(q, k, v, **options)
    if isinstance(qkv[0], DTensor):
        return DTensor.from_local(found, qkv[0].device_mesh, qkv[0].placements, run_check=False)
    return found


def models_on_cpus() -> None:
    """Let models run without CUDA: there torch.histc takes no integers, tokens are put into order
    by a kernel of triton, and attention takes no DTensors."""
    ScaledDotProductAttentionWrapper.forward = local_attention  # type: ignore[method-assign]
    own, fill = torch.histc, kernels.generate_permute_indices
    torch.histc = lambda x, **options: own(x.float(), **options).to(x.dtype)  # type: ignore[assignment]
    utils.generate_permute_indices = lambda *args: fill(*args, use_cpu=True)


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
