"""The kernels of shared-prefix attention, ours and the stock calls alone, by torch's profiler.

    python benchmarks/profile_attention.py [--kernel fa4] [--cases dualkv/P4096 ragged/P5059]

A case is chosen by the beginning of its name in `forkpoint bench attention`. Ours and the stock
calls are timed in turn first, then five calls of each are profiled; rows of JSON are printed and
appended to --output.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from forkpoint.bench.attention_cases import SUITES, Case, Inputs, cases
from forkpoint.bench.kernel_kinds import Spent, by_kind
from forkpoint.bench.rows import ResultRow, time_cuda_in_turn, write_rows

CALLS = 5
KINDS = {
    "FlashAttention-4 preprocess": r"preprocess",
    "FlashAttention-4 postprocess": r"postprocess",
    "attention kernel": r"flash|fmha|cudnn|cutlass",
    "merge and sums": r"sum_parts|sums|_kernel$",
    "logaddexp of the sums": r"logaddexp",
    "fills": r"memset|fill",
    "copies": r"memcpy|copy",
}


def kernels_of(call: Callable[[], object]) -> list[tuple[str, Spent]]:
    """Time of one call's kernels by kind, the longest first; others stand by their names."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found = by_kind(profile.key_averages(), KINDS, rest=None).items()
    each = [(k, Spent(s.us / CALLS, round(s.launches / CALLS))) for k, s in found if s.launches]
    return sorted(each, key=lambda one: -one[1].us)


def profiled(case: Case, kernel: str) -> list[ResultRow]:
    inputs = Inputs(case)
    o, lse = inputs.forward(kernel)
    stock_forward, stock_backward = inputs.stock_calls(kernel, o, lse)
    rows: list[ResultRow] = []

    def row(metric: str, value: float, unit: str, note: str | None = None) -> None:
        figure = ResultRow(
            bench="attention-profile",
            case=case.name,
            metric=metric,
            unit=unit,
            value=value,
            note=note,
        )
        rows.append(figure)

    for direction, ours, stock in (
        ("forward", lambda: inputs.forward(kernel), stock_forward),
        ("backward", lambda: inputs.backward(kernel, o, lse), stock_backward),
    ):
        timings = time_cuda_in_turn(ours, stock)
        row(f"{direction}, over stock", timings[0].p50 / timings[1].p50, "ratio")
        for side, call, timing in zip(("ours", "stock"), (ours, stock), timings, strict=True):
            row(f"{direction}, {side}", timing.p50, "ms")
            for kind, spent in kernels_of(call):
                note = f"{spent.launches} launches"
                row(f"{direction}, {side}: {kind}", spent.us, "us", note)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="fa4")
    parser.add_argument("--cases", nargs="+", default=["dualkv/P4096", "ragged/P5059"])
    parser.add_argument("--output", type=Path, default=Path("attention-profile.jsonl"))
    args = parser.parse_args()
    for suite in SUITES:
        for case in cases(suite):
            wanted = case.name.startswith(tuple(args.cases)) and case.dtype == torch.bfloat16
            if wanted:
                rows = profiled(case, args.kernel)
                write_rows(rows, args.output)
                for row in rows:
                    print(f"{case.name:50} {row.metric:50} {row.value:10.3f} {row.unit}")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
