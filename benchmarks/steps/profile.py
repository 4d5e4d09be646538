"""Where the device time of a training step goes, dense beside shared, by kinds of kernels.

    python benchmarks/profile_step.py [--shape llama3-8b] [--layers N] [--cells 6144/6144/16]

A cell is prompt / response / number of responses, planned as `forkpoint bench step-grid` plans it,
or with / tokens of a wave after that, the prompt in a row of its own. Dense is two of its rollouts,
one a row, and the same with one label each, which tells the head's share. Each side runs twice to
warm up, then once by the clock and once in the profiler. What the shared step would take with every
kind of work at dense rates stands beside what it took (forkpoint/bench/dense_rates.py). Rows of
JSON are printed and appended to --output, and the longest kernels printed.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.steps.cells import cell_row
from benchmarks.steps.dense_rates import ATTENTION, Amounts, at_dense_rates
from benchmarks.kernel_kinds import by_kind
from benchmarks.rows import write_rows
from benchmarks.shapes import SHAPES, make_group, make_model
from benchmarks.steps.stepper import DENSE, GROUP, Stepper
from forkpoint.plan.plan import Plan
from forkpoint.policy import Policy
from forkpoint.rollouts import RolloutBatch

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
    with torch.profiler.profile(activities=activities) as profile:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--cells", nargs="+", default=["10240/2048/8"])
    parser.add_argument("--calibration", help="what the planner prices by (forkpoint calibrate)")
    parser.add_argument("--longest", type=int, default=20, help="kernels to print")
    parser.add_argument("--output", type=Path, default=Path("profile.jsonl"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"calibration": args.calibration} if args.calibration else {}
    stepper = Stepper(make_model(args.shape, device, layers=args.layers), **options)
    for cell in args.cells:
        prompt, response, count, *wave = map(int, cell.split("/"))
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
            case = f"{args.shape} {cell}, {name}"
            print(case)
            plan, wall_ms, spent = profiled(stepper, policy, rollouts, args.longest)
            found[name] = plan, wall_ms, Amounts.of(plan, rollouts), spent
            figure = partial(cell_row, "profile", case)
            rows = [figure("step", wall_ms, "ms"), figure("device", sum(spent.values()), "ms")]
            rows += [figure(kind, ms, "ms") for kind, ms in spent.items()]
            if name == "shared" and stepper.cuda:  # a CPU has no device time to compare
                (_, dense_ms, *full), (_, _, *few) = list(found.values())[:2]
                expected = at_dense_rates(tuple(full), tuple(few), found[name][2])
                rows += [figure(f"{k} at dense rates", ms, "ms") for k, ms in expected.items()]
                device_ms = sum(expected.values())
                speed_up = sum(full[1].values()) * count / 2 / device_ms
                rows += [
                    figure("device at dense rates", device_ms, "ms"),
                    figure("speed-up at dense rates", speed_up, "x", bound=plan.bound),
                    figure("speed-up", dense_ms * count / 2 / wall_ms, "x", bound=plan.bound),
                ]
            write_rows(rows, args.output)
            for row in rows:
                print(f"{row.metric:>36} {row.value:10.3f} {row.unit}")


if __name__ == "__main__":
    main()
