"""Steps of a mixture of experts with and without router losses, beside dense.

One group of rollouts that share a prompt, random tokens and random weights in the shapes of
Qwen3-30B-A3B, with as many of its layers as fit together with their gradients. Dense is the plan
that shares nothing, with the rows that are fastest for it; some rollouts are run and scaled by
counted FLOPs. Beside a router loss dense has that loss too, for each rollout by itself, which takes
no pass before it. Experts, kernels, head and compilation are the same on both sides. Gradients are
compared first, with few of the layers (steps/moe_checks.py).
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, SHAPES, checkpoint, make_group, make_model
from benchmarks.steps.cells import cell_row, cell_rows, out_of_memory
from benchmarks.steps.moe_checks import check_rows
from benchmarks.steps.moe_experts import Experts, layers_that_fit, share_that_is_counted
from benchmarks.steps.options import Layers, check_at_least_one
from benchmarks.steps.stepper import (
    Dense,
    RouterArguments,
    Stepper,
    Timed,
    best_dense,
)
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.losses import RouterLoss
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch

SHAPE = "qwen3-30b-a3b"
LOAD_BALANCING = 0.001
"""The coefficient in this family's configurations; times do not depend on it."""
LEAST_SHARE = 0.15
"""Of the memory that is left: a step that fails with less is not planned again."""
SAMPLE = 2
"""Rollouts that are run densely, or as many as a row of short ones holds."""
Mode = Literal["none", "rollout", "batch", "batch-pass", "rollout-pass"]
PUBLISHED = {"P8192-R2048-N32": 3.82}
"""Speed-ups that were published for these sizes, of the whole model on 16 GPUs."""


@dataclass(frozen=True)
class MoeCase:
    """One group: `size` responses of `response` tokens to a prompt of `prompt` tokens."""

    prompt: int
    response: int
    size: int

    @property
    def name(self) -> str:
        return f"P{self.prompt}-R{self.response}-N{self.size}"

    def batch(self, vocab: int, scale: int) -> RolloutBatch:
        """Its rollouts, of lengths divided by `scale`."""
        prompt, response = (max(2, tokens // scale) for tokens in (self.prompt, self.response))
        return make_group(prompt, [response] * self.size, vocab=vocab)


CASES = (
    MoeCase(8192, 2048, 32),
    MoeCase(4096, 4096, 8),
    MoeCase(4096, 4096, 16),
    MoeCase(2048, 2048, 8),
    MoeCase(2048, 2048, 16),
)


@dataclass(frozen=True, kw_only=True)
class Moe(Benchmark):
    """Time steps in the shapes of Qwen3-30B-A3B, a mixture of experts, with router losses.

    Attributes:
        max_seconds: Begin nothing new after so many seconds; what is left out is named.
        only: Parts of the names of cases to measure, such as N32; by default every case.
        modes: Router losses to measure: none; rollout and batch, from counts of a score pass; and
            the same with a pass of their own, which the bound then counts.
        layers: How many layers the model has; by default as many as fit with gradients and
            activations.
        experts: The implementation of experts' products, on both sides.
        blocks: Whether decoder blocks are compiled, dense and shared alike.
        checkpointed: Let blocks keep only their inputs, dense and shared alike.
        repeats: How often a step is timed after a first time.
        microbatch: The most tokens of a shared microbatch; by default the planner chooses.
        dense_microbatch: The most tokens of the dense microbatches that are tried.
        unchecked: Leave out the comparison of gradients, and a first step's own on a sample.
        tiny: A tiny model and lengths divided by 64, to try the command out, on a CPU as well.
    """

    NAME: ClassVar[str] = "moe"

    max_seconds: Seconds = 540.0
    only: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ("none", "rollout", "batch", "batch-pass")
    layers: Layers = None
    experts: Experts = "grouped_mm"
    blocks: Literal["compiled", "eager"] = "compiled"
    checkpointed: Flag = False
    repeats: Count = 2
    microbatch: Layers = None
    dense_microbatch: Count = 32_768
    unchecked: Flag = False
    tiny: Flag = False

    def check(self) -> None:
        for name in ("layers", "repeats", "microbatch", "dense_microbatch"):
            check_at_least_one(name, getattr(self, name))
        if not self._cases():
            names = ", ".join(case.name for case in CASES)
            raise ConfigError(
                f"no case has {' or '.join(self.only)} in its name; there are {names}."
            )
        if not torch.cuda.is_available() and not self.tiny:
            raise ConfigError(
                f"moe measures steps of {SHAPE} on a GPU, and torch sees no CUDA device here; run "
                "it on a machine with one, or try it out with --tiny."
            )

    def _cases(self) -> list[MoeCase]:
        return [c for c in CASES if not self.only or any(part in c.name for part in self.only)]

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def _shape(self) -> str:
        return "tiny-moe" if self.tiny else SHAPE

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        if not self.unchecked and not deadline.over("comparison of gradients"):
            yield from check_rows(self._shape, self._device, experts=self.experts)
            _free()
        model, layers = self._model()
        stepper = Stepper(
            model,
            compile_blocks=None if self.blocks == "compiled" else False,
            self_check=not self.unchecked,
        )
        note = f"of {SHAPES[self._shape]['num_hidden_layers']}; experts by {self.experts}"
        figure = partial(cell_row, self.NAME, self._shape)
        yield figure("layers", layers, "layers", note=note)
        yield figure("weights and gradients", stepper.fixed_bytes, "bytes")
        for case in self._cases():
            if not deadline.over(case.name):
                yield from self._case(case, stepper, layers, deadline)

    def _model(self) -> tuple[PreTrainedModel, int]:
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        layers = self.layers or layers_that_fit(
            SHAPES[self._shape], self._device, checkpointed=self.checkpointed
        )
        model = make_model(self._shape, self._device, dtype=dtype, layers=layers)
        model.set_experts_implementation(self.experts)
        if self.checkpointed:
            checkpoint(model)
        return model, layers

    def _case(
        self, case: MoeCase, stepper: Stepper, layers: int, deadline: Deadline
    ) -> Iterator[ResultRow]:
        scale = SCALE_TINY if self.tiny else 1
        batch = case.batch(stepper.vocab, scale)
        kept = ", checkpointed" if self.checkpointed else ""
        prefix = f"{stepper.mode} {layers} layers{kept} {case.name}"
        try:
            stepper.routers = {}
            plain, policy, some = best_dense(
                stepper,
                batch,
                repeats=1,
                sample=SAMPLE,
                row_tokens=self.dense_microbatch // scale,
            )
        except torch.OutOfMemoryError as error:
            yield out_of_memory(self.NAME, prefix, error)
            return
        routed: Dense | None = None
        for mode in self.modes:
            name = f"{prefix} {mode}"
            if deadline.over(name):
                continue
            try:
                if mode == "none":
                    dense, arguments = plain, RouterArguments()
                else:
                    routed = routed or _dense_with_router(stepper, plain, policy, batch, some)
                    dense, arguments = routed, _rollout_by_itself()
                side = _Side(stepper, policy, some, dense, arguments)
                yield from self._mode(name, mode, side, batch)
                if case.name in PUBLISHED:
                    note = "of the whole model, on 16 GPUs of another kind"
                    yield cell_row(
                        self.NAME, name, "published speed-up", PUBLISHED[case.name], "x", note=note
                    )
            except torch.OutOfMemoryError as error:
                yield out_of_memory(self.NAME, name, error)
        stepper.routers = {}
        _free()

    def _policy(self, stepper: Stepper, share: float) -> Policy:
        """How shared steps are planned, within a share of the memory that is left."""
        budget = stepper.budget_bytes
        return stepper.configured(
            sharing="group",
            memory_budget=None if budget is None else int(budget * share),
            max_microbatch_tokens=self.microbatch,
        )

    def _first(
        self, stepper: Stepper, share: float, mode: Mode, batch: RolloutBatch
    ) -> tuple[Policy, RouterArguments, float | None, Timed] | None:
        """A first shared step and what it takes; None where memory ran out, and may suffice for
        smaller microbatches."""
        policy = self._policy(stepper, share)
        try:
            stepper.routers = {}
            arguments, score_ms = shared_arguments(stepper, policy, batch, mode)
            stepper.routers = arguments
            return policy, arguments, score_ms, stepper.step(policy, batch)
        except torch.OutOfMemoryError:
            if share < LEAST_SHARE:
                raise
        _free()
        return None

    def _mode(
        self, case: str, mode: Mode, side: "_Side", batch: RolloutBatch
    ) -> Iterator[ResultRow]:
        stepper, figure = side.stepper, partial(cell_row, self.NAME, case)
        share, attempts = share_that_is_counted(stepper), 0
        while (found := self._first(stepper, share, mode, batch)) is None:
            attempts, share = attempts + 1, 0.7 * share
            yield figure("planned again, memory ran out", attempts, "times")
        policy, arguments, score_ms, warm = found
        shared = Timed(warm.plan, planning_ms=warm.planning_ms)
        # In turn, so that neither has the warmer device.
        for _ in range(self.repeats):
            stepper.routers = side.arguments
            stepper.repeat(side.policy, side.some, repeats=1, into=side.dense.timed)
            stepper.routers = arguments
            stepper.repeat(policy, batch, repeats=1, into=shared)
        yield from cell_rows(self.NAME, case, shared, side.dense, bound=counted_bound(shared))
        yield figure("microbatches", len(shared.plan.microbatches), "microbatches")
        if score_ms is not None:
            yield figure("score pass", score_ms, "ms", note="gives the counts; not in the step")
        if shared.plan.counts_first:
            yield figure("bound without the pass", shared.plan.bound, "x")
        assert shared.stats is not None
        if shared.stats.router_loss is not None:
            yield figure("router loss", shared.stats.router_loss, "1")
        named = stepper.policy.host.named_parameters()
        wrong = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
        note = f"not finite are {', '.join(wrong[:8])}" if wrong else None
        yield figure("shared nonfinite", len(wrong), "parameters", bar=0.0, note=note)


@dataclass(frozen=True)
class _Side:
    """The dense side of a mode."""

    stepper: Stepper
    policy: Policy
    some: RolloutBatch
    dense: Dense
    arguments: RouterArguments


def _rollout_by_itself() -> RouterArguments:
    return {"router": RouterLoss(load_balancing=LOAD_BALANCING, scope="rollout")}


def _dense_with_router(
    stepper: Stepper, plain: Dense, policy: Policy, batch: RolloutBatch, some: RolloutBatch
) -> Dense:
    """Dense steps of the rows that were fastest without a router loss, with one."""
    stepper.routers = _rollout_by_itself()
    warm = stepper.step(policy, some)
    timed = stepper.repeat(policy, some, repeats=1, into=Timed(warm.plan))
    assert not timed.plan.counts_first, "a rollout lies in several rows"
    whole = policy.plan(batch, **stepper.routers)
    assert whole.shape is not None
    scale = whole.dense.step_flops(whole.shape) / timed.plan.dense.step_flops(whole.shape)
    return replace(plain, timed=timed, scale=scale)


def shared_arguments(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, mode: Mode
) -> tuple[RouterArguments, float | None]:
    """The router's arguments of a mode, and milliseconds of the score pass that gave counts."""
    if mode == "none":
        return {}, None
    single = not mode.startswith("rollout")
    router = RouterLoss(load_balancing=LOAD_BALANCING, scope="batch" if single else "rollout")
    if mode.endswith("pass"):
        return {"router": router}, None
    elapsed: list[float] = []
    counts = None
    # The first one compiles and plans.
    for _ in range(2):
        begin = time.perf_counter()
        scores = policy.score(batch, router=router)
        counts = scores.expert_counts if single else scores.rollout_expert_counts
        if stepper.cuda:
            torch.cuda.synchronize()
        elapsed.append((time.perf_counter() - begin) * 1e3)
    assert counts is not None
    return {"router": router, "router_counts": counts}, elapsed[-1]


def counted_bound(timed: Timed) -> float:
    """The plan's bound; with a pass of scores in the step its forwards count as well."""
    plan, shape = timed.plan, timed.plan.shape
    if not plan.counts_first:
        return plan.bound
    assert shape is not None
    runs = plan.shared.step_flops(shape) + plan.shared.forward_flops(shape)
    return plan.dense.step_flops(shape) / runs


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
