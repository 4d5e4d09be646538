"""Mixtures of experts in bfloat16 with routes held and free: errors of gradients, shared and dense.

Random models of four layers of width 128 with 2 of 8 experts a token, as their families initialise
them, and two groups of eight rollouts (prompts of 300 tokens, responses of 50 to 100), from each
seed; shared across rows and within rows in turn. Errors are relative to the norm of the gradient in
float32.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import quantile
from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.apps.cli.options import Count
from forkpoint.errors import ConfigError

CONFIGS = (
    Config(sharing="group", boundary="across", max_microbatch_tokens=400),
    Config(sharing="group", boundary="within"),
)
TWO_OF_EIGHT = {"num_experts_per_tok": 2, "num_local_experts": 8}
SMALL = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 64}
GROUPED = {
    **SMALL,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 64,
}
LATENTS = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
    "shared_intermediate_size": 128,
    "position_embedding_type": "rope",
    "layer_types": ["mamba", "full_attention"] * 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**TWO_OF_EIGHT, "sliding_window": 64},
    "qwen3_moe": SMALL,
    "mixtral": TWO_OF_EIGHT,
    "granitemoe": TWO_OF_EIGHT,
    "glm4_moe": GROUPED,
    "deepseek_v3": {**GROUPED, **LATENTS},
    "qwen3_next": {**SMALL, **DELTA},
    "qwen3_5_moe_text": {**SMALL, **DELTA},
    "granitemoehybrid": {**TWO_OF_EIGHT, **MAMBA},
}


def make_model(family: str, seed: int) -> PreTrainedModel:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    # The default's grouped matrix product is another one on each device.
    model.set_experts_implementation("eager")
    return model.to(torch.bfloat16)


def make_batch(seed: int) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(2):
        prompt = rng.integers(0, 512, 300).tolist()
        for advantage in rng.normal(size=8).tolist():
            response = rng.integers(0, 512, int(rng.integers(50, 101))).tolist()
            mask = [0] * len(prompt) + [1] * len(response)
            rollouts.append(Rollout(prompt + response, mask, advantage, group_id=group))
    return RolloutBatch(rollouts)


def measure(family: str, seeds: int) -> Iterator[ResultRow]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(1, seeds + 1):
        policy = wrap(make_model(family, seed), CONFIGS[seed % len(CONFIGS)])
        batch = make_batch(seed)
        for routes in ("held", "free"):
            report = policy.verify(batch, losses.GRPO(), hold_routes=routes == "held")
            unit = "of the global gradient norm"
            found[f"shared error, routes {routes}", unit].append(report.shared_error)
            found[f"dense error, routes {routes}", unit].append(report.dense_error)
            found[f"passed, routes {routes}", "of 1"].append(float(report.passed))
            if routes == "held":
                worst = report.worst[0].excess
                found["worst parameter, routes held", "of what is allowed"].append(worst)
                assert report.routes is not None and report.routes.shared and report.routes.dense
                for side in ("shared", "dense"):
                    counts = getattr(report.routes, side)
                    found[f"{side} elsewhere", "of choices"].append(counts.fraction)
    for (metric, unit), values in found.items():
        typical = statistics.mean if metric.startswith("passed") else statistics.median
        yield ResultRow(
            bench=ExpertRoutes.NAME,
            case=family,
            metric=metric,
            unit=unit,
            value=typical(values),
            p20=quantile(values, 0.2),
            p80=quantile(values, 0.8),
            note=f"{seeds} models and batches",
        )


@dataclass(frozen=True, kw_only=True)
class ExpertRoutes(Benchmark):
    """Compare gradients of mixtures of experts in bfloat16, shared and dense, routes held and free.

    Attributes:
        families: Which model families; by default all.
        seeds: How many models and batches of each.
    """

    NAME: ClassVar[str] = "expert-routes"

    families: tuple[str, ...] = tuple(FAMILIES)
    seeds: Count = 5

    def check(self) -> None:
        for name in self.families:
            if name not in FAMILIES:
                raise ConfigError(f"families has {name!r}; allowed are {', '.join(FAMILIES)}.")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for family in self.families:
            if not deadline.over(family):
                yield from measure(family, self.seeds)
