"""The default plan beside dense training and every other plan, on rollouts of several kinds."""

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, make_group, read_rollouts
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Steps, check_at_least_one
from benchmarks.steps.stepper import Stepper, Timed
from benchmarks.steps.tree import with_advantages
from benchmarks.timing import Timing, time_of_loop
from forkpoint.config import AUTO
from forkpoint.errors import PlanError
from forkpoint.losses import GRPO
from forkpoint.plan import Plan
from forkpoint.plan.builder import BOUNDARIES, SHARINGS
from forkpoint.plan.pricing.calibration import FOLDER_VARIABLE
from forkpoint.rollouts.batch import RolloutBatch

Load = Literal["airline", "rag", "gsm8k-8", "gsm8k-64", "long"]
LOADS: tuple[Load, ...] = ("airline", "rag", "gsm8k-8", "gsm8k-64", "long")
GROUPS = 5
SEED = 0
SLOWER_THAN_DENSE = 1 / 0.99
SLOWER_THAN_BEST = 1 / 0.97
WITHIN = 0.1
MOST_BEYOND = 0.1
"""Share of plans whose predicted time may be off by more than WITHIN."""


@dataclass
class Found:
    """Figures of all batches."""

    beyond: list[bool] = field(default_factory=list)
    """For each plan, whether its predicted time is off by more than WITHIN."""
    loop_ms: list[float] = field(default_factory=list)
    """For each repeat, the time of a loop of the host after it."""


@dataclass(frozen=True, kw_only=True)
class Defaults(Steps):
    """Compare the default plan with forkpoint's dense plan and with other plans, in one process.

    The device is measured anew, as at a policy's first plan on a fresh machine. Repeats of plans
    are timed in turn. Options keep a call short: one model and a few loads each.

    Attributes:
        model: The published model with these sizes; weights are random.
        loads: Five groups of airline.jsonl or rag.jsonl, a batch each; 32 prompts of 200 tokens
            with 8 or 64 responses of 300; one prompt of 8,192 with 32 responses of 2,048.
        plans: The other plans that are timed: all, or the one with the shortest predicted time.
        folder: Where airline.jsonl and rag.jsonl lie.
        repeats: How often each plan is timed.
    """

    NAME: ClassVar[str] = "defaults"

    model: Literal["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama3-8b"] = "qwen3-1.7b"
    loads: tuple[Load, ...] = LOADS
    plans: Literal["all", "best"] = "all"
    folder: Path = Path("shared/data")
    repeats: int = 5

    def check(self) -> None:
        super().check()
        check_at_least_one("repeats", self.repeats)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        loads = [each for load in self.loads for each in self._batches(load)]
        with tempfile.TemporaryDirectory() as folder:
            os.environ[FOLDER_VARIABLE] = folder
            stepper = self.stepper(
                self.model, memory_budget=AUTO, checkpointing=AUTO, calibration=AUTO
            )
            yield from self._first_steps(stepper, loads[0][1])
            found = Found()
            for name, batch in loads:
                if deadline.over(name):
                    continue
                yield from self._compare(stepper, f"{self.model} {name}", batch, found)
            if found.beyond:
                yield cell_row(
                    self.NAME,
                    self.model,
                    "plans predicted more than 10% off",
                    sum(found.beyond) / len(found.beyond),
                    "1",
                    bar=MOST_BEYOND,
                    note=f"of {len(found.beyond)}",
                )
            if found.loop_ms:
                loop = Timing(found.loop_ms)
                slow, fast = loop.quantile(0.9), loop.quantile(0.1)
                yield cell_row(
                    self.NAME,
                    self.model,
                    "fixed loop of the host",
                    loop.p50,
                    "ms",
                    p20=fast,
                    p80=slow,
                    note="its 10th and 90th percentiles, between repeats",
                )

    def _batches(self, load: Load) -> Iterator[tuple[str, RolloutBatch]]:
        scale = SCALE_TINY if self.tiny else 1
        vocab = 512 if self.tiny else 100_000
        if load == "long":
            yield load, make_group(8192 // scale, [2048 // scale] * 32, vocab=vocab)
        elif load in ("gsm8k-8", "gsm8k-64"):
            responses = [max(2, 300 // scale)] * int(load.partition("-")[2])
            groups = [
                make_group(max(2, 200 // scale), responses, vocab=vocab, seed=n, group=str(n))
                for n in range(32)
            ]
            rollouts = [rollout for group in groups for rollout in group]
            yield load, RolloutBatch([replace(rollout, rollout_id=None) for rollout in rollouts])
        else:
            file = self.folder / f"{load}.jsonl"
            batch = RolloutBatch(read_rollouts(file, vocab=vocab, tiny=self.tiny))
            members = batch.groups()
            drawn = np.random.default_rng(SEED).choice(len(members), GROUPS, replace=False)
            for number in sorted(drawn):
                group = batch.select(members[number].tolist())
                yield f"{load} {number}", with_advantages(group, seed=int(number))

    def _first_steps(self, stepper: Stepper, batch: RolloutBatch) -> Iterator[ResultRow]:
        """Times until the first and the second step are done, measurement and compilation in."""
        begin = time.perf_counter()
        policy = stepper.policy
        policy.plan(batch)
        found = policy.model_state.calibration(policy.host, policy.config)
        row = [("first plan", time.perf_counter() - begin)]
        for step in ("first step done", "second step done"):
            policy.forward_backward(batch, GRPO())
            if stepper.cuda:
                torch.cuda.synchronize()
            row.append((step, time.perf_counter() - begin))
        if found is not None:
            row.append(("of it measuring", found.seconds - found.first_seconds))
            row.append(("of it first runs", found.first_seconds))
            found.save(self.path.with_suffix(".calibration.json"))
        for metric, seconds in row:
            yield cell_row(self.NAME, self.model, metric, seconds, "s")

    def _compare(
        self, stepper: Stepper, case: str, batch: RolloutBatch, found: Found
    ) -> Iterator[ResultRow]:
        plans = dict(self._plans(stepper, batch))
        policy = stepper.policy
        for timed in plans.values():  # kernels for new lengths are compiled in the first run
            stepper.step(policy, batch, timed.plan)
        gc.collect()  # compiling leaves garbage, which Python would collect once, in 0.5 s
        for _ in range(self.repeats):
            for timed in plans.values():
                stepper.repeat(policy, batch, repeats=1, into=timed)
                found.loop_ms.append(time_of_loop())
        for name, timed in plans.items():
            plan = timed.plan
            how = f"{plan.sharing} + {plan.boundary}, {len(plan.microbatches)} microbatches"
            how += f", {timed.alloc_retries} allocator retries" if timed.alloc_retries else ""
            least, most = timed.quantile(0), timed.quantile(1)
            yield cell_row(
                self.NAME, case, name, timed.typical_ms, "ms", p20=least, p80=most, note=how
            )
            if plan.predicted_ms is not None:
                ratio = plan.predicted_ms / timed.typical_ms
                found.beyond.append(abs(ratio - 1) > WITHIN)
                yield cell_row(self.NAME, case, f"{name}, predicted / measured", ratio, "1")
        default = plans["default"].typical_ms
        best = min(timed.typical_ms for timed in plans.values())
        # Of the plan that shares most: the default may share less, or nothing.
        bound = max(timed.plan.bound for timed in plans.values())
        for metric, other, bar in (
            ("default over dense", plans["none"].typical_ms, SLOWER_THAN_DENSE),
            ("default over the best", best, SLOWER_THAN_BEST),
        ):
            yield cell_row(
                self.NAME,
                case,
                metric,
                default / other,
                "1",
                bar=None if self.tiny else bar,
                bound=bound,
            )

    def _plans(self, stepper: Stepper, batch: RolloutBatch) -> Iterator[tuple[str, Timed]]:
        default = stepper.planned(stepper.policy, batch)
        yield "default", default
        yield "none", stepper.planned(stepper.configured(sharing="none"), batch)
        others: list[tuple[str, Timed]] = []
        seen = {_microbatches(default.plan)}
        for sharing, boundary in product(SHARINGS[1:], BOUNDARIES):
            policy = stepper.configured(sharing=sharing, boundary=boundary)
            try:
                timed = stepper.planned(policy, batch)
            except PlanError:
                continue
            made = _microbatches(timed.plan)
            if timed.plan.fits and made not in seen:
                others.append((f"{sharing} + {boundary}", timed))
                seen.add(made)
        if self.plans == "best":
            others = sorted(others, key=lambda each: each[1].plan.cost)[:1]
        yield from others


def _microbatches(plan: Plan) -> tuple[object, ...]:
    """The same for plans that run the same."""
    kept = ((m.activations, m.checkpointing, m.keeps_logits) for m in plan.microbatches)
    return tuple((m.parent, m.segments, m.tokens) for m in plan.microbatches), tuple(kept)
