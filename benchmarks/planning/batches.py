"""The time of making batches from tensors: 512 rollouts of 8,192 tokens in 64 groups.

Log-probs and advantages are per token, as torch tensors on the CPU: int64 ids, bool masks, float32
numbers. The bar is 0.2 s for a batch on two cores. The first call of a process is measured in
processes of its own: its memory is new, and the operating system has to find and clear it; later
calls get back what earlier batches have freed.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import Timing, time_host
from forkpoint import Rollout, RolloutBatch

NAME = "batches"
ROLLOUTS, TOKENS, PROMPT, GROUP = 512, 8_192, 2_048, 8
THREADS = 2
REPEATS = 15
PROCESSES = 5
BAR_MS = 200.0

Case = tuple[Callable[[], object], bool]
"""The case that is timed, and whether the bar is for it."""


def cases(lengths: str) -> dict[str, Case]:
    """The cases that are timed, over tensors that are made once.

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
    fields: dict[str, Any] = {
        "old_logprobs": -torch.rand(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
    }
    wide_masks = attention.long(), mask.long()
    narrow: dict[str, Any] = {name: values.bfloat16() for name, values in fields.items()}
    responses = {name: values[:, PROMPT:].contiguous() for name, values in fields.items()}
    split = [x[:, :PROMPT].contiguous() for x in (ids, attention)]
    split += [x[:, PROMPT:].contiguous() for x in (ids, attention)]
    nested: dict[str, Any] = {
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


def first_call_ms() -> float:
    """The time of the first batch of a new process, which makes the tensors by itself."""
    code = f"import {__name__} as m; print(m.one_first_call())"
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return float(done.stdout)


def one_first_call() -> float:
    """The time of `from_padded` in this process, in ms, without a call to warm up."""
    torch.set_num_threads(THREADS)
    shape = ROLLOUTS, TOKENS
    ids, kept = torch.randint(150_000, shape), torch.ones(shape, dtype=torch.bool)
    mask = kept & (torch.arange(TOKENS) >= PROMPT)
    logprobs, advantages = -torch.rand(shape), torch.randn(shape)
    fields: dict[str, Any] = {"old_logprobs": logprobs, "advantages": advantages}
    return time_host(
        lambda: RolloutBatch.from_padded(ids, kept, mask, **fields), repeats=1, warm_up=False
    ).p50


@dataclass(frozen=True, kw_only=True)
class Batches(Benchmark):
    """Time making batches from tensors: 512 rollouts of 8,192 tokens, on two threads."""

    NAME: ClassVar[str] = NAME

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        torch.set_num_threads(THREADS)
        first = Timing([first_call_ms() for _ in range(PROCESSES)])
        yield timed_row(NAME, "full", "from_padded, first call", first, bar=BAR_MS)
        for lengths in ("full", "ragged"):
            if deadline.over(lengths):
                continue
            for metric, (function, has_bar) in cases(lengths).items():
                timing = time_host(function, repeats=REPEATS)
                yield timed_row(NAME, lengths, metric, timing, bar=BAR_MS if has_bar else None)
