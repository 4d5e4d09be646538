"""A training step of a model that mixes attention with gated linear attention, beside dense.

One group of rollouts that share a long prompt, random tokens and random weights in the shapes of
Qwen3.5-4B (or fewer of its layers), activation checkpointing on both sides. Dense is the plan that
shares nothing, with rows of as many rollouts as runs fastest; its cost is linear in the rollouts,
so a few are measured and scaled. Shared is the fastest of the ways to share, with all rollouts.
Head, kernels and loss are the same, and so is the code. Gradients that are not finite are named,
for dense and shared apart, and those of the few rollouts are compared, as are their log-probs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from benchmarks.shapes import QWEN35_4B as QWEN35_4B
from benchmarks.shapes import checkpoint
from benchmarks.steps.cells import cell_rows
from benchmarks.steps.options import Layers, check_at_least_one
from benchmarks.steps.stepper import Dense, Stepper, Timed, best_dense
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import Rollout, RolloutBatch

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
    """One group: `size` responses of `response` tokens to a prompt of `prompt` tokens.

    `how` says what was measured otherwise than by default.
    """

    prompt: int
    response: int
    size: int = 9
    published: float | None = None
    """The speed-up that was published for these sizes, on another GPU."""
    how: str = ""

    @property
    def name(self) -> str:
        return f"P{self.prompt}-R{self.response}-G{self.size}" + self.how

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
    checkpoint(model)
    return model.train()


SAMPLE = 2
"""Rollouts that are run densely: so many that rows of two can be tried."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Benchmark):
    """Time steps in the shapes of Qwen3.5-4B, which mixes attention with gated linear attention.

    Attributes:
        suite: Which shapes; several may be named. smoke is tiny and runs on CPUs too: it shows that
            the benchmark runs, and measures nothing.
        only: Parts of the names of cases to measure, such as R64; by default every case.
        layers: How many layers the model has; by default all of its 32.
        blocks: Whether decoder blocks are compiled, dense and shared alike; on CPUs they are not.
        repeats: How often a step is timed.
        planned: Measure the plan that the planner chooses, in place of the fastest of three.
        all_rollouts: Run all rollouts densely, once, in place of scaling two of them.
    """

    NAME: ClassVar[str] = "hybrid"

    suite: tuple[Literal["prompt-caching", "smoke"], ...] = ("prompt-caching",)
    only: tuple[str, ...] = ()
    layers: Layers = None
    blocks: Literal["compiled", "eager"] = "compiled"
    repeats: Count = 3
    planned: Flag = False
    all_rollouts: Flag = False

    def check(self) -> None:
        check_at_least_one("layers", self.layers)
        check_at_least_one("repeats", self.repeats)
        names = [case.name for suite in self.suite for case in SUITES[suite]]
        if not any(map(self._wants, names)):
            raise ConfigError(
                f"no case has {' or '.join(self.only)} in its name; there are {', '.join(names)}."
            )
        if set(self.suite) != {"smoke"} and not torch.cuda.is_available():
            raise ConfigError(
                "hybrid measures steps of Qwen3.5-4B on a GPU, and torch sees no CUDA device here; "
                "run it on a machine with one, or try it out with --suite smoke."
            )

    def _wants(self, case: str) -> bool:
        return not self.only or any(part in case for part in self.only)

    def _how(self) -> str:
        """Options that are not the default, as a part of the case's name."""
        said = [
            *(["eager"] if self.blocks == "eager" else []),
            *(["the planner's choice"] if self.planned else []),
            *(["all rollouts"] if self.all_rollouts else []),
        ]
        return "".join(f", {part}" for part in said)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for suite in self.suite:
            if suite == "smoke":
                model = make_model(TINY, self.layers, torch.float32, "cpu")
            else:
                model = make_model(QWEN35_4B, self.layers, torch.bfloat16, "cuda")
            stepper = Stepper(model, compile_blocks=None if self.blocks == "compiled" else False)
            for case in SUITES[suite]:
                if self._wants(case.name) and not deadline.over(case.name):
                    yield from run_case(
                        replace(case, how=self._how()),
                        stepper,
                        repeats=self.repeats,
                        planned=self.planned,
                        all_rollouts=self.all_rollouts,
                    )
            del model, stepper


def run_case(
    case: HybridCase,
    stepper: Stepper,
    *,
    repeats: int,
    planned: bool = False,
    all_rollouts: bool = False,
) -> Iterator[ResultRow]:
    """Dense and shared steps of one case, each at its best, or shared as `planned`."""
    row = partial(_row, case)
    batch = case.batch(stepper.vocab)
    dense, dense_policy, some = best_dense(
        stepper, batch, repeats=repeats, sample=SAMPLE, all_rollouts=all_rollouts
    )
    if planned:
        policy, too_large = stepper.configured(memory_budget=stepper.budget_bytes), []
        warm = stepper.step(policy, batch)
        shared = stepper.repeat(policy, batch, repeats=repeats, into=Timed(warm.plan))
    else:
        shared, policy, too_large = _best_shared(case, stepper, batch, repeats)
    for how in too_large:
        yield row("shared fits", 0.0, "1 is yes", note=how)
    yield _nonfinite(case, "shared", stepper)
    yield from cell_rows("hybrid", case.name, shared, dense)
    if case.published:
        yield row("published speed-up", case.published, "x", note="measured on another GPU")
    yield from _dense_rows(case, dense)
    yield from _compared(case, stepper, some, dense_policy, policy)


def _best_shared(
    case: HybridCase, stepper: Stepper, batch: RolloutBatch, repeats: int
) -> tuple[Timed, Policy, list[str]]:
    """The fastest way to share, measured; and those for which there is too little memory."""
    rollout, group = case.prompt + case.response, case.prompt + case.size * case.response
    found: list[tuple[Timed, Policy]] = []
    too_large = []
    for boundary, tokens in (("within", group), ("across", rollout), ("mixed", rollout)):
        policy = stepper.configured(
            sharing="group", boundary=boundary, max_microbatch_tokens=tokens
        )
        try:
            timed = stepper.step(policy, batch)
            # The first one compiles and plans.
            timed = stepper.step(policy, batch, timed.plan)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            too_large.append(f"group + {boundary}, microbatches of at most {tokens} tokens")
            continue
        found.append((timed, policy))
    timed, policy = min(found, key=lambda f: f[0].typical_ms)
    return stepper.repeat(policy, batch, repeats=repeats, into=Timed(timed.plan)), policy, too_large


def _dense_rows(case: HybridCase, dense: Dense) -> Iterator[ResultRow]:
    for phase in sorted(dense.timed.phase_ms):
        yield _row(case, f"dense phase {phase}", dense.phase_ms(phase), "ms", note=dense.note)


def _compared(
    case: HybridCase, stepper: Stepper, some: RolloutBatch, dense: Policy, shared: Policy
) -> Iterator[ResultRow]:
    """Log-probs and gradients of the sample: shared beside dense, and dense beside dense in rows of
    another length, which differ by rounding alone."""
    row = partial(_row, case)
    longest = int(some.lengths.max())
    whole = (dense.config.max_microbatch_tokens or 0) > longest
    other = stepper.configured(
        sharing="none",
        boundary="within",
        max_microbatch_tokens=longest * (1 if whole else 2),
        head_logits=dense.config.head_logits,
    )
    logprobs = _logprobs(stepper, dense, some)
    yield _nonfinite(case, "dense", stepper)
    named = stepper.policy.host.named_parameters()
    wanted = {n: p.grad.clone() for n, p in named if p.grad is not None}
    for name, policy in (("dense again: ", other), ("", shared)):
        note = (
            f"{len(some)} rollouts, microbatches of at most "
            f"{policy.config.max_microbatch_tokens} tokens"
        )
        try:
            found = _logprobs(stepper, policy, some)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield row(f"{name}fits", 0.0, "1 is yes", note=note)
            continue
        apart = float((found - logprobs).abs().mean())
        yield row(f"{name}log-prob difference", apart, "mean absolute", note=note)
        relative = _relative_difference(stepper, wanted)
        yield row(f"{name}gradient difference", relative, "relative", note=note)


def _logprobs(stepper: Stepper, policy: Policy, batch: RolloutBatch) -> torch.Tensor:
    """Of the trained tokens, as a step of the policy leaves them; its gradients lie in .grad."""
    stats = stepper.step(policy, batch).stats
    assert stats is not None
    trained = torch.tensor(batch.loss_mask, device=stats.logprobs.device)
    return stats.logprobs[trained].double()


def _relative_difference(stepper: Stepper, wanted: dict[str, torch.Tensor]) -> float:
    norm = apart = 0.0
    for name, parameter in stepper.policy.host.named_parameters():
        if parameter.grad is not None:
            theirs = wanted[name].float()
            norm += _norm(theirs) ** 2
            apart += _norm(parameter.grad.float() - theirs) ** 2
    return (apart / norm) ** 0.5


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _nonfinite(case: HybridCase, side: str, stepper: Stepper) -> ResultRow:
    """How many parameters have gradients that are not finite, after a step."""
    named = stepper.policy.host.named_parameters()
    wrong = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
    note = f"not finite are {', '.join(wrong[:8])}" if wrong else None
    return _row(case, f"{side} nonfinite", float(len(wrong)), "parameters", bar=0.0, note=note)


def _row(case: HybridCase, metric: str, value: float, unit: str, **rest: Any) -> ResultRow:
    return ResultRow(bench="hybrid", case=case.name, metric=metric, unit=unit, value=value, **rest)
