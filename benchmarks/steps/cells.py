"""Rows of figures of one cell: a step of a workload, beside dense and what was predicted."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from benchmarks.rows import ResultRow
from benchmarks.steps.stepper import Dense, Stepper, Timed


def cell_row(
    bench: str, case: str, metric: str, value: float, unit: str, **more: object
) -> ResultRow:
    return ResultRow(
        bench=bench,
        case=case,
        metric=metric,
        unit=unit,
        value=value,
        **more,  # type: ignore[arg-type]
    )


def cell_rows(
    bench: str,
    case: str,
    shared: Timed,
    dense: Dense | None,
    *,
    shared_name: str = "shared",
    bound: float | None = None,
) -> Iterator[ResultRow]:
    """All figures of one cell. `bound`: the counted bound, where it is not the plan's own."""
    plan = shared.plan
    bound = plan.bound if bound is None else bound
    assert plan.shape is not None
    row = partial(cell_row, bench, case)
    how = (
        f"{plan.sharing} + {plan.boundary}, microbatches of at most "
        f"{plan.max_microbatch_tokens} tokens"
    )
    kinds = sorted({r.activations for r in plan.microbatches if r.children})
    how += f", parents: {', '.join(kinds)}" if kinds else ""
    yield row(
        f"{shared_name} step",
        shared.typical_ms,
        "ms",
        p20=shared.quantile(0.2),
        p80=shared.quantile(0.8),
        note=how,
    )
    if shared.planning_ms is not None:
        yield row(f"{shared_name} planning", shared.planning_ms, "ms", note="not in the step")
    for phase, ms in sorted(shared.phase_ms.items()):
        yield row(f"{shared_name} phase {phase}", median(ms), "ms")
    flops = plan.shared.step_flops(plan.shape)
    yield row(f"{shared_name} rate", flops / shared.typical_ms / 1e9, "TFLOP/s")
    if shared.peak_bytes is not None:
        yield row(f"{shared_name} peak", shared.peak_bytes, "bytes")
    if dense is not None:
        rate = dense.timed.plan.dense.step_flops(plan.shape) / dense.timed.typical_ms / 1e9
        yield row(
            "dense step",
            dense.ms,
            "ms",
            p20=dense.quantile(0.2),
            p80=dense.quantile(0.8),
            note=dense.note,
        )
        yield row("dense rate", rate, "TFLOP/s")
        if dense.timed.peak_bytes is not None:
            yield row("dense peak", dense.timed.peak_bytes, "bytes", note=dense.note)
        ratio = dense.ms / shared.typical_ms
        beside = {"baseline": "dense", "baseline_leaves_out": True, "bound": bound}
        yield row("speed-up", ratio, "x", note=how, **beside)
        yield row("share of bound", ratio / bound, "1", **beside)
    yield from _time_prediction(bench, case, shared)


def _time_prediction(bench: str, case: str, timed: Timed) -> Iterator[ResultRow]:
    """Predictions of the planner, beside the measurements. None without a calibration."""
    plan = timed.plan
    if plan.predicted_ms is None:
        return
    yield cell_row(bench, case, "predicted step", plan.predicted_ms, "ms", note=plan.rests_on)
    ratio = plan.predicted_ms / timed.typical_ms
    yield cell_row(bench, case, "predicted / measured time", ratio, "1", note=plan.rests_on)


def peak_prediction(bench: str, case: str, stepper: Stepper, timed: Timed) -> Iterator[ResultRow]:
    """The predicted peak with weights and gradients, beside the measured one."""
    plan = timed.plan
    if timed.peak_bytes is None or plan.predicted_ms is None or plan.predicted_peak_bytes is None:
        return
    predicted = plan.predicted_peak_bytes + stepper.fixed_bytes
    yield cell_row(bench, case, "predicted peak", predicted, "bytes", note=plan.rests_on)
    ratio = predicted / timed.peak_bytes
    yield cell_row(bench, case, "predicted / measured peak", ratio, "1", note=plan.rests_on)


def out_of_memory(bench: str, case: str, error: BaseException) -> ResultRow:
    torch.cuda.empty_cache()
    return cell_row(bench, case, "out of memory", 1.0, "1", note=str(error)[:120])
