"""The self-check on a GPU: its noise on whole models, and the time that checks take of a step.

Random models at the widths and depths of released ones, as their families initialise them. For each
the sample's difference is shown over the noise, with the time of the first check. Before that comes
the smallest step of the benchmarks (Llama 3 8B, one prompt of 256 tokens, eight responses of 256)
with and without the self-check, in turn.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.shapes import SHAPES
from benchmarks.timing import Timing
from forkpoint import Config, Policy, Rollout, RolloutBatch, losses, wrap
from forkpoint.apps.cli.options import Count
from forkpoint.engine.changes import Changes
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import ConfigError
from forkpoint.hosts.modules import cache_module_walks
from forkpoint.step.self_check import self_check

NAME = "self-check"
MOST_OVER_NOISE = 10.0
"""The bar of the difference over the noise."""


def shape_of(name: str) -> dict[str, Any]:
    """Sizes of a published shape, without the name of its family."""
    return {key: size for key, size in SHAPES[name].items() if key != "model_type"}


MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "Llama 3 8B": ("llama", shape_of("llama3-8b"), torch.bfloat16),
    "Qwen3 8B": ("qwen3", shape_of("qwen3-8b"), torch.bfloat16),
    "Qwen3 1.7B": ("qwen3", shape_of("qwen3-1.7b"), torch.bfloat16),
    "Qwen3 1.7B float32": ("qwen3", shape_of("qwen3-1.7b"), torch.float32),
    "gpt-oss 20B, 8 of 24 layers": ("gpt_oss", {"num_hidden_layers": 8}, torch.bfloat16),
    "Qwen3 30B-A3B, 8 of 48 layers": ("qwen3_moe", {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936,
    }, torch.bfloat16),
    "Gemma 2 2B": ("gemma2", {}, torch.bfloat16),
}  # fmt: skip


def made(family: str, options: dict[str, Any], dtype: torch.dtype, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **options), dtype=dtype
        )
    return model.train()


def group(prompt_tokens: int, response_tokens: int, count: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 30000, prompt_tokens)
    return RolloutBatch(
        Rollout(
            np.concatenate([prompt, rng.integers(0, 30000, response_tokens)]),
            np.arange(prompt_tokens + response_tokens) >= prompt_tokens,
            advantage=float(rng.normal()),
            group_id="g",
        )
        for _ in range(count)
    )


def noise(name: str, device: str) -> Iterator[ResultRow]:
    model = made(*MODELS[name], device)
    if name.startswith("Gemma"):  # sdpa knows no softcap
        model.set_attn_implementation("eager")
    batch = group(256, 256, 8)
    for training in (False, True):
        policy = wrap(model)
        begin = time.perf_counter()
        found = Transaction(policy.host.device).run(
            partial(
                self_check,
                host=policy.host,
                config=policy.config,
                batch=batch,
                training=training,
            )
        )
        took = time.perf_counter() - begin
        note = (
            f"difference {found.difference:.3g}, noise {found.noise:.3g}, one at a time and all at "
            f"once {found.repeated:.3g}, allowed {found.allowed:.3g}, elsewhere "
            f"{found.elsewhere:.3%} of {found.allowed_elsewhere:.3%}; the check took {took:.2f} s"
        )
        ratio = found.difference / found.noise
        yield ResultRow(
            bench=NAME,
            case=f"{name}, {'training' if training else 'scoring'}",
            metric="difference over noise",
            unit="1",
            value=ratio,
            bar=MOST_OVER_NOISE,
            note=note,
        )


def lost(device: str, steps: int) -> Iterator[ResultRow]:
    model = made(*MODELS["Llama 3 8B"], device)
    batch, loss = group(256, 256, 8), losses.GRPO()
    config = Config(sharing="group", boundary="within")
    policies = [wrap(model, config), wrap(model, config).with_config(self_check=False)]
    times: list[list[float]] = [[], []]

    def timed(policy: Policy) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        policy.forward_backward(batch, loss)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    for policy in policies:
        for _ in range(3):
            with torch.no_grad():  # the second sample comes after the weights have moved
                model.lm_head.weight.mul_(1)
            timed(policy)
    for _ in range(steps):
        for index, policy in enumerate(policies):
            times[index].append(timed(policy))
    # What is done for safety before a step begins, and of that the fingerprint, within a step.
    host = policies[0].host
    pure, every = [], []
    for _ in range(50):
        with Changes() as changes:
            cache_module_walks(changes)
            begin = time.perf_counter()
            host.check(batch, training=True)
            every.append(1e3 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            host.fingerprint()
            pure.append(1e3 * (time.perf_counter() - begin))
    checked, bare = map(Timing, times)
    checks, fingerprints = Timing(every), Timing(pure)
    case = "Llama 3 8B 256/256 N=8"
    row = partial(ResultRow, bench=NAME, case=case, unit="%")
    yield timed_row(NAME, case, "step with the self-check", checked)
    yield timed_row(NAME, case, "step without", bare)
    share = 100 * (checked.p50 / bare.p50 - 1)
    yield row(metric="lost", value=share, note="medians of steps run in turn")
    yield timed_row(NAME, case, "all checks of a step", checks, note="the first is left out")
    yield timed_row(NAME, case, "of them the fingerprint", fingerprints)
    yield row(metric="checks of a step", value=100 * checks.p50 / bare.p50)


@dataclass(frozen=True, kw_only=True)
class SelfCheck(Benchmark):
    """Measure the self-check's noise on whole models, and the time of the checks of a step.

    Attributes:
        models: Which models; by default all.
        steps: How many steps are timed with and without the self-check; only on a GPU.
    """

    NAME: ClassVar[str] = NAME

    models: tuple[str, ...] = tuple(MODELS)
    steps: Count = 20

    def check(self) -> None:
        for name in self.models:
            if name not in MODELS:
                raise ConfigError(f"models has {name!r}; allowed are {', '.join(MODELS)}.")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            yield from lost(device, self.steps)
            torch.cuda.empty_cache()
        for name in self.models:
            if not deadline.over(name):
                yield from noise(name, device)
                if device == "cuda":
                    torch.cuda.empty_cache()
