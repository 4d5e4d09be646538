"""Time making batches from tensors: `python benchmarks/batches.py`.

512 rollouts of 8,192 tokens in 64 groups, with log-probs and advantages per token, as torch tensors
on the CPU: int64 ids, bool masks, float32 numbers. Bar: a batch takes under 0.2 s on two cores. The
first call of a process is measured in processes of its own: its memory is new, and the operating
system has to find and clear it; later calls get back what earlier batches have freed.
Prints a table and appends a JSON row per figure to benchmarks/results/batches.jsonl.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from forkpoint import Rollout, RolloutBatch

ROLLOUTS, TOKENS, PROMPT, GROUP = 512, 8_192, 2_048, 8
THREADS = 2
REPEATS = 15
PROCESSES = 5
BAR_MS = 200.0
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "batches.jsonl"

Case = tuple[Callable[[], object], bool]
"""Cases that are timed, and whether the bar is for them."""


def cases(lengths: str) -> dict[str, Case]:
    """Calls that are timed, over tensors that are made once.

    lengths: "full" for rollouts of 8,192 tokens, "ragged" for 2,049 to 8,192, padded on the right.
    """
    generator = torch.Generator().manual_seed(0)
    shape = ROLLOUTS, TOKENS
    ids = torch.randint(150_000, shape, generator=generator)
    ids[:, :PROMPT] = ids[torch.arange(ROLLOUTS) // GROUP, :PROMPT]
    ends = torch.full((ROLLOUTS, 1), TOKENS)
    if lengths == "ragged":
        ends = torch.randint(PROMPT + 1, TOKENS + 1, (ROLLOUTS, 1), generator=generator)
    attention = torch.arange(TOKENS) < ends
    mask = attention & (torch.arange(TOKENS) >= PROMPT)
    fields = {
        "old_logprobs": -torch.rand(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
    }
    wide_masks = attention.long(), mask.long()
    narrow = {name: values.bfloat16() for name, values in fields.items()}
    responses = {name: values[:, PROMPT:].contiguous() for name, values in fields.items()}
    split = [x[:, :PROMPT].contiguous() for x in (ids, attention)]
    split += [x[:, PROMPT:].contiguous() for x in (ids, attention)]
    nested = {
        name: torch.nested.nested_tensor_from_jagged(
            values[attention], offsets=torch.cat([torch.zeros(1, 1), ends.cumsum(0)])[:, 0].long()
        )
        for name, values in {"input_ids": ids, "loss_mask": mask, **fields}.items()
    }
    batch = RolloutBatch.from_padded(ids, attention, mask, **fields)
    values = torch.randn(batch.logical_tokens)

    def one_by_one() -> RolloutBatch:
        return RolloutBatch(
            Rollout(
                ids[n, :end], mask[n, :end], fields["advantages"][n, :end],
                fields["old_logprobs"][n, :end],
            )
            for n, end in enumerate(ends[:, 0].tolist())
        )  # fmt: skip

    return {
        "from_padded": (lambda: RolloutBatch.from_padded(ids, attention, mask, **fields), True),
        "from_padded, int64 masks, bfloat16": (
            lambda: RolloutBatch.from_padded(ids, *wide_masks, **narrow),
            True,
        ),
        "from_completions": (lambda: RolloutBatch.from_completions(*split, **responses), True),
        "from_jagged": (lambda: RolloutBatch.from_jagged(**nested), True),
        "to_padded": (lambda: batch.to_padded(values), True),
        "Rollout, one by one": (one_by_one, False),
    }


def time_ms(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    made = function()
    taken = (time.perf_counter() - begin) * 1e3
    del made
    return taken


def first_call_ms() -> float:
    """The time of the first batch of a new process, which makes the tensors by itself."""
    words = [sys.executable, __file__, "--first-call"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout)


def one_first_call() -> float:
    shape = ROLLOUTS, TOKENS
    ids, kept = torch.randint(150_000, shape), torch.ones(shape, dtype=torch.bool)
    mask = kept & (torch.arange(TOKENS) >= PROMPT)
    logprobs, advantages = -torch.rand(shape), torch.randn(shape)
    fields = {"old_logprobs": logprobs, "advantages": advantages}
    return time_ms(lambda: RolloutBatch.from_padded(ids, kept, mask, **fields))


def environment() -> dict[str, Any]:
    """Device, versions, commit and command: the same for every row of this run."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--", "src", "benchmarks/batches.py")
    names = ("forkpoint", "numpy", "torch")
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    """Measure every case; 1 if the median of one misses the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="the rows are appended here")
    parser.add_argument(
        "--first-call", action="store_true", help="print the time of one call, and nothing else"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.first_call:
        print(one_first_call())
        return 0
    samples = {
        ("full", "from_padded, first call", True): [first_call_ms() for _ in range(PROCESSES)]
    }
    for lengths in ("full", "ragged"):
        for metric, (function, bar) in cases(lengths).items():
            function()
            samples[lengths, metric, bar] = [time_ms(function) for _ in range(REPEATS)]
    table = Table(title=f"512 rollouts of at most 8,192 tokens; bar: {BAR_MS:.0f} ms")
    for name in ("lengths", "metric", "p20 (ms)", "p50 (ms)", "p80 (ms)"):
        table.add_column(name, justify="right" if "ms" in name else "left")
    rows, slow = [], False
    for (lengths, metric, bar), taken in samples.items():
        p20, p50, p80 = (round(float(np.quantile(taken, q)), 2) for q in (0.2, 0.5, 0.8))
        table.add_row(lengths, metric, *(f"{x:.1f}" for x in (p20, p50, p80)))
        slow |= bar and p50 >= BAR_MS
        figure = {"unit": "ms", "value": p50, "p20": p20, "p50": p50, "p80": p80}
        rows.append({"bench": "batches", "case": lengths, "metric": metric, **figure})
    Console().print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **environment()}) + "\n")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
