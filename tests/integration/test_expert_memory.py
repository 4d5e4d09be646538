"""Activations of mixtures of experts: what autograd saves, and what the planner predicts of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts import FAMILIES, expert_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint import Config, ModelShape, wrap
from forkpoint.hosts.checkpointing import MLP_NAMES
from forkpoint.plan import MODELS
from forkpoint.testing import tiny_model
from lanes import slow_besides

TOKENS, HIDDEN = 128, 256
PLAIN = Config(sharing="none", compile_blocks=False, self_check=False, checkpointing="none")
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
}
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
MEASURED = [f for f in FAMILIES if f != "granitemoehybrid"]
# Every pair of values of families, implementations and dtypes.
CASES = [
    (family, implementation, (torch.float32, torch.bfloat16)[(n + m) % 2])
    for n, family in enumerate(MEASURED)
    for m, implementation in enumerate(IMPLEMENTATIONS)
]


def saved_bytes(model: nn.Module, run: Callable[[Tensor], object], x: Tensor) -> int:
    """Bytes of storages that autograd saves in a run, but for its input and the model's own."""
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage takes another's place

    def pack(saved: Tensor) -> Tensor:
        alive.append(saved)
        storage = saved.untyped_storage()
        if storage.data_ptr() not in ours:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        run(x)
    return sum(found.values())


def mixture(family: str, implementation: str, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """Of 32 experts, 4 a token, so that what does not grow with tokens is little."""
    own = FAMILIES[family]
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = SIZES | {name: 32 for name in names if name in own}
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    sizes |= {name: 96 for name in widths if name in own}
    if "layer_types" in own:
        sizes["layer_types"] = own["layer_types"] * (layers // 2)
    model = expert_model(family, dtype, eager=False, num_hidden_layers=layers, **sizes)
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    slow_besides(
        [
            ("qwen3_moe", "grouped_mm", torch.bfloat16),
            ("qwen3_5_moe_text", "eager", torch.float32),
            ("deepseek_v3", "batched_mm", torch.bfloat16),
        ],
        CASES,
    ),
    ids=str,
)
def test_a_layer_of_experts_keeps_what_is_predicted(
    family: str, implementation: str, dtype: torch.dtype
) -> None:
    """Router, experts and shared experts, in a block that has them."""
    model = mixture(family, implementation, dtype, 2)
    host = wrap(model, PLAIN).host
    block = host.blocks[-1]
    experts = next(getattr(block, name) for name in MLP_NAMES if hasattr(block, name))
    x = torch.randn(1, TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    per_token = saved_bytes(model, experts, x) / TOKENS
    # Of the layers with experts alone: `intermediate` is a mean over all.
    width = ModelShape.from_config(
        {**model.config.to_dict(), "first_k_dense_replace": 0}
    ).intermediate
    shape = host.shape
    predicted = (4 * width + shape.expert_activations) * shape.dtype_bytes + shape.router_bytes
    assert predicted == pytest.approx(per_token, rel=0.05)


def test_the_shape_of_llama_4_is_that_of_its_configuration() -> None:
    """So that policies find its calibration. Its experts are eager by default."""
    sizes = {"intermediate_size_mlp": 64, "num_local_experts": 2, "pad_token_id": 0}
    model = tiny_model("llama4_text", dtype=torch.float32, **sizes)
    configured = ModelShape.from_config(model.config.to_dict(), dtype_bytes=4)
    assert wrap(model, PLAIN).host.shape == configured and configured.expert_layers


def test_the_shape_of_a_large_mixture() -> None:
    shape = ModelShape.from_config(MODELS["qwen3-30b-a3b"])
    assert (shape.expert_layers, shape.intermediate) == (48, 8 * 768)
    assert shape.expert_activations == 2 * 8 * 2048
    assert shape.router_bytes == 128 * 4 + 4 * 8 * 8
    without = ModelShape(**{**vars(shape), "expert_layers": 0})
    added = shape.activation_bytes("none") - without.activation_bytes("none")
    assert added == 48 * (2 * 8 * 2048 * 2 + shape.router_bytes)
    # One layer at a time is whole while it is recomputed.
    for checkpointing in ("selective", "full"):
        more = shape.activation_bytes(checkpointing) - without.activation_bytes(checkpointing)
        assert more == added // 48
    deep = ModelShape.from_config(MODELS["deepseek-v3"])
    assert deep.expert_layers == 58
    assert deep.router_bytes == 7168 * 4 + 256 * 4 + 4 * 8 * 8
    dense = ModelShape.from_config(MODELS["qwen3-8b"])
    assert (dense.expert_layers, dense.expert_activations, dense.router_bytes) == (0, 0, 0)
