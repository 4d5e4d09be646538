"""Random attentions against the bar of attention_bar.py.

    python tests/numerics/attention_stress.py --configurations 2000 --seconds 240 --json PATH

Configuration i is a function of its seed alone, seed + i, and of the kernels there are: `--seed`
with it and `--configurations 1` repeats it. Exits 1 where one fails, or where time ran out.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from attention_bar import RECORDS, Case, check, unavailable
from test_attention_forest import Forest, make_forest

BF16, FP16 = torch.bfloat16, torch.float16

PROFILES: tuple[tuple[torch.dtype, tuple[int, int], tuple[int, int]], ...] = (
    (BF16, (8, 2), (128, 128)),
    (FP16, (8, 2), (128, 128)),
    (BF16, (4, 4), (64, 64)),
    (BF16, (8, 1), (96, 96)),
    (BF16, (8, 2), (256, 256)),
    (BF16, (16, 1), (128, 128)),
    (BF16, (4, 4), (192, 128)),
)
"""dtype, (H, K) and (D, E): few, since kernels compile or plan for each. Every head dim and every
ratio of heads that matters is in one of them."""

WINDOWED_PROFILES = (0, 2)
"""A window is one more thing to compile for."""

NOT_A_NUMBER = 1e9
"""The share of the bar of what is not finite or raised, since JSON has no infinity."""


def random_case(seed: int, device: str, kernels: list[str], longest: int) -> Case:
    """The configuration of a seed: a profile, a mask, a kernel that takes them, a forest for it."""
    rng = np.random.default_rng(seed)
    profile = int(rng.integers(len(PROFILES)))
    dtype, heads, dims = PROFILES[profile]
    windowed = profile in WINDOWED_PROFILES and rng.random() < 0.3
    make = partial(
        Case,
        heads=heads,
        dims=dims,
        dtype=dtype,
        device=device,
        window=int(rng.choice([1, 5, 64, 1000])) if windowed else 0,
        sinks=bool(rng.random() < 0.25),
        fused=bool(rng.random() < 0.5),
        seed=seed,
    )
    able = [name for name in kernels if make(_ONE_TOKEN, name).refusal() is None]
    if not able:
        make = partial(make, window=0)
        able = kernels
    kernel = able[int(rng.integers(len(able)))]
    ragged = kernel == "auto" or RECORDS[kernel].ragged
    # Sequences of one length may take another way through a kernel.
    equal = not ragged or rng.random() < 0.4
    return make(_equal_forest(rng, longest) if equal else _ragged_forest(rng, longest), kernel)


_ONE_TOKEN = make_forest([-1], [1])


def _ragged_forest(rng: np.random.Generator, longest: int) -> Forest:
    """Up to 12 segments in up to 4 levels; none, some or most of the upper ones in the cache."""
    segments = int(rng.integers(1, 13))
    parents, depths = [-1], [1]
    for s in range(1, segments):
        parent = int(rng.integers(-1, s))
        parent = parent if parent < 0 or depths[parent] < 4 else parents[parent]
        parents.append(parent)
        depths.append(1 if parent < 0 else 1 + depths[parent])
    lengths = [
        round(longest ** rng.random()) if rng.integers(2) else int(rng.integers(1, longest + 1))
        for _ in parents
    ]
    external: list[int] = []
    share = rng.choice([0.0, 0.4, 0.8])
    for s, parent in enumerate(parents[:-1]):
        if (parent < 0 or parent in external) and rng.random() < share:
            external.append(s)
    return make_forest(parents, lengths, external, by_level=bool(rng.integers(2)))


def _equal_forest(rng: np.random.Generator, longest: int) -> Forest:
    """A path in the cache and equal segments below it, in few shapes: each is planned for."""
    levels, count = int(rng.integers(3)), int(rng.choice([1, 4]))
    sizes = rng.choice([1, 17, 64, 127, 256, 513, 640], size=levels + 1)
    # A segment of one token is a launch of one query and one key, which cuDNN refuses.
    sizes[-1] = max(2, sizes[-1])
    lengths = [min(int(n), longest) for n in sizes]
    parents = [*range(-1, levels - 1), *[levels - 1] * count]
    return make_forest(parents, [*lengths, *lengths[-1:] * (count - 1)], [*range(levels)])


def run_seeds(
    seeds: list[int], *, device: str, kernels: list[str], longest: int, deadline: float
) -> Iterator[dict]:
    """A record for each configuration, as many as there is time for."""
    for seed in seeds:
        if time.time() >= deadline:
            return
        yield _record(random_case(seed, device, kernels, longest))


def _case(seed: int, run: partial) -> Case:
    given = run.keywords
    return random_case(seed, given["device"], given["kernels"], given["longest"])


def _described(case: Case) -> dict:
    return {
        "seed": case.seed,
        "kernel": case.kernel,
        "dtype": str(case.dtype),
        "heads": case.heads,
        "dims": case.dims,
        "window": case.window,
        "sinks": case.sinks,
        "lengths": list(map(int, case.forest.lengths)),
        "microbatch_tokens": case.forest.microbatch_tokens,
        "cache_tokens_": case.forest.cache_tokens_,
    }


def _record(case: Case) -> dict:
    record = _described(case)
    try:
        found = check(case)
    except Exception as error:  # it is what was looked for; the others run on
        return record | {"share": NOT_A_NUMBER, "error": f"{type(error).__name__}: {error}"[:1000]}
    worst = max(found, key=lambda name: found[name].share)
    share = found[worst].share
    return record | {
        "share": share if math.isfinite(share) else NOT_A_NUMBER,
        "tensor": worst,
        "where": found[worst].where,
        "ratios": {name: one.ratio for name, one in found.items() if one.ratio is not None},
    }


def summarise(records: list[dict]) -> dict[str, dict]:
    """By kernel: how many ran and failed, the largest share of the bar, the largest ratios."""
    table = {}
    for kernel in sorted({record["kernel"] for record in records}):
        mine = [record for record in records if record["kernel"] == kernel]
        ratios: dict[str, float] = {}
        for record in mine:
            for name, ratio in record.get("ratios", {}).items():
                ratios[name] = max(ratio, ratios.get(name, 0.0))
        table[kernel] = {
            "ran": len(mine),
            "failed": sum(record["share"] > 1 for record in mine),
            "worst_share_of_bar": max(record["share"] for record in mine),
            "worst_ratio_to_torch": dict(sorted(ratios.items())),
        }
    return table


def _run(seeds: list[int], workers: int, run: partial) -> Iterator[dict]:
    if workers == 1:
        yield from run(seeds)
        return
    # Those of a profile go to one process, which then compiles for them once.
    profiles: list[list[int]] = [[] for _ in PROFILES]
    for seed in seeds:
        profiles[int(np.random.default_rng(seed).integers(len(PROFILES)))].append(seed)
    waiting = sorted((mine for mine in profiles if mine), key=len)
    running: dict[Connection, tuple[BaseProcess, list[int]]] = {}
    context = multiprocessing.get_context("spawn")
    while waiting or running:
        while waiting and len(running) < workers:
            mine = waiting.pop()
            ours, theirs = context.Pipe()
            process = context.Process(target=_send, args=(theirs, mine, run))
            process.start()
            theirs.close()
            running[ours] = process, mine
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            process, mine = running[pipe]
            try:
                record = pipe.recv()
            except EOFError:
                del running[pipe]
                process.join()
                if process.exitcode and mine:
                    # A kernel took its process with it: that is a finding, and the others run on.
                    died = {"error": f"its process ended with {process.exitcode}"}
                    yield _described(_case(mine[0], run)) | died | {"share": NOT_A_NUMBER}
                    if mine[1:]:
                        waiting.append(mine[1:])
                continue
            del mine[: mine.index(record["seed"]) + 1]
            yield record


def _send(pipe: Connection, seeds: list[int], run: partial) -> None:
    for record in run(seeds):
        pipe.send(record)
    pipe.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random attentions against float64.")
    parser.add_argument("--configurations", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin none after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--kernels", nargs="+", help="without it, those made for the device")
    parser.add_argument("--longest", type=int, default=700, help="tokens of a segment at most")
    parser.add_argument("--workers", type=int, default=1, help="processes; each has whole profiles")
    parser.add_argument("--json", type=Path, help="where to write the summary")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    began = time.time()
    made_for = [n for n, r in RECORDS.items() if args.device in (r.device_types or ("cpu",))]
    kernels = []
    for name in args.kernels or [*made_for, "auto"]:
        why = unavailable(name, args.device)
        if why is None:
            kernels.append(name)
        else:
            print(f"without {name}: {why}")
    seeds = list(range(args.seed, args.seed + args.configurations))
    run = partial(
        run_seeds,
        device=args.device,
        kernels=kernels,
        longest=args.longest,
        deadline=began + args.seconds,
    )
    records: list[dict] = []
    for record in _run(seeds, args.workers, run):
        records.append(record)
        if len(records) % 100 == 0 or record["share"] > 1:
            failed = sum(record["share"] > 1 for record in records)
            print(f"{len(records)} of {len(seeds)}, {failed} failed, {time.time() - began:.0f} s")

    table = summarise(records)
    print(f"\n{'kernel':<12}{'ran':>6}{'failed':>8}{'of bar':>8}  worst error over torch's")
    for kernel, microbatch in table.items():
        ratios = "  ".join(f"{n} {r:.2f}" for n, r in microbatch["worst_ratio_to_torch"].items())
        line = f"{kernel:<12}{microbatch['ran']:>6}{microbatch['failed']:>8}"
        line += f"{microbatch['worst_share_of_bar']:>8.2f}"
        print(f"{line}  {ratios}")
    failures = [record for record in records if record["share"] > 1]
    for record in failures:
        print(f"FAILED, seed {record['seed']}: {json.dumps(record)}")
    left = len(seeds) - len(records)
    if left:
        print(f"time ran out: {left} configurations were not run")
    if args.json:
        summary = {
            "configurations": len(seeds),
            "ran": len(records),
            "failed": len(failures),
            "seed": args.seed,
            "seconds": round(time.time() - began, 1),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "kernels": table,
            "failures": failures,
        }
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if failures or left else 0


if __name__ == "__main__":
    sys.exit(main())
