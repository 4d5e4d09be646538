"""Where the device time of a training step goes, dense beside shared, by kinds of kernels.

    python benchmarks/profile_step.py [--shape llama3-8b] [--layers N] [--cells 10240/2048/8/8192]

A cell is prompt / response / number of responses / tokens of a wave. Dense is two of its rollouts,
one a row. Each side runs twice to warm up, then once by the clock and once in the profiler; rows of
JSON are printed and appended to --output, and the longest kernels printed.
"""

import argparse
from pathlib import Path

import torch

from forkpoint.bench.kernel_kinds import by_kind
from forkpoint.bench.rows import ResultRow, write_rows
from forkpoint.bench.shapes import SHAPES, make_group, make_model
from forkpoint.bench.steps import DENSE, GROUP, Stepper
from forkpoint.policy import Policy
from forkpoint.rollouts import RolloutBatch

KINDS = {
    "attention": r"flash|fmha|attention|sum_parts|cudnn",
    "matrix products": r"gemm|nvjet|cutlass|xmma|wgmma",
    "fused elementwise": r"^triton|_kernel$",
    "copies": r"memcpy|copy_kernel",
    "fills": r"memset|fill",
    "additions": r"add",
}


def profiled(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, case: str, longest: int
) -> list[ResultRow]:
    plan = policy.plan(batch)
    for _ in range(2):
        stepper.step(policy, batch, plan)
    wall_ms = stepper.step(policy, batch, plan).typical_ms
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stepper.step(policy, batch, plan)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    spent = {kind: found.us / 1e3 for kind, found in by_kind(events, KINDS).items()}
    print(case)
    for event in events[:longest]:
        ms = event.self_device_time_total / 1e3
        print(f"{ms:10.2f} ms {event.count:6d}x {event.key[:100]}")
    figures = {"step": wall_ms, "device": sum(spent.values()), **spent}
    return [
        ResultRow(bench="profile", case=case, metric=name, unit="ms", value=ms)
        for name, ms in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--cells", nargs="+", default=["10240/2048/8/8192"])
    parser.add_argument("--longest", type=int, default=20, help="kernels to print")
    parser.add_argument("--output", type=Path, default=Path("profile.jsonl"))
    args = parser.parse_args()
    stepper = Stepper(make_model(args.shape, torch.device("cuda"), layers=args.layers))
    for cell in args.cells:
        prompt, response, count, wave = map(int, cell.split("/"))
        batch = make_group(prompt, [response] * count, vocab=stepper.vocab)
        dense = stepper.configured(**DENSE, max_row_tokens=prompt + response)
        shared = stepper.configured(
            **GROUP, max_row_tokens=max(prompt, response), max_wave_tokens=wave
        )
        sides = (
            (dense, batch.select([0, 1]), f"{cell}, dense, 2 rollouts"),
            (shared, batch, f"{cell}, shared"),
        )
        for policy, rollouts, case in sides:
            rows = profiled(stepper, policy, rollouts, f"{args.shape} {case}", args.longest)
            write_rows(rows, args.output)
            for row in rows:
                print(f"{row.metric:>20} {row.value:10.1f} ms")


if __name__ == "__main__":
    main()
