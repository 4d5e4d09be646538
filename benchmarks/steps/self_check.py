"""The self-check on a GPU: its noise on whole models, and the time that checks take of a step.

    python benchmarks/self_check.py --output self-check.jsonl

Random models at the widths and depths of released ones, as their families initialise them. For each
the sample's difference is shown over the noise (the bar is 10), with the time of the first check.
Then the smallest step of the benchmarks (Llama 3 8B, one prompt of 256 tokens, eight responses of
256) with and without the self-check, in turn.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forkpoint import Config, Policy, Rollout, RolloutBatch, losses, wrap
from benchmarks.rows import ResultRow, write_rows
from forkpoint.engine.changes import Changes
from forkpoint.engine.guard import Step
from forkpoint.hosts.modules import list_once
from forkpoint.selfcheck import self_check

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_1_7B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "Llama 3 8B": ("llama", LLAMA_8B, torch.bfloat16),
    "Qwen3 8B": ("qwen3", QWEN3_8B, torch.bfloat16),
    "Qwen3 1.7B": ("qwen3", QWEN3_1_7B, torch.bfloat16),
    "Qwen3 1.7B float32": ("qwen3", QWEN3_1_7B, torch.float32),
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


def noise(name: str, device: str) -> list[ResultRow]:
    model = made(*MODELS[name], device)
    if name.startswith("Gemma"):  # sdpa knows no softcap
        model.set_attn_implementation("eager")
    batch, rows = group(256, 256, 8), []
    for training in (False, True):
        policy = wrap(model)
        step = Step(policy.host.device)
        begin = time.perf_counter()
        found = step.run(
            lambda: self_check(step, policy.host, policy.config, batch, training=training)  # noqa: B023
        )
        took = time.perf_counter() - begin
        note = (
            f"difference {found.difference:.3g}, noise {found.noise:.3g}, one at a time and all at "
            f"once {found.repeated:.3g}, allowed {found.allowed:.3g}, elsewhere "
            f"{found.elsewhere:.3%} of {found.allowed_elsewhere:.3%}; the check took {took:.2f} s"
        )
        ratio = found.difference / found.noise
        case = f"{name}, {'training' if training else 'scoring'}"
        rows.append(row(case, "difference over noise", "", ratio, note))
    return rows


def lost(device: str, steps: int) -> list[ResultRow]:
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
            list_once(changes)
            begin = time.perf_counter()
            host.check(batch, training=True)
            every.append(1e3 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            host.fingerprint()
            pure.append(1e3 * (time.perf_counter() - begin))
    checked, bare = map(statistics.median, times)
    case = "Llama 3 8B 256/256 N=8"
    return [
        row(case, "step with the self-check", "ms", checked, None),
        row(case, "step without", "ms", bare, None),
        row(case, "lost", "%", 100 * (checked / bare - 1), "medians of steps run in turn"),
        row(case, "all checks of a step", "ms", statistics.median(every), "the first is left out"),
        row(case, "of them the fingerprint", "ms", statistics.median(pure), None),
        row(case, "checks of a step", "%", 100 * statistics.median(every) / bare, None),
    ]


def row(case: str, metric: str, unit: str, value: float, note: str | None) -> ResultRow:
    made = ResultRow(
        bench="self-check", case=case, metric=metric, unit=unit, value=value, note=note
    )
    print(f"{case:40} {metric:28} {value:10.3f} {unit}  {note or ''}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = lost(device, given.steps) if device == "cuda" else []
    torch.cuda.empty_cache() if device == "cuda" else None
    for name in given.models:
        rows += noise(name, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    if given.output is not None:
        write_rows(rows, given.output)


if __name__ == "__main__":
    main()
