"""The models of torchtitan that have been shown exact, and their sizes for prices of plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.shapes import divided
from forkpoint.hosts.titan.splits import Split
from forkpoint.hosts.titan.versions import Version, Version03
from forkpoint.plan.pricing.cost import ModelShape

PACKAGE = "torchtitan."
"""Packages of torchtitan's models."""


@dataclass(frozen=True)
class Family:
    """A class of models."""

    module: str
    """The Python module that defines it."""
    name: str
    version: Version
    rope: str = ""
    """Name of the buffer of rotary embeddings that blocks take, with a row for each position, if
    attention has none itself."""

    @property
    def package(self) -> str:
        """The package of its modules."""
        return ".".join(self.module.split(".")[:3]) + "."


FAMILIES = (
    Family("torchtitan.models.llama3.model.model", "Transformer", Version(), "freqs_cis"),
    Family("torchtitan.models.qwen3.model.model", "Qwen3Model", Version(), "rope_cache"),
    Family("torchtitan.models.deepseek_v3.model.model", "DeepSeekV3Model", Version(), "freqs_cis"),
    Family("torchtitan.models.llama3.model", "Llama3Model", Version03()),
    Family("torchtitan.models.qwen3.model", "Qwen3Model", Version03()),
    Family("torchtitan.models.deepseek_v3.model", "DeepSeekV3Model", Version03()),
)


def is_titan(model: object) -> bool:
    """Whether a model's class, or a base of it, is from torchtitan."""
    return any(kind.__module__.startswith(PACKAGE) for kind in type(model).__mro__)


def family_of(model: nn.Module) -> Family:
    """The family of a model. Refuses classes that have not been shown exact."""
    kind = plain_class(model)
    for family in FAMILIES:
        if (family.module, family.name) == (kind.__module__, kind.__qualname__):
            return family
    raise UnsupportedError(
        f"{kind.__module__}.{kind.__qualname__} has not been shown exact; supported are "
        f"{', '.join(f'{f.module}.{f.name}' for f in FAMILIES)}, not subclasses of them."
    )


def sizes_of(model: nn.Module) -> Any:
    """The sizes of a model, under the names of torchtitan 0.2's arguments."""
    return family_of(model).version.sizes(model)


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a model, without wrappers that recompute their activations."""
    return [
        block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        for block in model.layers.values()
    ]


def is_checkpointed(block: nn.Module) -> bool:
    """Whether torchtitan has wrapped a block in torch's CheckpointWrapper."""
    return isinstance(block, CheckpointWrapper)


def head_of(model: nn.Module) -> Any:
    """The head of a model; None on a stage of a pipeline that has none."""
    return getattr(model, family_of(model).version.head)


VOCABULARY = 1024
"""Vocabulary size of a model with few layers."""
POSITIONS = 1 << 16
"""Least number of positions of a model with few layers. Calibrations run rows that may be longer
than the longest rollout of the whole model."""


def first_mixture(args: Any) -> int:
    """Index of the first layer with experts; the number of layers if there is none."""
    mixtures = getattr(args, "moe_enabled", False)
    return getattr(args, "n_dense_layers", 0 if mixtures else args.n_layers)


def model_shape(model: Any, splits: Sequence[Split], *, checkpointed: bool) -> ModelShape:
    """The shape of the part of a model that this rank computes.

    Raises UnsupportedError if the heads cannot be divided evenly over the ranks.
    """
    args, blocks = sizes_of(model), blocks_of(model)
    kv_heads = getattr(args, "n_kv_heads", None)
    sizes: dict[str, Any] = {
        "num_hidden_layers": args.n_layers,
        "hidden_size": args.dim,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": kv_heads or args.n_heads,
        "head_dim": getattr(args, "head_dim", args.dim // args.n_heads),
        "vocab_size": args.vocab_size,
    }
    # A stage of a pipeline has some of the layers.
    dense: list[Any] = [block for block in blocks if "feed_forward" in block._modules]
    first = first_mixture(args)
    if first:
        held = dense[0].feed_forward.w1.weight.shape[0] if dense else args.inter_dim
        sizes["intermediate_size"] = held
    if first < args.n_layers:
        experts, width = args.moe_args, args.moe_inter_dim
        sizes |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "n_shared_experts": experts.num_shared_experts,
            "moe_intermediate_size": width,
            "first_k_dense_replace": first,
        }
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        if hasattr(args, name):
            sizes[name] = getattr(args, name) or None
    if hasattr(args, "v_head_dim"):
        sizes["v_head_dim"] = args.v_head_dim
    shape = ModelShape.from_config(
        sizes, dtype_bytes=next(model.parameters()).element_size(), checkpointed=checkpointed
    )
    tensor = next((style.tensor for _, _, style in splits if style.tensor is not None), None)
    if tensor is None:
        return shape
    remedy = "Choose a tensor_parallel_degree that divides both numbers of heads."
    return divided(shape, tensor.size(), remedy)


def shallow_model(
    model: Any, layers: int, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A model with a few such layers, random weights and a small vocabulary, in training mode.

    The state of random number generators is restored.
    """
    version = family_of(model).version
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.device(device):
        shallow = version.build(model, layers, VOCABULARY, POSITIONS)
        version.initialize(shallow, device)
    for parameter in shallow.parameters():  # not the rotary embeddings
        parameter.data = parameter.data.to(dtype)
    return shallow.train()
