"""Tiny models of families whose layers carry a state, and bugs that such a state invites."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from forkpoint.engine import prefix_cache
from forkpoint.hosts.transformers import linear_attention
from forkpoint.testing import tiny_model
from versions import checkpoint_blocks, eager_experts

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid")
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
}
MAMBA = {
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 24,
}
MIXED = ("linear_attention", "full_attention", "linear_attention")


def tiny_hybrid(
    family: str, *, kinds: tuple[str, ...] = MIXED, checkpointed: bool = False, **changes: Any
) -> PreTrainedModel:
    """A random model in training mode with one layer for each of `kinds`."""
    sizes: dict[str, Any] = {**DELTA, **(EXPERTS if family != "qwen3_5_text" else {})}
    if family == "granitemoehybrid":
        sizes = dict(MAMBA)
        # Kinds of layers have other names in older versions; without a choice all carry a state.
        if CONFIG_MAPPING[family]().layers_block_type[0] == "mamba":
            names = {"linear_attention": "mamba", "full_attention": "attention"}
            kinds = tuple(names[kind] for kind in kinds)
    sizes |= {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    model = tiny_model(family, **{**sizes, **changes})
    eager_experts(model)
    if checkpointed:
        checkpoint_blocks(model, use_reentrant=False)
    return model.train()


Sabotage = Callable[[pytest.MonkeyPatch], None]


def dropped_state_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that children leave for a state never join their parent's backward."""
    backward = prefix_cache._Join.backward

    def dropping(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        output, state, *rest = backward(ctx, *grads)
        return output, torch.zeros_like(state), *rest

    monkeypatch.setattr(prefix_cache._Join, "backward", staticmethod(dropping))


def states_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments below other rows start from nothing."""
    monkeypatch.setattr(prefix_cache.RecurrentStates, "initial", lambda *_: None)


def inputs_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution takes no input before a segment, whatever its path."""
    gathered = linear_attention.gathered_inputs

    def wrong(*given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        x_TC, windows_FWC, tails = gathered(*given)
        return x_TC, torch.cat([0 * windows_FWC[:, :-1], windows_FWC[:, -1:]], 1), tails

    monkeypatch.setattr(linear_attention, "gathered_inputs", wrong)


ACROSS_MICROBATCHES = (dropped_state_gradient, states_from_zero)
WITHIN = (inputs_forgotten,)
