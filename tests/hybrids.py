"""Tiny models of families whose layers carry a state, and bugs that such a state invites."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from forkpoint.engine import prefix_cache
from forkpoint.hosts.transformers import linear_attention
from forkpoint.ops import delta_rule, selective_scan
from forkpoint.ops.recurrence import levels
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


def one_child_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last child to go back leaves its gradient in place of the sum."""

    def overwriting(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        table = ctx.table
        ctx.gradient[table.read_index] = grads[0][table.reading].to(ctx.gradient.dtype)
        return None, None, None, None

    monkeypatch.setattr(prefix_cache._Read, "backward", staticmethod(overwriting))


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


def input_gradient_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the convolution from other rows get no gradient."""
    inputs = prefix_cache.RecurrentStates.inputs

    def without(self: prefix_cache.RecurrentStates, key: Any) -> tuple[Tensor | None, None]:
        return inputs(self, key)[0], None

    monkeypatch.setattr(prefix_cache.RecurrentStates, "inputs", without)


def wrong_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a row start from the state of a neighbour of their parent."""
    over_levels = levels.over_levels

    def shifted(scan: Any, inputs: Any, table: Any, initial: Any) -> Any:
        before = [level.parents for level in table.levels]
        for level, above in zip(table.levels[1:], table.levels, strict=False):
            level.parents = (level.parents + 1) % above.sequences.count
        try:
            return over_levels(scan, inputs, table, initial)
        finally:
            for level, parents in zip(table.levels, before, strict=True):
                level.parents = parents

    for operator in (delta_rule.operator, selective_scan):
        monkeypatch.setattr(operator, "over_levels", shifted)


ACROSS_MICROBATCHES: tuple[Sabotage, ...] = (
    dropped_state_gradient,
    one_child_overwrites,
    states_from_zero,
    inputs_forgotten,
    input_gradient_dropped,
)
WITHIN: tuple[Sabotage, ...] = (inputs_forgotten, wrong_parent)
