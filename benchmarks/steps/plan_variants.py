"""Steps of one group under plans that the planner did not choose, beside the one it did.

    python benchmarks/plan_variants.py [--cells 10240/2048/32] [--calibration FILE]

A cell is prompt / response / number of responses. After dense at its best and auto come prompts in
a row of their own, kept, offloaded or recomputed, with the leaf_layout of responses named by
--leaf_layout, in tokens. What does not fit in memory says so. Rows of JSON are printed and appended
to --output: where one of them is faster than auto by more than noise, what prices plans is wrong.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.steps.cells import cell_rows, out_of_memory, peak_prediction
from benchmarks.rows import ResultRow, write_rows
from benchmarks.shapes import SHAPES, make_group, make_model
from benchmarks.steps.stepper import GROUP, Deadline, Stepper, best_dense
from forkpoint.errors import PlanError

REPEATS = 2


def variants(
    stepper: Stepper, cell: str, residencies: list[str], leaf_layout: list[int], deadline: Deadline
) -> Iterator[ResultRow]:
    prompt, response, count = map(int, cell.split("/"))
    batch = make_group(prompt, [response] * count, vocab=stepper.vocab)
    dense, _, _ = best_dense(stepper, batch, repeats=REPEATS)
    ways: dict[str, dict[str, object]] = {"auto": {"memory_budget": stepper.budget_bytes}}
    for activations in residencies:
        for wave in leaf_layout:
            ways[f"{activations}, leaf_layout of {wave}"] = {
                **GROUP,
                # For logits to be kept where auto would.
                "memory_budget": stepper.budget_bytes,
                "activations": activations,
                "max_microbatch_tokens": max(prompt, response, wave),
                "max_leaf_tokens": wave,
            }
    for name, options in ways.items():
        case = f"{stepper.mode} {prompt}/{response} N={count}: {name}"
        if deadline.over(case):
            continue
        policy = stepper.configured(**options)
        try:
            stepper.step(policy, batch)  # the first compiles, or pins memory
            timed = stepper.repeat(
                policy, batch, repeats=REPEATS, into=stepper.planned(policy, batch)
            )
        except (torch.OutOfMemoryError, PlanError) as error:
            yield out_of_memory("plan-variants", case, error)
            continue
        yield from cell_rows("plan-variants", case, timed, dense)
        yield from peak_prediction("plan-variants", case, stepper, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--cells", nargs="+", default=["10240/2048/32"])
    parser.add_argument("--residencies", nargs="+", default=["keep", "offload", "recompute"])
    parser.add_argument("--leaf_layout", nargs="+", type=int, default=[8192, 12_288, 24_576])
    parser.add_argument("--calibration", help="what the planner prices by (forkpoint calibrate)")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="begin nothing after this")
    parser.add_argument("--output", type=Path, default=Path("plan-variants.jsonl"))
    args = parser.parse_args()
    deadline = Deadline(args.max_seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"calibration": args.calibration} if args.calibration else {}
    stepper = Stepper(make_model(args.shape, device), **options)
    for cell in args.cells:
        for row in variants(stepper, cell, args.residencies, args.leaf_layout, deadline):
            write_rows([row], args.output)
            print(f"{row.case:60} {row.metric:28} {row.value:14.4g} {row.unit}", flush=True)
    for case in deadline.left_out:
        print(f"no time for {case}")


if __name__ == "__main__":
    main()
