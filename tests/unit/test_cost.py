"""Counted pairs, FLOPs and bytes: against brute force, by hand, and the bound in literal values."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, ConfigError, ModelShape, Rollout, RolloutBatch
from forkpoint.parallel.placement.paths import Rates
from forkpoint.plan import MODELS, Work
from forkpoint.plan.planner import make_plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import dense_work, visible_pairs
from forkpoint.plan.pricing.meters import MeasuredMeter
from made_calibrations import SHAPE, group, made_up

LLAMA3_8B = {key: value for key, value in MODELS["llama3-8b"].items() if key != "head_dim"}

TINY = ModelShape(
    layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, value_dim=5, intermediate=7, vocab=11
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.integers(-40, 40)
)
def test_visible_pairs_are_those_that_brute_force_counts(
    runs: list[tuple[int, int]], window: int
) -> None:
    expected = sum(
        1
        for start, length in runs
        for query in range(start, start + length)
        for key in range(query + 1)
        if not window
        or (query - key < window if window > 0 else query // -window == key // -window)
    )
    start, length = np.asarray(runs, np.int64).reshape(-1, 2).T
    assert visible_pairs(start, length, window) == expected


def test_flops_of_a_shape_counted_by_hand() -> None:
    # A block: q 4x6, k 4x3, v 4x5, o 10x4; gate, up and down 4x7 each. Two blocks.
    block = 24 + 12 + 20 + 40 + 3 * 28
    assert TINY.linear_parameters == 2 * block == 360
    work = Work(tokens=3, pairs={0: 6}, num_loss_entries=2)
    products = 2 * 3 * 360
    head = 2 * 2 * 4 * 11
    attention = 2 * 6 * 2 * (2 * (3 + 5))  # 2 layers, 6 pairs, 2 heads, q.k and p.v
    assert work.forward_flops(TINY) == products + head + attention == 2160 + 176 + 384
    assert work.step_flops(TINY) == 3 * (2160 + 176) + 3.5 * 384


def test_windowed_layers_are_counted_by_their_own_pairs() -> None:
    shape = ModelShape(**{**vars(TINY), "windows": (0, 2)})
    work = dense_work(np.array([3, 0, 1]), 0, shape.windows)
    assert work == Work(tokens=4, pairs={0: 6 + 1, 2: 5 + 1}, num_loss_entries=0)
    assert work.forward_flops(shape) == 2 * 4 * 360 + 2 * 2 * (3 + 5) * (7 + 6)


def test_bytes_of_a_shape_counted_by_hand() -> None:
    # K of 3 and V of 5 in one head and 2 layers, in 16 bits; their gradients in 32.
    assert TINY.boundary_bytes_per_token == 2 * (3 + 5) * 2
    assert TINY.boundary_gradient_bytes_per_token == 2 * (3 + 5) * 4
    # 4 inputs of width 4 (of two norms and two groups of products), q and k before and after the
    # rotation, v, the output of attention, and 4 values of the MLP; two norms' copies in float32.
    block = 2 * (4 * 4 + 2 * (6 + 3) + (5 + 10) + 4 * 7) + 2 * 4 * 4
    assert TINY.activation_bytes() == 2 * block
    checkpointed = ModelShape(**{**vars(TINY), "checkpointed": True})
    assert checkpointed.activation_bytes() == 2 * 4 * 2 + block
    # Compiled: no copies of norms, and of an MLP the gate, the up and their product.
    compiled = ModelShape(**{**vars(TINY), "compiled": True})
    assert compiled.activation_bytes() == 2 * (block - 2 * 4 * 4 - 2 * 7)
    ungated = ModelShape(**{**vars(compiled), "mlp_products": 2})
    assert compiled.activation_bytes() - ungated.activation_bytes() == 2 * 2 * 7
    double = ModelShape(**{**vars(TINY), "dtype_bytes": 8})
    assert double.boundary_gradient_bytes_per_token == 2 * (3 + 5) * 8
    assert double.activation_bytes() == 2 * 8 * (16 + 18 + 15 + 28)
    # Selective: one MLP is whole at a time, and the experts of one layer.
    experts = {"expert_layers": 2, "expert_activations": 3, "router_bytes": 5}
    mixture = ModelShape(**{**vars(TINY), **experts})
    selective = 2 * block - 4 * 7 * 2
    assert TINY.activation_bytes("selective") == selective
    assert mixture.activation_bytes("selective") == selective + 3 * 2 + 5
    assert mixture.activation_bytes() == 2 * (block + 3 * 2 + 5)


def test_what_a_checkpointed_backward_runs_again() -> None:
    """Of an MLP all but its last product: two of three."""
    assert TINY.linear_parameters == 2 * (4 * 3 * 3 + 4 * 5 * 3 + 3 * 4 * 7)
    shares = [TINY.repeated_flops_share(policy) for policy in ("none", "selective", "full")]
    assert shares == [0, 2 * 2 * 4 * 7 / 360, 1]


@pytest.mark.parametrize(
    ("prefix", "suffix", "count", "bound"),
    [(10_240, 2_048, 32, 4.37), (6_144, 6_144, 16, 1.69), (2_048, 10_240, 8, 1.13)],
)
def test_the_bound_of_published_workloads(prefix, suffix, count, bound: float) -> None:
    """Llama3-8B shapes, one group, the head on the responses alone."""
    prompt = np.zeros(prefix, np.int64)
    rollouts = []
    for rollout in range(count):
        ids = np.concatenate([prompt, np.full(suffix, 1 + rollout)])
        rollouts.append(Rollout(ids, np.arange(len(ids)) >= prefix, 1.0))
    plan = make_plan(RolloutBatch(rollouts), ModelShape.from_config(LLAMA3_8B))
    assert plan.dense.tokens == count * (prefix + suffix - 1)
    assert plan.shared.tokens == prefix - 1 + count * suffix
    assert plan.dense.num_loss_entries == plan.shared.num_loss_entries == count * suffix
    assert round(plan.bound, 2) == bound


def test_shape_from_a_configuration() -> None:
    shape = ModelShape.from_config(LLAMA3_8B)
    assert (shape.head_dim, shape.value_dim, shape.kv_heads) == (128, 128, 8)
    assert shape.windows == (0,) * 32
    assert shape.linear_parameters == 6_979_321_856  # 8.03e9 less embeddings, head and norms
    changed = ModelShape.from_config(LLAMA3_8B, dtype_bytes=4, checkpointed=True)
    assert (changed.dtype_bytes, changed.checkpointed) == (4, True)
    alone = {key: value for key, value in LLAMA3_8B.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(alone).kv_heads == 32
    assert ModelShape.from_config({**LLAMA3_8B, "head_dim": 64}).head_dim == 64


def test_windows_from_a_configuration() -> None:
    config = {
        **LLAMA3_8B,
        "num_hidden_layers": 2,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert ModelShape.from_config(config).windows == (512, 0)
    assert ModelShape.from_config({**config, "use_sliding_window": False}).windows == (0, 0)
    kinds = ["chunked_attention", "full_attention"]
    chunked = {**config, "attention_chunk_size": 8192, "layer_types": kinds}
    assert ModelShape.from_config(chunked).windows == (-8192, 0)


def test_chunked_layers_are_counted_by_the_pairs_of_their_chunks(tmp_path: Path) -> None:
    shape = ModelShape(**{**vars(TINY), "windows": (-8, -8)})
    # Chunks of 8, 8 and 3 edges.
    pairs, edges = 36 + 36 + 6, np.array([19])
    assert dense_work(edges, 0, shape.windows).pairs[-8] == pairs
    work, rates = dense_work(edges, 5, shape.windows), Rates.of(shape)
    assert rates.cost(edges, np.array([5])) == work.step_flops(shape)
    plan = make_plan(group(10, 10, 1), replace(SHAPE, windows=(-8,) * 4), Config(sharing="none"))
    (launch,) = MeasuredMeter(made_up(), plan)._launches_of(plan.microbatches[0], -8)
    assert (launch.pairs, launch.further) == ({("causal", 8): pairs}, 19)
    made_up(shape=plan.shape).save(tmp_path / "file.json")
    Calibration.load(tmp_path / "file.json").check_shape(plan.shape)


def test_a_window_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="windows has 3 entries for 2 layers"):
        ModelShape(**{**vars(TINY), "windows": (1, 2, 3)})


def test_mixtures_of_experts_count_what_a_token_goes_through() -> None:
    """Qwen3-30B-A3B: 128 experts of 768, 8 a token; 3.3e9 active parameters with its embeddings."""
    shape = ModelShape.from_config(MODELS["qwen3-30b-a3b"])
    assert shape.intermediate == 8 * 768
    active = shape.linear_parameters + 2 * 2048 * 151936
    assert active == pytest.approx(3.3e9, rel=0.03)


def test_latent_attention_counts_its_projections() -> None:
    """DeepSeek-V3: 61 layers, 37e9 active parameters with its embeddings."""
    shape = ModelShape.from_config(MODELS["deepseek-v3"])
    assert (shape.head_dim, shape.value_dim, shape.kv_heads) == (192, 128, 128)
    active = shape.linear_parameters + 2 * 7168 * 129280
    assert active == pytest.approx(37.5e9, rel=0.03)


QWEN35_4B = {
    "num_hidden_layers": 32,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
}


def test_layers_that_carry_a_state_see_no_pairs() -> None:
    """Qwen3.5-4B: one layer of four attends, its query projection makes the output's gate too."""
    shape = ModelShape.from_config(QWEN35_4B)
    assert (shape.attention_layers, shape.recurrent_layers, len(shape.windows)) == (8, 24, 8)
    mixed, out, state = 2 * 16 * 128 + 32 * 128, 32 * 128, 32 * 128 * 128
    weights = 2560 * (mixed + out + 2 * 32) + out * 2560
    assert shape.recurrent_parameters == weights + 4 * mixed + 3 * state
    assert shape.attention_parameters == 2560 * 256 * (2 * 16 + 16 + 2 * 4)
    # 3.57e9 weights in the blocks; with the tied embeddings 4.2e9, as the model is named.
    products = shape.linear_parameters - 24 * 3 * state
    assert products == pytest.approx(3.57e9, rel=0.01)
    # K and V in the layers that attend; a state in float32 and three inputs in the others.
    assert shape.boundary_bytes_per_token == 8 * 2 * 4 * 256 * 2
    assert shape.state_bytes == 24 * (2 * state * 4 + 3 * mixed * (2 + 4))
    pairs = 10 * 11 // 2
    work = dense_work(np.array([10]), 0, shape.windows)
    expected = 2 * 10 * shape.linear_parameters + 8 * 2 * 16 * 512 * pairs
    assert work.forward_flops(shape) == expected


def test_bytes_that_context_ranks_exchange_counted_by_hand() -> None:
    """Each of four ranks sends three quarters of two tokens; two key heads are repeated."""
    shape = ModelShape.from_config({**QWEN35_4B, "linear_num_key_heads": 2}, context=4)
    queries, keys = 16 * (256 + 256), 4 * (256 + 256)
    state = 4 * 2 * 128 + 2 * 32 * 128 + 2 * 32
    sent = 2 * (8 * (queries + keys) + 24 * state) * 2 * 3 // 4
    assert shape.exchanged_bytes(8) == sent
    assert shape.exchanged_bytes(8, ends_early=True) == sent - 2 * queries * 2 * 3 // 4


def test_experts_without_a_dense_width() -> None:
    """Qwen3.5-35B-A3B: its configuration has the widths of experts alone."""
    config = {
        **{k: v for k, v in QWEN35_4B.items() if k != "intermediate_size"},
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_key_value_heads": 2,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
    }
    shape = ModelShape.from_config(config)
    assert shape.intermediate == 9 * 512
    with pytest.raises(ConfigError, match="lacks intermediate_size"):
        ModelShape.from_config({**config, "moe_intermediate_size": None})


GRANITE_MICRO = {
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100_352,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
}


def test_the_counts_of_mamba_2() -> None:
    """Granite-4.0-H-Micro: 36 of 40 layers carry a state of 64 heads x 64 x 128; 3.2e9 weights."""
    shape = ModelShape.from_config(GRANITE_MICRO)
    assert (shape.recurrent_layers, shape.windows) == (36, (0,) * 4)
    assert ModelShape.from_config({**GRANITE_MICRO, "intermediate_size": 1}).intermediate == 8192
    assert shape.state_elements == 64 * 64 * 128
    assert shape.tail_elements == 3 * (64 * 64 + 2 * 128)
    weights = shape.linear_parameters - 36 * 2 * shape.state_elements + 2048 * 100_352
    assert weights == pytest.approx(3.19e9, rel=0.01)
    with pytest.raises(ConfigError, match=r"for this model are [\w, ]+") as refused:
        ModelShape.from_config({**GRANITE_MICRO, "layer_types": ["foo"] * 40})
    assert str(refused.value).count(", attention") == 1


def test_the_planner_counts_states() -> None:
    batch = RolloutBatch(Rollout([1, 2, 3, 4, i], [0] * 4 + [1], 0.0) for i in range(5, 9))
    shape = ModelShape.from_config(QWEN35_4B)
    config = Config(sharing="tree", boundary="across")
    plan = make_plan(batch, shape, config)
    assert (plan.cache_states, plan.cache_tokens) == (1, 3)
    without = ModelShape(**{**vars(shape), "state_elements": 0, "tail_elements": 0})
    less = make_plan(batch, without, config)
    assert plan.predicted_peak_bytes and less.predicted_peak_bytes
    assert plan.predicted_peak_bytes - less.predicted_peak_bytes == shape.state_bytes
