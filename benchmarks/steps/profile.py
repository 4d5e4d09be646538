"""Where the device time of a training step goes, dense beside shared, by kinds of kernels.

Dense is two of the cell's rollouts, one a row, and the same with one label each, which tells the
head's share. Each side runs twice to warm up, then once by the clock and once in the profiler. The
time of the shared step with every kind of work at dense rates stands beside its measured time
(steps/dense_rates.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from benchmarks.kernel_kinds import by_kind
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from benchmarks.shapes import make_group, make_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.dense_rates import ATTENTION, Amounts, at_dense_rates
from benchmarks.steps.options import Layers, check_at_least_one
from benchmarks.steps.plan_variants import Prices, ShapeName, cell_numbers
from benchmarks.steps.stepper import DENSE, GROUP, Stepper
from forkpoint.apps.cli.options import Count
from forkpoint.plan.plan import Plan
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch

FORM = "prompt/response/count[/leaf tokens]"
KINDS = {
    ATTENTION: r"flash|fmha|attention|sum_parts|cudnn",
    "matrix products": r"gemm|nvjet|cutlass|xmma|wgmma",
    "fused elementwise": r"^triton|_kernel$",
    "copies": r"memcpy|copy_kernel",
    "fills": r"memset|fill",
    "additions": r"add",
}


def profiled(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, longest: int
) -> tuple[Plan, float, dict[str, float]]:
    """The plan, milliseconds of a step by the clock, and of its kernels by kind."""
    plan = policy.plan(batch)
    for _ in range(2):
        stepper.step(policy, batch, plan)
    wall_ms = stepper.step(policy, batch, plan).typical_ms
    activities = [torch.profiler.ProfilerActivity.CUDA]
    if not stepper.cuda:
        activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        stepper.step(policy, batch, plan)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events[:longest]:
        ms = event.self_device_time_total / 1e3
        print(f"{ms:10.2f} ms {event.count:6d}x {event.key[:100]}")
    return plan, wall_ms, {kind: found.us / 1e3 for kind, found in by_kind(events, KINDS).items()}


def one_label_each(batch: RolloutBatch) -> RolloutBatch:
    """The same tokens, trained on the last of each rollout alone."""
    last = [np.arange(len(r.token_ids)) == len(r.token_ids) - 1 for r in batch]
    return RolloutBatch(replace(r, loss_mask=m) for r, m in zip(batch, last, strict=True))


def profile_cell(stepper: Stepper, shape: str, cell: str, longest: int) -> Iterator[ResultRow]:
    """The rows of one cell: dense, dense with a label each, shared."""
    prompt, response, count, *wave = cell_numbers(cell, "cells", FORM)
    batch = make_group(prompt, [response] * count, vocab=stepper.vocab)
    some = batch.select([0, 1])
    dense = stepper.configured(**DENSE, max_microbatch_tokens=prompt + response)
    shared = stepper.configured(memory_budget=stepper.budget_bytes)
    if wave:
        shared = stepper.configured(
            **GROUP, max_microbatch_tokens=max(prompt, response, *wave), max_leaf_tokens=wave[0]
        )
    sides = {
        "dense, 2 rollouts": (dense, some),
        "dense, 2 rollouts, a label each": (dense, one_label_each(some)),
        "shared": (shared, batch),
    }
    found = {}
    for name, (policy, rollouts) in sides.items():
        plan, wall_ms, spent = profiled(stepper, policy, rollouts, longest)
        found[name] = plan, wall_ms, Amounts.of(plan), spent
        figure = partial(cell_row, ProfileStep.NAME, f"{shape} {cell}, {name}")
        yield figure("step", wall_ms, "ms")
        yield figure("device", sum(spent.values()), "ms")
        for kind, ms in spent.items():
            yield figure(kind, ms, "ms")
        if name == "shared" and stepper.cuda:  # a CPU has no device time to compare
            (_, dense_ms, *full), (_, _, *few) = list(found.values())[:2]
            expected = at_dense_rates(tuple(full), tuple(few), found[name][2])
            for kind, ms in expected.items():
                yield figure(f"{kind} at dense rates", ms, "ms")
            device_ms = sum(expected.values())
            speed_up = sum(full[1].values()) * count / 2 / device_ms
            yield figure("device at dense rates", device_ms, "ms")
            yield figure("speed-up at dense rates", speed_up, "x", bound=plan.bound)
            yield figure("speed-up", dense_ms * count / 2 / wall_ms, "x", bound=plan.bound)


@dataclass(frozen=True, kw_only=True)
class ProfileStep(Benchmark):
    """Profile a training step, dense beside shared, by kinds of kernels.

    Attributes:
        shape: Whose sizes the model has.
        layers: Give the model fewer layers than its shape has.
        cells: Prompt, response and number of responses, as 10240/2048/8, planned as step-grid plans
            it; with /tokens after that, the prompt has a row of its own and leaves that many.
        calibration: A file that forkpoint calibrate wrote, by which plans are priced.
        longest: How many of the longest kernels are printed.
    """

    NAME: ClassVar[str] = "profile-step"

    shape: ShapeName = "llama3-8b"
    layers: Layers = None
    cells: tuple[str, ...] = ("10240/2048/8",)
    calibration: Prices = None
    longest: Count = 20

    def check(self) -> None:
        check_at_least_one("layers", self.layers)
        for cell in self.cells:
            cell_numbers(cell, "cells", FORM)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = make_model(self.shape, device, layers=self.layers)
        stepper = Stepper(model, calibration=self.calibration)
        longest = 0 if self.json else self.longest
        for cell in self.cells:
            if not deadline.over(cell):
                yield from profile_cell(stepper, self.shape, cell, longest)
