"""A training step of a model that mixes attention with gated linear attention, beside dense.

One group of rollouts that share a long prompt, random tokens and random weights in the shapes of
Qwen3.5-4B (or fewer of its layers), activation checkpointing on both sides. Dense is the plan that
shares nothing, with rows of as many rollouts as runs fastest; shared is the fastest of the ways to
share. Head, kernels and loss are the same, and so is the code. Gradients are looked at before
anything is believed: those that are not finite are named, for dense and shared apart.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from forkpoint.bench.hybrid_time import time_shares
from forkpoint.bench.rows import ResultRow, Timing
from forkpoint.config import Config
from forkpoint.losses import GRPO
from forkpoint.plan import Plan
from forkpoint.policy import Policy, StepStats, wrap
from forkpoint.rollouts import Rollout, RolloutBatch

QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **QWEN35_4B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True, kw_only=True)
class HybridCase:
    """One group: `size` responses of `response` tokens to a prompt of `prompt` tokens."""

    prompt: int
    response: int
    size: int = 9
    published: float | None = None
    """The speed-up that was published for these sizes, on another GPU."""

    @property
    def name(self) -> str:
        return f"P{self.prompt}-R{self.response}-G{self.size}"

    def batch(self, vocab: int) -> RolloutBatch:
        random = np.random.default_rng(0)
        # Tokens for images and other special ones are at the vocabulary's end.
        vocab //= 2
        prompt = random.integers(0, vocab, self.prompt)
        mask = np.repeat([0, 1], [self.prompt, self.response])
        advantages = random.normal(size=self.size)
        return RolloutBatch(
            Rollout(
                np.concatenate([prompt, random.integers(0, vocab, self.response)]),
                mask,
                float(advantage),
                group_id=0,
            )
            for advantage in advantages - advantages.mean()
        )


SUITES: dict[str, tuple[HybridCase, ...]] = {
    "prompt-caching": (
        HybridCase(prompt=16_384, response=64, published=7.5),
        HybridCase(prompt=16_384, response=128, published=7.3),
        HybridCase(prompt=16_384, response=1024, published=5.4),
        HybridCase(prompt=8192, response=4096, published=1.7),
    ),
    "smoke": (HybridCase(prompt=70, response=24, size=3),),
}


def make_model(shape: dict[str, Any], layers: int | None, dtype: torch.dtype, device: str) -> Any:
    """Random weights as the family initialises them, checkpointed, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {} if layers is None else {"num_hidden_layers": layers}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **{**shape, **changes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
    return model.train()


def run_case(case: HybridCase, model: Any, *, repeats: int) -> Iterator[ResultRow]:
    """Dense and shared steps of one case, each at its best."""
    batch = case.batch(model.config.vocab_size)
    rollout = case.prompt + case.response
    dense_rows = [rollout * n for n in (1, 2, 4) if n <= case.size]
    ways = [
        *(("dense", Config(sharing="none", max_row_tokens=tokens)) for tokens in dense_rows),
        *(
            ("shared", Config(sharing="group", boundary=boundary, max_row_tokens=rollout))
            for boundary in ("across_rows", "mixed")
        ),
        (
            "shared",
            Config(
                sharing="group",
                boundary="in_row",
                max_row_tokens=case.prompt + case.size * case.response,
            ),
        ),
    ]
    best: dict[str, tuple[Timing, Config, StepStats]] = {}
    for side, config in ways:
        policy = wrap(model, config)
        plan = policy.plan(batch)
        try:
            timing, stats = _timed(policy, batch, plan, repeats)
        except torch.OutOfMemoryError:
            yield _row(case, f"{side}/fits", "1 is yes", 0.0, note=_described(plan))
            _tidy()
            continue
        if side not in best or timing.p50 < best[side][0].p50:
            best[side] = (timing, config, stats)
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for side, (timing, config, stats) in best.items():
        yield from _measured(case, side, timing, stats)
        policy = wrap(model, config)
        gradients[side] = _gradients(policy, batch, stats.plan)
        wrong = [n for n, g in gradients[side].items() if not bool(g.isfinite().all())]
        note = f"FAILED: not finite are {', '.join(wrong[:8])}" if wrong else None
        yield _row(case, f"{side}/nonfinite", "parameters", float(len(wrong)), note=note)
        if model.device.type == "cuda":
            for part, share in time_shares(
                lambda p=policy, s=stats: _step(p, batch, s.plan)
            ).items():
                yield _row(case, f"{side}/share_{part}", "of device time", share)
    if len(best) == 2:
        yield from _compared(case, best, gradients)


def _compared(case: HybridCase, best: Any, gradients: Any) -> Iterator[ResultRow]:
    dense, shared = best["dense"], best["shared"]
    published = f"published {case.published}x on another GPU" if case.published else None
    speedup = dense[0].p50 / shared[0].p50
    bound = shared[2].plan.bound
    yield _row(case, "speedup", "ratio", speedup, baseline="dense", bound=bound, note=published)
    yield _row(case, "share_of_bound", "ratio", speedup / bound)
    yield _row(case, "loss_difference", "absolute", abs(dense[2].loss - shared[2].loss))
    norm, difference = 0.0, 0.0
    for name, theirs in gradients["dense"].items():
        norm += float(theirs.double().square().sum())
        difference += float((gradients["shared"][name].double() - theirs.double()).square().sum())
    yield _row(case, "gradient_difference", "relative", (difference / norm) ** 0.5)


def _measured(case: HybridCase, side: str, timing: Timing, stats: StepStats) -> Iterator[ResultRow]:
    yield replace(
        _row(case, f"{side}/step", "ms", timing.p50, note=_described(stats.plan)),
        p20=timing.quantile(0.2),
        p80=timing.quantile(0.8),
    )
    for phase, ms in stats.phase_ms.items():
        yield _row(case, f"{side}/phase_{phase}", "ms", ms)
    if stats.peak_memory_bytes is not None:
        yield _row(case, f"{side}/peak_memory", "bytes", float(stats.peak_memory_bytes))


def _timed(
    policy: Policy, batch: RolloutBatch, plan: Plan, repeats: int
) -> tuple[Timing, StepStats]:
    stats = _step(policy, batch, plan)
    samples = []
    for _ in range(repeats):
        if policy.host.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        stats = _step(policy, batch, plan)
        if policy.host.device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e3)
    return Timing(samples), stats


def _step(policy: Policy, batch: RolloutBatch, plan: Plan) -> StepStats:
    policy.host.model.zero_grad(set_to_none=False)
    return policy.forward_backward(batch, GRPO(), plan=plan)


def _gradients(policy: Policy, batch: RolloutBatch, plan: Plan) -> dict[str, torch.Tensor]:
    _step(policy, batch, plan)
    named = policy.host.named_parameters()
    return {n: p.grad.detach().to("cpu", copy=True) for n, p in named if p.grad is not None}


def _described(plan: Plan) -> str:
    return f"{plan.sharing} + {plan.boundary}, {len(plan.rows)} rows of {plan.max_row_tokens}"


def _row(case: HybridCase, metric: str, unit: str, value: float, **rest: Any) -> ResultRow:
    return ResultRow(bench="hybrid", case=case.name, metric=metric, unit=unit, value=value, **rest)


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
