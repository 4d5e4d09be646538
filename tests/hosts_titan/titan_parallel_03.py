"""Models of torchtitan 0.3 that its own parallelize functions have split over ranks of CPUs."""

import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend

import forkpoint
from benchmarks.ranks.titan import without_scaled_sums

FUNCTIONS = {
    "Llama3Model": ("llama3", "parallelize_llama"),
    "Qwen3Model": ("qwen3", "parallelize_qwen3"),
    "DeepSeekV3Model": ("deepseek_v3", "parallelize_deepseekv3"),
}


def dims_of(**degrees: int) -> ParallelDims:
    """Dimensions of all ranks, those that are not given of size 1."""
    vars(import_module("torchtitan.distributed.parallel_dims"))["device_type"] = "cpu"
    set_spmd_backend("partial_dtensor")
    given = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1) | degrees
    return ParallelDims(**given, world_size=dist.get_world_size(), spmd_backend="partial_dtensor")


def parallelize(model: nn.Module, *, checkpoint: str = "none", **degrees: int) -> ParallelDims:
    """Do with a model as torchtitan's trainer does with the backend "partial_dtensor".

    Args:
        model: the whole model.
        checkpoint: "full", or "none".
        degrees: of pp, dp_replicate, dp_shard, cp, tp and ep; 1 by default. Collective.
    """
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    TORCH_DTYPE_MAP["float64"] = torch.float64
    dims = dims_of(**degrees)
    if dims.pp_enabled:
        forkpoint.cut(model, dims.get_mesh("pp"))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    training: Any = TrainingConfig(mixed_precision_param=dtype, mixed_precision_reduce=dtype)  # type: ignore[arg-type]
    family, function = FUNCTIONS[type(model).__name__]
    getattr(import_module(f"torchtitan.models.{family}.parallelize"), function)(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if checkpoint == "full" else None,
        dump_folder="",
    )
    without_scaled_sums(model)
    return dims
