"""Peaks of memory by activations and by phase, beside dense."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, make_group
from benchmarks.steps.cells import cell_row, cell_rows, out_of_memory, peak_prediction
from benchmarks.steps.options import Split, Steps
from benchmarks.steps.step_grid import chosen_splits
from benchmarks.steps.stepper import DENSE, GROUP, Dense, Stepper, Timed, repeats_for
from forkpoint.apps.cli.options import Count
from forkpoint.engine.timing import Event
from forkpoint.plan.program import LEAF, PHASES, PREFIX_FORWARD, phase_of
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Memory(Steps):
    """Measure peaks and times of keep, offload and recompute beside dense, for the grid's splits.

    Attributes:
        count: How many rollouts the prompt has.
        leaf_tokens: The most tokens in a row of responses, which holds at least one.
        splits: Prompt and response, of which several may be named. By default all.
    """

    NAME: ClassVar[str] = "memory"

    count: Count = 16
    leaf_tokens: Count = 1
    splits: tuple[Split, ...] = ()

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        return memory(
            self.stepper("llama3-8b"),
            deadline,
            tiny=self.tiny,
            count=self.count,
            leaf_tokens=self.leaf_tokens,
            splits=self.splits,
        )


def memory(
    stepper: Stepper,
    deadline: Deadline,
    *,
    tiny: bool = False,
    count: int = 16,
    leaf_tokens: int = 1,
    splits: tuple[str, ...] = (),
) -> Iterator[ResultRow]:
    """Peaks and times of keep, offload and recompute beside dense, for the grid's four splits.

    With `splits`, as 2048/10240, for those alone.

    No checkpointing and no chains on either side. A row below the prompt holds as many responses as
    fit in `leaf_tokens`, and at least one, which is as published. On CUDA "B drained" is the second
    half of phase leaf: by then the copies out are through.
    """
    scale = SCALE_TINY if tiny else 1
    for prompt, response in chosen_splits(splits):
        p, r = max(2, prompt // scale), max(2, response // scale)
        batch = make_group(p, [r] * count, vocab=stepper.vocab)
        label = f"{stepper.mode} {prompt}/{response} N={count}"
        if deadline.over(label):
            continue
        alone = stepper.configured(**DENSE, max_microbatch_tokens=p + r)
        one = batch.select([0, 1])
        stepper.step(alone, one)
        dense = stepper.step(alone, one)
        scaled = Dense(dense, len(one), p + r, count / len(one))
        kept_ms = None
        for activations in ("keep", "offload", "recompute"):
            policy = stepper.configured(
                **GROUP,
                max_microbatch_tokens=max(p, r),
                max_leaf_tokens=max(1, leaf_tokens // scale),
                activations=activations,
            )
            case = f"{label} {activations}"
            plan = policy.plan(batch)
            try:
                first_ms = stepper.step(policy, batch, plan).typical_ms
                shared = Timed(plan)
                # Of long steps the one whose peaks are looked at is enough.
                repeats = repeats_for(first_ms, budget_ms=6_000.0, most=2)
                peaks = _peaks(stepper, policy, batch, shared, repeats=repeats)
            except torch.OutOfMemoryError as error:
                yield out_of_memory("memory", case, error)
                continue
            yield from cell_rows("memory", case, shared, scaled, shared_name=activations)
            kept_ms = shared.typical_ms if activations == "keep" else kept_ms
            if kept_ms is not None:
                yield cell_row("memory", case, "time over keep", shared.typical_ms / kept_ms, "1")
            yield from _memory_rows(stepper, case, shared, dense, peaks, p, r)


def _memory_rows(
    stepper: Stepper,
    case: str,
    shared: Timed,
    dense: Timed,
    peaks: dict[str, int],
    prompt: int,
    response: int,
) -> Iterator[ResultRow]:
    offload = shared.stats.offload if shared.stats else None
    if offload is not None:
        for name in ("out_bytes", "back_bytes", "left_bytes", "host_bytes"):
            yield cell_row("memory", case, f"offload {name}", getattr(offload, name), "bytes")
        for name in ("prefetched", "on_demand", "held_back"):
            yield cell_row("memory", case, f"offload {name}", getattr(offload, name), "storages")
    if dense.peak_bytes is None:
        return
    fixed = stepper.fixed_bytes
    yield cell_row("memory", case, "dense peak", dense.peak_bytes, "bytes")
    yield cell_row("memory", case, "fixed", fixed, "bytes")
    shape = shared.plan.shape
    assert shape is not None
    boundary = shape.boundary_bytes_per_token + shape.boundary_gradient_bytes_per_token
    share = boundary * shared.plan.cache_tokens / (dense.peak_bytes - fixed)
    for phase, peak in peaks.items():
        yield cell_row("memory", case, f"peak of phase {phase}", peak, "bytes")
        yield cell_row(
            "memory",
            case,
            f"peak of phase {phase} over dense",
            (peak - fixed) / (dense.peak_bytes - fixed),
            "1",
            bound=response / (prompt + response) + share,
        )
        yield cell_row(
            "memory",
            case,
            f"whole peak of phase {phase} less than dense",
            1 - peak / dense.peak_bytes,
            "1",
        )
    yield from peak_prediction("memory", case, stepper, shared)


def _peaks(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, timed: Timed, *, repeats: int
) -> dict[str, int]:
    """Time steps; the last one's peaks by phase, and "leaf drained" of the second half of leaves.

    To look at the peaks costs a call to the allocator a row, and no wait for the device.
    """
    if not stepper.cuda:
        stepper.repeat(policy, batch, repeats=repeats, into=timed)
        return {}
    phases = {
        event: phase_of(i.operation, timed.plan.microbatches[i.microbatch])
        for event, i in zip(timed.plan.events(), timed.plan.program.instructions, strict=True)
    }
    seen: list[tuple[str, int]] = []
    phase = PREFIX_FORWARD

    def observe(event: Event) -> None:
        nonlocal phase
        seen.append((phase, torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        phase = phases[event.text]

    stepper.repeat(policy, batch, repeats=repeats - 1, into=timed)
    policy.observer = observe
    try:
        stepper.repeat(policy, batch, repeats=1, into=timed)
    finally:
        policy.observer = None
    seen.append((phase, torch.cuda.max_memory_allocated()))
    found = {p: max((b for q, b in seen[1:] if q == p), default=0) for p in PHASES}
    leaves = [b for q, b in seen[1:] if q == LEAF]
    found["leaf drained"] = max(leaves[len(leaves) // 2 :], default=0)
    return {p: peak for p, peak in found.items() if peak}
