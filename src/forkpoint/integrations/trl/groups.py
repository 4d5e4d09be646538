"""Option to keep the completions of a prompt in one optimizer step.

TRL shuffles a generation batch before it is cut into micro-batches. If the batch feeds several
optimizer steps, this scatters the completions of a prompt over the steps. Each step then runs the
prompt again. Keeping groups changes the samples of each step, so it is an option.
"""

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("forkpoint")


class Grouping:
    """Order of the rows of a trainer's generation batches."""

    def __init__(self, keep: bool | None) -> None:
        """`keep`: whether groups are kept. None means False, with a warning if sharing is lost."""
        self.keep: bool | None = keep
        self._warned = keep is not None

    def prepared(self, trainer: Any, before: Any, inputs: Any) -> Any:
        """The micro-batch that TRL has prepared, or its replacement with groups kept.

        before: micro-batches of the previous generation. A new generation makes new objects.
        inputs: the micro-batch from TRL.
        """
        batches = getattr(trainer, "_buffered_inputs", None)
        if not trainer.model.training or batches is None or batches is before:
            return inputs
        steps = max(1, len(batches) // trainer.args.gradient_accumulation_steps)
        if steps == 1 or (not self.keep and self._warned):
            return inputs
        if not self.keep:
            self._warned = True
            _log.warning(
                "This generation batch feeds %d optimizer steps, over which TRL scatters the "
                "completions of a prompt, so that each step runs the prompt again. "
                "keep_groups=True keeps them in one step, which changes the samples that meet in "
                "it. Pass keep_groups to decide; False leaves TRL's order and this warning out.",
                steps,
            )
            return inputs
        # Pixels of all rows are concatenated, so they are split by row and concatenated again.
        pixels = import_module("trl.trainer.utils")
        rows = [pixels.split_pixel_values_by_grid(batch) for batch in batches]
        prompts = [torch.cat([b["prompt_ids"], b["prompt_mask"]], 1) for b in batches]
        numbers = torch.unique(torch.cat(prompts), dim=0, return_inverse=True)[1].tolist()
        rows = reordered(rows, kept_order(numbers))
        trainer._buffered_inputs = list(map(pixels.unsplit_pixel_values_by_grid, rows))
        return trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]


def kept_order(prompts: list[int]) -> list[int]:
    """Order of rows with those of one prompt together, and prompts in the order of their first
    rows, which TRL has shuffled. `prompts`: a number for each row, equal for equal prompts."""
    first: dict[int, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    return sorted(range(len(prompts)), key=lambda row: (first[prompts[row]], row))


def reordered(batches: list[dict[str, Any]], order: list[int]) -> list[dict[str, Any]]:
    """Micro-batches of the same rows in another order."""
    size = len(order) // len(batches)
    found: list[dict[str, Any]] = [{} for _ in batches]
    for name in batches[0]:
        values = [one[name] for one in batches]
        for number, place in enumerate(found):
            rows = order[number * size : (number + 1) * size]
            if isinstance(values[0], Tensor) and values[0].dim():
                place[name] = torch.cat(values)[rows]
            elif isinstance(values[0], list):
                every = [x for value in values for x in value]
                place[name] = [every[row] for row in rows]
            else:
                place[name] = values[number]
    return found
