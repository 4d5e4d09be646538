"""Tiny models of torchtitan 0.2."""

from typing import Any

from torch import nn
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config.job_config import ActivationCheckpoint, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61}
FLEX, HEAD = {"attn_type": "flex"}, "output"
BIAS = "expert_bias"
"""The buffer of a mixture that balances its experts."""


def checkpoint_fully(model: nn.Module) -> None:
    """Let all blocks run again in backwards."""
    apply_ac(model, ActivationCheckpoint(mode="full"))


def balancing_optimizer(model: nn.Module, dims: ParallelDims) -> Any:
    """torchtitan's optimizer, which moves weights by nothing and balances experts."""
    settings = Optimizer(lr=0.0, implementation="for-loop")
    return build_optimizers_with_moe_load_balancing([model], settings, dims)


def moe(*, shared: int = 1, groups: int | None = None) -> MoEArgs:
    limited = {} if groups is None else {"num_expert_groups": groups, "num_limited_groups": 1}
    return MoEArgs(
        num_experts=6, num_shared_experts=shared, top_k=2, use_grouped_mm=False, **limited
    )


def build(family: str, *, groups: int | None = None, **changes: Any) -> nn.Module:
    """groups: of experts, of "deepseek_v3"."""
    arguments: dict[str, Any] = {**SIZES, "max_seq_len": 256}
    if family == "llama3":
        return Transformer(TransformerModelArgs(**{**arguments, "multiple_of": 16, **changes}))
    if family == "deepseek_v3":
        sizes = {n: SIZES[n] for n in ("dim", "n_layers", "n_heads", "vocab_size")}
        sizes |= {"inter_dim": 48, "moe_inter_dim": 16, "kv_lora_rank": 12, "max_seq_len": 256}
        heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        args = DeepSeekV3ModelArgs(**{**sizes, **heads, "moe_args": moe(groups=groups), **changes})
        args.moe_impl = "standard"
        return DeepSeekV3Model(args)
    if family == "qwen3_moe":
        arguments |= {"moe_enabled": True, "moe_inter_dim": 16, "moe_args": moe(shared=0)}
    return Qwen3Model(Qwen3ModelArgs(**{**arguments, "head_dim": 8, "hidden_dim": 48, **changes}))
