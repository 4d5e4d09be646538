"""Every supported family, stock and tiny, exact in float64 for every way of sharing.

`FAMILIES` names what these tests show exact; docs/reference/families.md is written from them.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import families_table
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PreTrainedModel

import hybrids
from forkpoint import Config, Rollout, RolloutBatch, wrap
from forkpoint.engine.microbatches import CacheView
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.losses import GRPO, Loss, ValueLoss
from forkpoint.ops.attention.table import AttentionTable
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides
from plain_attention import PLAIN_ATTENTION
from versions import checkpoint_blocks, eager_experts

BAR = 1e-10
WINDOW = 7
MOE = {"num_experts_per_tok": 2}
GROUPED = {**MOE, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}

# Three of four layers carry a state, among them the last; prompts and responses that are shorter
# than the convolution is wide.
DELTA = {
    **hybrids.DELTA,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}

# What a family needs besides the tiny sizes for its special parts to be there and to matter.
SPECIAL: dict[str, dict] = {
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    # The last two layers read keys and values of the first two.
    "gemma4_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 61,
        "final_logit_softcapping": 5.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    # The last layer sees all, without rotary positions.
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,
        "attn_scale": 0.7,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 40,
        "pad_token_id": 0,
    },
    "olmo3": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": 0},
    "exaone4": {"sliding_window": WINDOW},
    "smollm3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "granitemoe": {**MOE, "num_local_experts": 4, "logits_scaling": 2.0},
    "gpt_oss": {**MOE, "sliding_window": WINDOW, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {**MOE, "num_local_experts": 4},
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **GROUPED,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {**DELTA, **hybrids.EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **hybrids.EXPERTS},
    "granitemoehybrid": {
        **hybrids.MAMBA,
        **MOE,
        "num_local_experts": 4,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "helium": {"pad_token_id": 0},
}


def build(family: str, *, critic: bool = False) -> PreTrainedModel:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    special = dict(SPECIAL.get(family, {}))
    if family == "granitemoehybrid":
        # Kinds of layers have other names in older versions; those without a choice carry a state.
        carries = CONFIG_MAPPING[family]().layers_block_type[0]
        attends = {"mamba": "attention"}.get(carries, "full_attention")
        special["layer_types"] = [carries, carries, attends, carries]
    with warnings.catch_warnings():
        # Token ids of special tokens beyond the tiny vocabulary.
        warnings.simplefilter("ignore")
        model = tiny_model(family, critic=critic, num_hidden_layers=4, **special)
    eager_experts(model)
    chunked = family == "llama4_text"  # by its mask
    model.config._attn_implementation = "eager" if chunked else PLAIN_ATTENTION
    return model.train()


def groups_of_1_2_4_9() -> RolloutBatch:
    """Groups of 1, 2, 4 and 9 with responses of 1 to 24 tokens; some responses share a start."""
    rng = np.random.default_rng(0)
    rollouts = []
    for group, size in enumerate((1, 2, 4, 9)):
        prompt = rng.integers(0, 61, int(rng.integers(3, 20))).tolist()
        start = rng.integers(0, 61, 3).tolist()
        for member in range(size):
            length = int(rng.integers(1, 25)) if member else (1, 24)[group % 2]
            response = (start if member % 3 == 2 else []) + rng.integers(0, 61, length).tolist()
            tokens = prompt + response
            rollouts.append(
                Rollout(
                    tokens,
                    [0] * len(prompt) + [1] * len(response),
                    float(rng.normal()),
                    reference_logprobs=-np.abs(rng.normal(size=len(tokens))),
                    group_id=group,
                )
            )
    return RolloutBatch(rollouts)


@cache
def batch() -> RolloutBatch:
    return groups_of_1_2_4_9()


WAYS = [
    ("none", "within", None, False),
    ("group", "within", None, False),
    ("tree", "mixed", 17, False),  # so small that prompts and responses become chains
    ("tree", "across", None, True),
    ("group", "mixed", None, True),
    ("tree", "across", 17, True),
    ("tree", "within", None, False),
    ("group", "across", None, True),
]
"""Sharing, boundary, tokens of a microbatch, and whether blocks are checkpointed."""
WAYS_OF = {
    family: [WAYS[(3 * n + i) % len(WAYS)] for i in range(3)] for n, family in enumerate(FAMILIES)
}
DIFFERENT = ("gemma2", "deepseek_v3")
"""Families that differ in what their layers read, which `make test` runs; it has llama in the
acceptance test, and layers with states in test_hybrid.py."""


def worst_error(
    model: PreTrainedModel, rollouts: RolloutBatch, loss: Loss, ways: list[Any], head: str
) -> float:
    """The largest error of a step's gradient; loss and values are within the bar as well."""
    worst = 0.0
    with lifted_upcasts(model):
        wrapped = wrap(model)
        dense = dense_run(model, rollouts, loss)
        norm = math.sqrt(sum(float(g.square().sum()) for g in given(dense.gradients)))
        assert norm > 0
        for sharing, boundary, limit, checkpointed in sorted(ways, key=lambda way: way[-1]):
            if checkpointed:
                checkpoint_blocks(model, use_reentrant=False)
            model.zero_grad()
            policy = wrapped.with_config(
                sharing=sharing, boundary=boundary, max_microbatch_tokens=limit
            )
            stats = policy.forward_backward(rollouts, loss)
            where = f"{sharing}, {boundary}, {limit}, checkpointed {checkpointed}"
            assert abs(stats.loss - dense.loss) <= BAR * max(1.0, abs(dense.loss)), where
            found = {name: p.grad for name, p in model.named_parameters()}
            error = math.sqrt(
                sum(float((a - b).square().sum()) for a, b in paired(found, dense.gradients, where))
            )
            assert error / norm <= BAR, where
            worst = max(worst, error / norm)
            step = stats if checkpointed else policy.score(rollouts)
            wanted = dense.per_token[head]
            difference = (step.per_token[head] - wanted).abs().max() / wanted.abs().max()
            assert float(difference) <= BAR, where
    return worst


@pytest.mark.parametrize("family", slow_besides(DIFFERENT[:1], FAMILIES))
def test_gradients_equal_dense(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    windows: set[int] = set()
    table = CacheView.table

    def noting(
        self: CacheView, window: int, device: torch.device, *, chunked: bool = False
    ) -> AttentionTable:
        windows.add(window)
        return table(self, window, device, chunked=chunked)

    monkeypatch.setattr(CacheView, "table", noting)
    worst = worst_error(model, batch(), GRPO(kl=0.1), WAYS_OF[family], "logprobs")
    families_table.record(family, worst, families_table.features(model, windows))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_critics_equal_dense(family: str) -> None:
    if (
        family not in CONFIG_MAPPING
        or CONFIG_MAPPING[family] not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    ):
        pytest.skip(f"this transformers has no token classifier of {family}")
    rng = np.random.default_rng(1)
    rollouts = RolloutBatch(
        replace(
            rollout,
            returns=3 * rng.normal(size=len(rollout)),
            old_values=3 * rng.normal(size=len(rollout)),
        )
        for rollout in batch()
    )
    model = build(family, critic=True)
    worst_error(model, rollouts, ValueLoss(clip=1.0), WAYS_OF[family][:2], "values")


def given(gradients: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [g for g in gradients.values() if g is not None]


def paired(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], where: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients side by side. Where dense training has none, ours may be none or zero."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        gradient = found[name]
        if wanted is None:
            assert gradient is None or not gradient.any(), f"{where}: {name}"
            continue
        assert gradient is not None, f"{where}: {name}"
        yield gradient, wanted


def test_the_docs_hold_what_was_measured() -> None:
    assert families_table.table_in_docs() == families_table.table()
    assert all(line.split("|")[-2].strip() != "-" for line in families_table.table()[2:])


@pytest.mark.parametrize("family", slow_besides(DIFFERENT, FAMILIES))
def test_a_step_without_trained_tokens_gives_zeros(family: str) -> None:
    """To the parameters that ordinary training gives zeros, and to no others."""
    model = build(family)
    untrained = RolloutBatch(
        [Rollout([*range(1, 9), end], [False] * 9, advantage=1.0) for end in (9, 10)]
    )
    wrap(model, Config(sharing="tree", self_check=False)).forward_backward(untrained, GRPO())
    found = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    wanted = dense_run(model, untrained, GRPO()).gradients
    assert [n for n, g in found.items() if g is None] == [n for n, g in wanted.items() if g is None]
    assert sum(g is not None for g in found.values()) > len(found) / 2
    assert not any(bool(g.any()) for g in found.values() if g is not None)
