"""Whole training steps beside dense ones: the grid, the policy update, the memory, the tree."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from forkpoint.bench.rows import ResultRow
from forkpoint.bench.shapes import SCALE_TINY, make_group
from forkpoint.bench.steps import (
    DENSE,
    GROUP,
    Deadline,
    Dense,
    Stepper,
    Timed,
    best_dense,
    cell_rows,
    repeats_for,
)
from forkpoint.errors import ConfigError
from forkpoint.policy import Policy
from forkpoint.rollouts import RolloutBatch
from forkpoint.traces import load_rollouts

SPLITS = ((2048, 10_240), (6144, 6144), (8192, 4096), (10_240, 2048))
COUNTS = (4, 8, 16, 32)
# Where sharing gains least: auto must not lose there.
SMALL = ((256, 2048, 2), (1024, 1024, 2), (2048, 10_240, 2), (256, 256, 8))


def step_grid(
    stepper: Stepper,
    deadline: Deadline,
    *,
    tiny: bool = False,
    counts: tuple[int, ...] = COUNTS,
    small: bool = True,
) -> Iterator[ResultRow]:
    """The grid of splits and counts, by the planner's choice, and where sharing gains least.

    One dense baseline a split; small cells alternate dense and shared.
    """
    scale = SCALE_TINY if tiny else 1
    cells = [(p, r, n) for p, r in SPLITS for n in counts]
    cells += [cell for cell in SMALL if small and cell not in cells]
    baselines: dict[tuple[int, int], tuple[Dense, Policy, RolloutBatch]] = {}
    for prompt, response, count in cells:
        p, r = max(2, prompt // scale), max(2, response // scale)
        case = f"{stepper.mode} {prompt}/{response} N={count}"
        if deadline.over(case):
            continue
        batch = make_group(p, [r] * count, vocab=stepper.vocab)
        policy = stepper.configured(memory_budget_bytes=stepper.budget_bytes)
        try:
            fresh = count <= 4 or (p, r) not in baselines
            if fresh:
                baselines[p, r] = best_dense(stepper, batch, repeats=2)
            dense, dense_policy, some = baselines[p, r]
            shared = _shared(stepper, policy, batch)
            if fresh:
                # Both again, in turn, so that neither has the warmer device.
                for _ in range(repeats_for(dense.timed.typical_ms + shared.typical_ms, most=3)):
                    stepper.repeat(dense_policy, some, repeats=1, into=dense.timed)
                    stepper.repeat(policy, batch, repeats=1, into=shared)
            # What was measured of four rollouts stands for as many as the cell has.
            dense = replace(dense, scale=count / len(some))
        except torch.OutOfMemoryError as error:
            yield _out_of_memory("step-grid", case, error)
            continue
        yield from cell_rows("step-grid", case, shared, dense)
        yield from _peak_prediction("step-grid", case, stepper, shared)


def _shared(stepper: Stepper, policy: Policy, batch: RolloutBatch) -> Timed:
    """A step once to warm up, and then as often as is affordable.

    One that takes long, of a policy that has run before, is not repeated.
    """
    warm = stepper.has_run(policy)
    first = stepper.step(policy, batch)
    repeats = repeats_for(first.typical_ms)
    if warm and repeats == 1 and first.typical_ms > 12_000:
        return first
    return stepper.repeat(policy, batch, repeats=repeats, into=Timed(first.plan))


def policy_update(
    stepper: Stepper, deadline: Deadline, *, name: str, tiny: bool = False
) -> Iterator[ResultRow]:
    """Update and log-prob pass of a group: 32 responses to 8,192 tokens, or 4 to 4,096 and 8,192.

    `name` is the model's shape: qwen3-4b gets the second kind.
    """
    scale = SCALE_TINY if tiny else 1
    rng = np.random.default_rng(42)
    ragged = [int(r) for r in rng.integers(131, 2048, 32)]
    if name == "qwen3-4b":
        # Contexts in all: the prompt is what is left of them.
        cells = [(c - 1024, [1024] * 4, f"context {c} n=4 R=1024") for c in (4096, 8192)]
    else:
        cells = [
            (8192, ragged, "P=8192 N=32 R~U(131,2048)"),
            (8192, [2048] * 32, "P=8192 N=32 R=2048"),
        ]
    for prompt, responses, label in cells:
        case = f"{name} {stepper.mode} {label}"
        if deadline.over(case):
            continue
        lengths = [max(2, r // scale) for r in responses]
        batch = make_group(prompt // scale, lengths, vocab=stepper.vocab)
        policy = stepper.configured(memory_budget_bytes=stepper.budget_bytes)
        dense, _, some = best_dense(stepper, batch, repeats=1, sample=8)
        shared = _shared(stepper, policy, batch)
        yield from cell_rows("policy-update", case, shared, dense)
        yield from _score_rows(stepper, case, batch, some, dense)


def _score_rows(
    stepper: Stepper, case: str, batch: RolloutBatch, some: RolloutBatch, dense: Dense
) -> Iterator[ResultRow]:
    """The pass for old or reference log-probs."""
    tokens = dense.timed.plan.max_row_tokens
    alone = stepper.configured(**DENSE, max_row_tokens=tokens)
    policy = stepper.configured(memory_budget_bytes=stepper.budget_bytes)
    for each, rollouts in ((alone, some), (policy, batch)):
        stepper.score(each, rollouts, repeats=1)
    plain = stepper.score(alone, some, repeats=2)
    shared = stepper.score(policy, batch, repeats=2)
    plan = shared.plan
    assert plan.shape is not None
    bound = plan.dense.forward_flops(plan.shape) / plan.shared.forward_flops(plan.shape)
    whole = plain.typical_ms * plan.dense.forward_flops(plan.shape)
    whole /= plain.plan.dense.forward_flops(plan.shape)
    for metric, value, unit in (
        ("shared log-probs", shared.typical_ms, "ms"),
        ("dense log-probs", whole, "ms"),
        ("log-probs speed-up", whole / shared.typical_ms, "x"),
    ):
        yield ResultRow(
            bench="policy-update",
            case=case,
            metric=metric,
            unit=unit,
            value=value,
            baseline="dense" if unit == "x" else None,
            bound=bound if unit == "x" else None,
        )


def memory(
    stepper: Stepper,
    deadline: Deadline,
    *,
    tiny: bool = False,
    count: int = 16,
    wave_tokens: int = 1,
) -> Iterator[ResultRow]:
    """Peaks and times of keep, offload and recompute beside dense, for the grid's four splits.

    No checkpointing and no chains on either side. A row below the prompt holds as many responses as
    fit in `wave_tokens`, and at least one, which is as published. On CUDA "B drained" is the second
    half of phase B: by then the copies out are through.
    """
    scale = SCALE_TINY if tiny else 1
    for prompt, response in SPLITS:
        p, r = max(2, prompt // scale), max(2, response // scale)
        batch = make_group(p, [r] * count, vocab=stepper.vocab)
        label = f"{stepper.mode} {prompt}/{response} N={count}"
        if deadline.over(label):
            continue
        alone = stepper.configured(**DENSE, max_row_tokens=p + r)
        one = batch.select([0, 1])
        stepper.step(alone, one)
        dense = stepper.step(alone, one)
        scaled = Dense(dense, count / 2, f"2 rollouts, scaled by {count / 2:.4g}")
        kept_ms = None
        for residency in ("keep", "recompute", "offload"):
            policy = stepper.configured(
                **GROUP,
                max_row_tokens=max(p, r),
                max_wave_tokens=max(1, wave_tokens // scale),
                residency=residency,
            )
            case = f"{label} {residency}"
            plan = policy.plan(batch)
            try:
                stepper.step(policy, batch, plan)
                shared = Timed(plan)
                peaks = _peaks(stepper, policy, batch, shared, repeats=2)
            except torch.OutOfMemoryError as error:
                yield _out_of_memory("memory", case, error)
                continue
            yield from cell_rows("memory", case, shared, scaled, shared_name=residency)
            kept_ms = shared.typical_ms if residency == "keep" else kept_ms
            if kept_ms is not None:
                yield _row("memory", case, "time over keep", shared.typical_ms / kept_ms, "1")
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
            yield _row("memory", case, f"offload {name}", getattr(offload, name), "bytes")
        for name in ("prefetched", "on_demand", "held_back"):
            yield _row("memory", case, f"offload {name}", getattr(offload, name), "storages")
    if dense.peak_bytes is None:
        return
    fixed = stepper.fixed_bytes
    yield _row("memory", case, "dense peak", dense.peak_bytes, "bytes")
    yield _row("memory", case, "fixed", fixed, "bytes")
    shape = shared.plan.shape
    assert shape is not None
    boundary = shape.boundary_bytes_per_token + shape.boundary_gradient_bytes_per_token
    share = boundary * shared.plan.arena_slots / (dense.peak_bytes - fixed)
    for phase, peak in peaks.items():
        yield _row("memory", case, f"peak of phase {phase}", peak, "bytes")
        yield _row(
            "memory",
            case,
            f"peak of phase {phase} over dense",
            (peak - fixed) / (dense.peak_bytes - fixed),
            "1",
            bound=response / (prompt + response) + share,
        )
        yield _row(
            "memory",
            case,
            f"whole peak of phase {phase} less than dense",
            1 - peak / dense.peak_bytes,
            "1",
        )
    yield from _peak_prediction("memory", case, stepper, shared)


def _peaks(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, timed: Timed, *, repeats: int
) -> dict[str, int]:
    """Time steps; the last one's peaks by phase, and of the second half of phase B as "B drained".

    To look at the peaks costs a call to the allocator a row, and no wait for the device.
    """
    if not stepper.cuda:
        stepper.repeat(policy, batch, repeats=repeats, into=timed)
        return {}
    parents = {timed.plan.row_names[row.index] for row in timed.plan.rows if row.children}
    seen: list[tuple[str, int]] = []
    phase = "A"

    def observe(event: str) -> None:
        nonlocal phase
        seen.append((phase, torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        kind, row = event.split(" ")
        phase = "B" if row not in parents else "A" if kind == "F" else "C"

    stepper.repeat(policy, batch, repeats=repeats - 1, into=timed)
    policy.observer = observe
    try:
        stepper.repeat(policy, batch, repeats=1, into=timed)
    finally:
        policy.observer = None
    seen.append((phase, torch.cuda.max_memory_allocated()))
    found = {p: max((b for q, b in seen[1:] if q == p), default=0) for p in "ABC"}
    waves = [b for q, b in seen[1:] if q == "B"]
    found["B drained"] = max(waves[len(waves) // 2 :], default=0)
    return {p: peak for p, peak in found.items() if peak}


def tree(
    stepper: Stepper,
    deadline: Deadline,
    *,
    file: Path,
    most_tokens: int,
    label: str,
    tiny: bool = False,
) -> Iterator[ResultRow]:
    """Real rollouts that fork, group by group, against the counted bound of their trees.

    `label` is the model's, for the rows. Groups whose rollouts have more than `most_tokens` in all
    are left out, and the note says how many; with the tiny model token ids are folded into its
    vocabulary.
    """
    rollouts = load_rollouts(file)
    if tiny:
        rollouts = [replace(r, token_ids=r.token_ids % stepper.vocab) for r in rollouts]
    batch = RolloutBatch(rollouts)
    groups = [batch.select(members.tolist()) for members in batch.groups()]
    fitting = [g for g in groups if g.logical_tokens <= most_tokens and g.trained_tokens]
    if not fitting:
        raise ConfigError(
            f"no group of {file} has at most {most_tokens} tokens; raise --most-tokens."
        )
    # Both sides with rows as long as memory allows.
    policy = stepper.configured(sharing="tree", memory_budget_bytes=stepper.budget_bytes)
    alone = stepper.configured(**DENSE, memory_budget_bytes=stepper.budget_bytes)
    dense_ms = shared_ms = dense_flops = shared_flops = 0.0
    used = 0
    for group in fitting:
        if deadline.over(f"group {used} of {file.name}"):
            break
        # A kernel may be compiled at the first lengths of a kind: each group twice.
        stepper.step(alone, group)
        stepper.step(policy, group)
        dense = stepper.step(alone, group)
        shared = stepper.step(policy, group)
        plan = shared.plan
        assert plan.shape is not None
        dense_ms += dense.typical_ms
        shared_ms += shared.typical_ms
        dense_flops += plan.dense.step_flops(plan.shape)
        shared_flops += plan.shared.step_flops(plan.shape)
        used += 1
    if not used:
        return
    case = f"{label} {stepper.mode} {file.name}"
    bound = dense_flops / shared_flops
    note = f"{used} of {len(groups)} groups, each a batch; at most {most_tokens} tokens a group"
    yield _row("tree", case, "dense step, sum", dense_ms, "ms", note=note)
    yield _row("tree", case, "shared step, sum", shared_ms, "ms", note=note)
    ratio = dense_ms / shared_ms
    yield _row("tree", case, "speed-up", ratio, "x", bound=bound, baseline="dense", note=note)
    yield _row("tree", case, "share of bound", ratio / bound, "1", bound=bound, note=note)


def _peak_prediction(bench: str, case: str, stepper: Stepper, timed: Timed) -> Iterator[ResultRow]:
    """The predicted peak with weights and gradients, beside the measured one."""
    plan = timed.plan
    if timed.peak_bytes is None or plan.predicted_ms is None or plan.predicted_peak_bytes is None:
        return
    predicted = plan.predicted_peak_bytes + stepper.fixed_bytes
    yield _row(bench, case, "predicted peak", predicted, "bytes", note=plan.rests_on)
    ratio = predicted / timed.peak_bytes
    yield _row(bench, case, "predicted / measured peak", ratio, "1", note=plan.rests_on)


def _out_of_memory(bench: str, case: str, error: BaseException) -> ResultRow:
    torch.cuda.empty_cache()
    return _row(bench, case, "out of memory", 1.0, "1", note=str(error)[:120])


def _row(bench: str, case: str, metric: str, value: float, unit: str, **more: object) -> ResultRow:
    return ResultRow(
        bench=bench,
        case=case,
        metric=metric,
        unit=unit,
        value=value,
        **more,  # type: ignore[arg-type]
    )
