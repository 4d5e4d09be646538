"""Every supported family, stock and tiny, exact in float64 for every way of sharing.

What `FAMILIES` names stands there because of these tests; docs/families.md is written from them.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

import families_table
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

import hybrids
from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, wrap
from forkpoint.engine.microbatches import CacheView
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.losses import GRPO, LogLikelihood
from forkpoint.ops.attention.table import AttentionTable
from forkpoint.testing import PLAIN_ATTENTION, dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides
from pairwise import pairwise

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
        **MOE,
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 6,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 24,
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
    if hasattr(model, "set_experts_implementation"):
        # The default's grouped matrix product has no float64.
        model.set_experts_implementation("eager")
    model.config._attn_implementation = PLAIN_ATTENTION
    return model.train()


def groups_of_1_2_4_9(seed: int = 0) -> RolloutBatch:
    """Groups of 1, 2, 4 and 9 with responses of 1 to 24 tokens; some responses share a start."""
    rng = np.random.default_rng(seed)
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
    *product(("none", "group", "tree"), ("within", "across", "mixed"), (None,)),
    # Microbatches so small that prompts and responses become chains.
    ("tree", "across", 17),
    ("tree", "mixed", 17),
]


Way = tuple[str, str, int | None]


def drawn_ways(*families: str) -> dict[str, list[tuple[bool, Way]]]:
    """For each family the ways that it is tried in, before and after its blocks are checkpointed.

    Every family meets every sharing and limit, and every boundary with and without
    checkpoints; a way that WAYS does not have is left out.
    """
    rows = pairwise(
        families,
        ("none", "group", "tree"),
        tuple(product(("within", "across", "mixed"), (False, True))),
        (None, 17),
        keep=lambda row: (row[1], row[2][0], *row[3:]) in WAYS,
    )
    found: dict[str, list[tuple[bool, Way]]] = {family: [] for family in families}
    for family, sharing, (boundary, checkpointed), limit in rows:
        found[family].append((checkpointed, (sharing, boundary, limit)))
    return {family: sorted(ways, key=lambda way: way[0]) for family, ways in found.items()}


WAYS_OF = drawn_ways(*FAMILIES)

DIFFERENT = ("gemma2", "deepseek_v3")
"""Families that differ in what their layers read, which `make test` runs; it has llama in the
acceptance test, and layers with states in test_hybrid.py."""


@pytest.mark.parametrize("family", slow_besides(DIFFERENT, FAMILIES))
def test_gradients_equal_dense(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    windows: set[int] = set()
    table = CacheView.table

    def noting(self: CacheView, window: int, device: torch.device) -> AttentionTable:
        windows.add(window)
        return table(self, window, device)

    monkeypatch.setattr(CacheView, "table", noting)
    loss = GRPO(kl=0.1)
    worst = 0.0
    with lifted_upcasts(model):
        wrapped = wrap(model)
        dense = dense_run(model, batch(), loss)
        norm = math.sqrt(sum(float(g.square().sum()) for g in given(dense.gradients)))
        assert norm > 0
        for checkpointed, way in WAYS_OF[family]:
            if checkpointed:
                names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
                enable = next(getattr(model, name) for name in names if hasattr(model, name))
                enable({"use_reentrant": False})
            model.zero_grad()
            names = ("sharing", "boundary", "max_microbatch_tokens")
            policy = wrapped.with_config(**dict(zip(names, way, strict=True)))
            stats = policy.forward_backward(batch(), loss)
            where = f"{family}, {way}, checkpointed {checkpointed}"
            assert abs(stats.loss - dense.loss) <= BAR * max(1.0, abs(dense.loss)), where
            found = {name: p.grad for name, p in model.named_parameters()}
            error = math.sqrt(
                sum(float((a - b).square().sum()) for a, b in paired(found, dense.gradients, where))
            )
            assert error / norm <= BAR, where
            worst = max(worst, error / norm)
            scores = stats.logprobs if checkpointed else policy.score(batch()).logprobs
            difference = (scores - dense.logprobs_T).abs().max() / dense.logprobs_T.abs().max()
            assert float(difference) <= BAR, where
    families_table.record(family, worst, families_table.features(model, windows))


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


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo3"])
def test_windows_and_sinks_matter(family: str) -> None:
    """Without its window the model says something else, so that the test above is about it."""
    model = build(family)
    with lifted_upcasts(model), torch.no_grad():
        own = dense_run(model, batch(), LogLikelihood()).logprobs_T
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = None
        other = dense_run(model, batch(), LogLikelihood()).logprobs_T
    assert float((own - other).abs().max()) > 1e-3


def test_the_docs_hold_what_was_measured() -> None:
    assert families_table.table_in_docs() == families_table.table()
    assert all(line.split("|")[-2].strip() != "-" for line in families_table.table()[2:])


def test_dropout_by_function_is_refused() -> None:
    model = build("seed_oss")
    model.model.layers[1].self_attn.residual_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"dropout 0\.1"):
        wrap(model).forward_backward(batch(), GRPO())


def test_router_losses_that_are_left_out_are_refused() -> None:
    model = build("qwen3_moe")
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        wrap(model).forward_backward(batch(), GRPO())


def test_router_jitter_is_refused() -> None:
    model = build("mixtral")
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.1
    with pytest.raises(UnsupportedError, match="jitter"):
        wrap(model).forward_backward(batch(), GRPO())


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
