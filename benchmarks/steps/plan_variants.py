"""Steps of one group under plans that the planner did not choose, beside the one it did.

After dense at its best and auto come prompts in a row of their own, kept, offloaded or recomputed,
with leaves of several lengths. What does not fit in memory is a row of its own. Where one of them
is faster than auto by more than noise, the prices of plans are wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import make_group, make_model
from benchmarks.steps.cells import cell_rows, out_of_memory, peak_prediction
from benchmarks.steps.stepper import GROUP, Stepper, best_dense
from forkpoint.errors import ConfigError, PlanError

ShapeName = Literal["llama3-8b", "qwen3-8b", "qwen3-4b", "qwen3.5-4b", "tiny"]
Prices = DisallowNone[
    Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: none)")]
]
REPEATS = 2


def variants(
    stepper: Stepper,
    cell: str,
    residencies: tuple[str, ...],
    leaf_tokens: tuple[int, ...],
    deadline: Deadline,
) -> Iterator[ResultRow]:
    prompt, response, count = cell_numbers(cell, "cells", "prompt/response/count")
    batch = make_group(prompt, [response] * count, vocab=stepper.vocab)
    dense, _, _ = best_dense(stepper, batch, repeats=REPEATS)
    ways: dict[str, dict[str, object]] = {"auto": {"memory_budget": stepper.budget_bytes}}
    for activations in residencies:
        for wave in leaf_tokens:
            ways[f"{activations}, leaves of {wave} tokens"] = {
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


def cell_numbers(cell: str, name: str, form: str) -> list[int]:
    """The whole numbers of a cell, such as 10240/2048/32.

    Raises:
        ConfigError: it has not as many as `form`, or others than positive whole numbers.
    """
    words = cell.split("/")
    least = form.count("/") + 1 - form.count("[")
    if least <= len(words) <= form.count("/") + 1 and all(
        word.isdecimal() and int(word) > 0 for word in words
    ):
        return [int(word) for word in words]
    raise ConfigError(f"{name} has {cell!r}; it takes {form}, whole numbers of at least 1.")


@dataclass(frozen=True, kw_only=True)
class PlanVariants(Benchmark):
    """Time one group's step under plans that the planner did not choose, beside the one it did.

    Attributes:
        max_seconds: Begin nothing new after so many seconds; what is left out is named.
        shape: Whose sizes the model has.
        cells: Prompt, response and number of responses, as 10240/2048/32; several may be named.
        residencies: Where activations of the prompt are: keep, offload or recompute.
        leaf_tokens: The most tokens in a microbatch of responses; several may be named.
        calibration: A file that forkpoint calibrate wrote, by which plans are priced.
    """

    NAME: ClassVar[str] = "plan-variants"

    max_seconds: Seconds = 540.0
    shape: ShapeName = "llama3-8b"
    cells: tuple[str, ...] = ("10240/2048/32",)
    residencies: tuple[Literal["keep", "offload", "recompute"], ...] = (
        "keep",
        "offload",
        "recompute",
    )
    leaf_tokens: tuple[int, ...] = (8192, 12_288, 24_576)
    calibration: Prices = None

    def check(self) -> None:
        for cell in self.cells:
            cell_numbers(cell, "cells", "prompt/response/count")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        stepper = Stepper(make_model(self.shape, device), calibration=self.calibration)
        for cell in self.cells:
            yield from variants(stepper, cell, self.residencies, self.leaf_tokens, deadline)
