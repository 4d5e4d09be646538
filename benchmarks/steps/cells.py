"""Rows of figures of one cell: a step of a workload, beside dense and what was predicted."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.rows import ResultRow
from benchmarks.steps.stepper import Dense, Stepper, Timed


def cell_row(bench: str, case: str, metric: str, value: float, unit: str, **more: Any) -> ResultRow:
    return ResultRow(bench=bench, case=case, metric=metric, unit=unit, value=value, **more)


def cell_rows(
    stepper: Stepper, bench: str, case: str, shared: Timed, dense: Dense, *, bound: float
) -> Iterator[ResultRow]:
    """All figures of one cell, with the counted bound of its speed-up."""
    plan = shared.plan
    assert plan.shape is not None
    row = partial(cell_row, bench, case)
    how = (
        f"{plan.sharing} + {plan.boundary}, {len(plan.microbatches)} microbatches of at most "
        f"{plan.max_microbatch_tokens} tokens"
    )
    kinds = sorted({r.activations for r in plan.microbatches if r.children})
    how += f", parents: {', '.join(kinds)}" if kinds else ""
    spread = {"p20": shared.quantile(0.2), "p80": shared.quantile(0.8)}
    yield row("shared step", shared.typical_ms, "ms", **spread, note=how)
    if shared.planning_ms is not None:
        yield row("shared planning", shared.planning_ms, "ms", note="not in the step")
    for phase, ms in sorted(shared.phase_ms.items()):
        yield row(f"shared phase {phase}", median(ms), "ms")
    flops = plan.shared.step_flops(plan.shape)
    yield row("shared rate", flops / shared.typical_ms / 1e9, "TFLOP/s")
    spread = {"p20": dense.quantile(0.2), "p80": dense.quantile(0.8)}
    yield row("dense step", dense.ms, "ms", **spread, note=dense.note)
    flops = dense.timed.plan.dense.step_flops(plan.shape)
    yield row("dense rate", flops / dense.timed.typical_ms / 1e9, "TFLOP/s")
    ratio = dense.ms / shared.typical_ms
    beside = {"baseline": "dense", "baseline_leaves_out": True, "bound": bound}
    yield row("speed-up", ratio, "x", note=how, **beside)
    yield row("share of bound", ratio / bound, "1", **beside)
    for name, timed in (("shared", shared), ("dense", dense.timed)):
        if timed.peak_bytes is not None:
            yield row(f"{name} peak", timed.peak_bytes, "bytes")
    if plan.predicted_ms is None:
        return
    row = partial(row, note=plan.rests_on)
    yield row("predicted step", plan.predicted_ms, "ms")
    yield row("predicted / measured time", plan.predicted_ms / shared.typical_ms, "1")
    if shared.peak_bytes is not None and plan.predicted_peak_bytes is not None:
        predicted = plan.predicted_peak_bytes + stepper.fixed_bytes
        yield row("predicted peak", predicted, "bytes")
        yield row("predicted / measured peak", predicted / shared.peak_bytes, "1")


def out_of_memory(bench: str, case: str, error: BaseException) -> ResultRow:
    torch.cuda.empty_cache()
    return cell_row(bench, case, "out of memory", 1.0, "1", note=str(error)[:120])
