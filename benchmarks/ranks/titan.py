"""torchtitan's models (0.2) on ranks of CPUs, split as its trainer splits them."""

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import forkpoint

DEVICE = SimpleNamespace(
    **{name: lambda *_, **__: None for name in ("set_device", "empty_cache", "synchronize")},
    reset_peak_memory_stats=lambda *_: None,
    get_device_name=lambda *_: "CPU",
    current_device=lambda: 0,
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda *_: {},
)
"""Replaces torch.cuda."""
PARALLELIZE = {
    "Transformer": ("llama3", "parallelize_llama"),
    "Qwen3Model": ("qwen3", "parallelize_qwen3"),
    "DeepSeekV3Model": ("deepseek_v3", "parallelize_deepseekv3"),
}
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
MODULES = tuple(f"torchtitan.models.{n}.infra.parallelize" for n, _ in PARALLELIZE.values())
"""Modules that take seconds to import."""


def on_cpus() -> None:
    """Let torchtitan take the CPU for its device."""
    for name in (
        *("tools.utils", "components.metrics"),
        *("distributed.parallel_dims", "distributed.utils"),
    ):
        vars(import_module(f"torchtitan.{name}")).update(device_type="cpu", device_module=DEVICE)
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    warnings.filterwarnings("ignore", "DTensor .* may not have complete", UserWarning)


def models_on_cpus() -> None:
    """Let models run without CUDA: there torch.histc takes no integers, tokens are put into order
    by a kernel of triton, and attention takes no DTensors."""
    attention = import_module("torchtitan.models.attention").ScaledDotProductAttentionWrapper
    attention.forward = _local_attention
    own = torch.histc
    torch.histc = lambda x, **options: own(x.float(), **options).to(x.dtype)  # type: ignore[assignment]
    moe = "torchtitan.models.moe"
    fill = import_module(f"{moe}.kernels").generate_permute_indices
    utils: Any = import_module(f"{moe}.utils")
    utils.generate_permute_indices = lambda *args: fill(*args, use_cpu=True)


def _local_attention(_: nn.Module, *qkv: Any, scale: float | None = None, **__: Any) -> Any:
    q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in qkv)
    options: dict[str, Any] = {"scale": scale, "is_causal": True, "enable_gqa": True}
    found = F.scaled_dot_product_attention(q, k, v, **options)
    if isinstance(qkv[0], DTensor):
        return DTensor.from_local(found, qkv[0].device_mesh, qkv[0].placements, run_check=False)
    return found


def parallelize(
    model: nn.Module, *, checkpoint: str = "none", loss_parallel: bool = True, **degrees: int
) -> Any:
    """Do with a model as torchtitan's trainer does.

    Args:
        model: the whole model.
        checkpoint: torchtitan's mode of activation checkpointing.
        loss_parallel: whether the head gives each rank a part of the vocabulary.
        degrees: of `DEGREES`; 1 by default.

    Returns:
        torchtitan's ParallelDims, the dimensions that the model is split over. Collective.
    """
    on_cpus()
    # Of torch, where fully_shard holds an embedding by itself; nothing writes into its output.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    # Of torch, for modules of other stages of a pipeline.
    warnings.filterwarnings("ignore", "Parallelize plan key", UserWarning)
    config = import_module("torchtitan.config")
    config.TORCH_DTYPE_MAP["float64"] = torch.float64
    given: dict[str, int] = dict.fromkeys(DEGREES, 1) | degrees
    size = given["dp_replicate"] * given["dp_shard"] * given["cp"] * given["tp"] * given["pp"]
    dims = import_module("torchtitan.distributed").ParallelDims(**given, world_size=size)
    job = config.JobConfig()
    job.activation_checkpoint.mode = checkpoint
    job.parallelism.disable_loss_parallel = not loss_parallel
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = dtype
    if dims.pp_enabled:
        forkpoint.cut(model, dims.get_mesh("pp"))
    family, function = PARALLELIZE[type(model).__name__]
    module = import_module(f"torchtitan.models.{family}.infra.parallelize")
    getattr(module, function)(model, dims, job)
    without_scaled_sums(model)
    return dims


def without_scaled_sums(model: nn.Module) -> None:
    """Let modules under fully_shard sum gradients as gloo can."""
    module: Any
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def make_tiny(family: str, seed: int, dtype: torch.dtype, *, layers: int, vocabulary: int) -> Any:
    """A model of 8 query and 4 key-value heads in training mode, with weights of float32's values.

    family: "llama", or "qwen3_moe" with 8 experts.
    """
    sizes: dict[str, Any] = {"dim": 32, "n_layers": layers, "n_heads": 8, "n_kv_heads": 4}
    sizes |= {"vocab_size": vocabulary, "max_seq_len": 4096}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if family == "llama":
            args = import_module("torchtitan.models.llama3.model.args").TransformerModelArgs
            kind = import_module("torchtitan.models.llama3.model.model").Transformer
            model: nn.Module = kind(args(**sizes, multiple_of=16))
        else:
            experts = import_module("torchtitan.models.moe").MoEArgs(
                num_experts=8, num_shared_experts=0, top_k=2, use_grouped_mm=False
            )
            args = import_module("torchtitan.models.qwen3.model.args").Qwen3ModelArgs
            kind = import_module("torchtitan.models.qwen3.model.model").Qwen3Model
            mixture = {"moe_enabled": True, "moe_inter_dim": 16, "moe_args": experts}
            model = kind(args(**sizes, **mixture, head_dim=8, hidden_dim=48))
        with torch.no_grad():
            for parameter in model.parameters():
                # torchtitan's initial weights are so small that attention is uniform.
                noise = torch.randn(parameter.shape) * 0.3
                parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    for parameter in model.parameters():  # rotary embeddings keep their dtype
        parameter.data = parameter.data.to(dtype)
    return model.train()
