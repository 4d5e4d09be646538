"""Optimizer steps of TRL's GRPOTrainer as users run it, of ours without sharing, and of ours.

Completions are given rather than sampled. Every step trains the same prompts and completions, so
that steps are repeats of each other but for the order in which TRL shuffles rows.
"""

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_model, sizes_of
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, check_groups, device_for
from benchmarks.steps.trl_task import Task, check_installed, make_task, make_trainer
from benchmarks.timing import Timing
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.config import Config
from forkpoint.errors import ConfigError

STOCK, NONE, SHARED = "stock", "none", "shared"
SIDES: dict[str, Config | None] = {SHARED: Config(), NONE: Config(sharing="none"), STOCK: None}
"""In the order in which they run: if the time is up, stock TRL is what is left out."""
LABELS = {SHARED: "forkpoint", NONE: "forkpoint, sharing none", STOCK: "TRL, sdpa"}
WARM_STEPS = {SHARED: 2, NONE: 2, STOCK: 1}
"""Steps that are not timed: ours compile in the first and allocate in the second."""
LEAST_SHARE = 0.9
FLOAT32_BAR = 1e-3
BFLOAT16_BAR = 1.5
"""Of the error of our gradients over that of stock TRL's, both in bfloat16 beside float32."""


@dataclass(frozen=True, kw_only=True)
class TrlUpdate(Benchmark):
    """Time GRPO steps of TRL's trainer beside ours, without generation, and take their peaks.

    Attributes:
        shape: Whose sizes the model has; weights are random.
        file: Rollouts whose prompts are taken, one of each group.
        prompts: Prompts of an optimizer step.
        completions: Completions of each prompt.
        tokens: Tokens of a completion.
        rows: TRL's per_device_train_batch_size: how many rows stock TRL runs at once.
        no_checkpointing: Set gradient_checkpointing=False, which TRL's default is not.
        iterations: TRL's num_iterations; with 2 every other step scores old log-probs.
        sides: Which trainers run: stock is TRL's own, none is ours without sharing.
        layers: Give the model fewer layers than its shape has.
        no_check: Compare no gradients beforehand.
        repeats: The most steps of each side that are timed.
        max_seconds: Time no more steps after so many seconds, each side having one.
        tiny: A tiny model and lengths divided by 64, on the CPU as well.
    """

    NAME: ClassVar[str] = "trl"

    shape: Literal["qwen3-1.7b", "qwen3-4b"] = "qwen3-1.7b"
    file: DisallowNone[
        Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: made up)")]
    ] = None
    prompts: Count = 4
    completions: Count = 8
    tokens: Count = 256
    rows: Count = 8
    no_checkpointing: Flag = False
    iterations: Count = 1
    sides: tuple[Literal["shared", "none", "stock"], ...] = (SHARED, NONE, STOCK)
    layers: Layers = None
    no_check: Flag = False
    repeats: Count = 3
    max_seconds: Seconds = 120.0
    tiny: Flag = False

    def check(self) -> None:
        check_at_least_one("layers", self.layers)
        for name in ("prompts", "completions", "rows", "iterations", "repeats"):
            check_at_least_one(name, getattr(self, name))
        if self.tokens < SCALE_TINY:
            raise ConfigError(f"tokens is {self.tokens}; it takes at least {SCALE_TINY}.")
        check_groups(self.prompts, self.completions, self.rows, "completions")
        if not self.sides:
            raise ConfigError("sides names none, so there is nothing to measure.")
        check_installed()
        device_for(self.NAME, tiny=self.tiny)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        del deadline  # each side has a share of the time instead
        begin = time.perf_counter()
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of rollout_func, which gives completions
        warnings.filterwarnings("ignore")
        if not self.no_check:
            yield from self._checked()
        task = self._task()
        names = [name for name in SIDES if name in self.sides]
        end = begin + (self.max_seconds or 1e9)
        case, found = self._case(task), {}
        for n, name in enumerate(names):
            left = (end - time.perf_counter()) / (len(names) - n)
            measured = self._run(name, task, left)
            if measured is None:
                yield cell_row(self.NAME, case, f"{LABELS[name]}: out of memory", 1.0, "1")
            else:
                found[name] = measured
        yield from self._rows(case, found)

    def _case(self, task: Task) -> str:
        lengths = sorted(map(len, task.prompts))
        parts = [
            "tiny" if self.tiny else self.shape,
            f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]}",
            f"{self.completions} of {len(task.completions[0][0])} each",
            "not checkpointed" if self.no_checkpointing else "checkpointed",
            *([f"{self.iterations} iterations"] if self.iterations > 1 else []),
            *([self.file.name] if self.file else []),
        ]
        return ", ".join(parts)

    def _task(self) -> Task:
        scale = SCALE_TINY if self.tiny else 1
        return make_task(
            self.file,
            prompts=self.prompts,
            completions=self.completions,
            tokens=self.tokens // scale,
            vocab=_vocabulary(self),
            length=7168 // scale,
        )

    def _run(self, name: str, task: Task, seconds: float) -> "Measured | None":
        warm = WARM_STEPS[name] * self.iterations
        with tempfile.TemporaryDirectory() as folder:
            trainer, watch = make_trainer(
                _model(self, torch.bfloat16),
                task,
                folder,
                forkpoint=SIDES[name],
                watch_seconds=seconds,
                least=warm + self.iterations,
                per_device_train_batch_size=self.rows,
                gradient_checkpointing=not self.no_checkpointing,
                num_iterations=self.iterations,
                bf16=torch.cuda.is_available(),
                max_steps=warm + self.repeats * self.iterations,
            )
            try:
                trainer.train()
            except torch.OutOfMemoryError:
                out = True
            else:
                out = False
        spent, plan = trainer.spent, None
        if out:
            del trainer, watch
            gc.collect()
            torch.cuda.empty_cache()
            return None
        if name != STOCK:
            plan = trainer.sharing.last_plan
        times = {
            part: self._timing(getattr(spent, part)[warm:])
            for part in ("update", "scores", "optimizer", "whole")
        }
        del trainer, watch
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return Measured(times, spent.peak_bytes, plan)

    def _timing(self, ms: list[float]) -> Timing:
        """Of a step: where a generation is trained several times, their mean."""
        each = self.iterations
        return Timing([sum(ms[n : n + each]) / each for n in range(0, len(ms) - each + 1, each)])

    def _rows(self, case: str, found: "dict[str, Measured]") -> Iterator[ResultRow]:
        row = partial(cell_row, self.NAME, case)
        rows = f"per_device_train_batch_size={self.rows}"
        for name, one in found.items():
            label = LABELS[name]
            for part, metric in (
                ("update", "update"),
                ("scores", "scores"),
                ("optimizer", "optimizer"),
                ("whole", "step without generation"),
            ):
                timing = one.times[part]
                if part == "scores" and not any(timing.samples_ms):
                    continue
                note = f"{len(timing.samples_ms)} steps, {rows}"
                if one.plan is not None and part == "update":
                    plan = one.plan
                    note += (
                        f"; {plan.sharing} + {plan.boundary}, {plan.computed_tokens} of "
                        f"{plan.logical_tokens} tokens, {len(plan.microbatches)} microbatches of "
                        f"at most {plan.max_microbatch_tokens}"
                    )
                yield row(
                    f"{label}: {metric}",
                    timing.p50,
                    "ms",
                    p20=timing.quantile(0.2),
                    p80=timing.quantile(0.8),
                    note=note,
                )
            if one.peak_bytes is not None:
                yield row(f"{label}: peak", one.peak_bytes, "bytes")
        ours = found.get(SHARED)
        if ours is None or ours.plan is None:
            return
        bound = ours.plan.bound
        for name in (NONE, STOCK):
            if name not in found:
                continue
            for part, metric in (("update", "update"), ("whole", "step without generation")):
                ratio = found[name].times[part].p50 / ours.times[part].p50
                # Neither leaves rollouts out, for TRL's metrics read log-probs of all.
                beside = {"baseline": LABELS[name], "baseline_leaves_out": False, "bound": bound}
                yield row(f"{metric}: faster", ratio, "x", **beside)
                if name == NONE and part == "update":
                    # A bar is the most that a value may be.
                    yield row(
                        "update: bound over faster",
                        bound / ratio,
                        "1",
                        baseline=LABELS[name],
                        bound=bound,
                        bar=None if self.tiny else 1 / LEAST_SHARE,
                    )

    def _checked(self) -> Iterator[ResultRow]:
        """Gradients of stock and ours at a small size, beside stock's in float32."""
        small = make_task(
            None, prompts=2, completions=4, tokens=32, vocab=_vocabulary(self), length=300
        )
        cuda = torch.cuda.is_available()
        found: dict[str, dict[str, Tensor]] = {}
        for name, side, dtype in (
            ("expected", STOCK, torch.float32),
            ("float32", SHARED, torch.float32),
            ("stock", STOCK, torch.bfloat16),
            ("ours", SHARED, torch.bfloat16),
        ):
            if dtype is torch.bfloat16 and not cuda:
                continue
            config = SIDES[side]
            if config is not None and dtype is torch.float32:
                config = Config(compile_blocks=False)
            with tempfile.TemporaryDirectory() as folder:
                trainer, watch = make_trainer(
                    _model(self, dtype, layers=2),
                    small,
                    folder,
                    forkpoint=config,
                    per_device_train_batch_size=4,
                    max_steps=1,
                    max_grad_norm=0.0,
                    optim="sgd",
                    bf16=dtype is torch.bfloat16,
                )
                watch.gradients = found[name] = {}
                torch.manual_seed(0)
                trainer.train()
        expected = found.pop("expected")
        apart = {name: _apart(one, expected) for name, one in found.items()}
        case = "gradients, 2 layers, 2 prompts of 300 tokens with 4 completions of 32"
        row = partial(cell_row, self.NAME, case)
        bar = FLOAT32_BAR
        yield row("apart from TRL's, float32", apart["float32"], "1", bar=bar)
        if cuda:
            yield row("TRL in bfloat16 apart from float32", apart["stock"], "1")
            yield row("ours in bfloat16 apart from float32", apart["ours"], "1")
            over = apart["ours"] / apart["stock"]
            yield row("error over TRL's, bfloat16", over, "1", bar=BFLOAT16_BAR)


@dataclass(frozen=True)
class Measured:
    """Steps of one side."""

    times: dict[str, Timing]
    peak_bytes: int | None
    plan: Any
    """The plan of the last step; None of stock TRL."""


def _model(options: TrlUpdate, dtype: torch.dtype, layers: int | None = None) -> Any:
    device = device_for(options.NAME, tiny=options.tiny)
    return make_model(
        options.shape,
        device,
        dtype=dtype if device.type == "cuda" else torch.float32,
        layers=layers or options.layers,
        tiny=options.tiny,
    )


def _vocabulary(options: TrlUpdate) -> int:
    return sizes_of(options.shape, tiny=options.tiny)["vocab_size"]


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative difference of gradients over all parameters."""
    squares = sum(float((found[k] - expected[k]).double().square().sum()) for k in expected)
    return (squares / sum(float(x.double().square().sum()) for x in expected.values())) ** 0.5
