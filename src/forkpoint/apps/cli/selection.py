"""Taking a part of a file of rollouts, for a smaller trial. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.apps.cli.options import Most, Reading, load_batch
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import Rollout, RolloutBatch

PER_TOKEN = (
    *("token_ids", "loss_mask", "advantage", "weights", "returns"),
    *("old_logprobs", "reference_logprobs", "old_values", "routed_experts"),
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A smaller part of the rollouts, for a trial on a smaller machine.

    Attributes:
        groups: Take only the first N groups.
        max_prompt_tokens: Keep the last N tokens of prompts: of what comes before the first trained
            token. All rollouts of a group lose as many tokens as its shortest prompt has to, so
            that what they share still lies at equal positions.
        max_response_tokens: Keep the first N tokens of what follows the prompt.
    """

    groups: Most = None
    max_prompt_tokens: Most = None
    max_response_tokens: Most = None

    def load(
        self,
        file: Path,
        limit: int | None,
        reading: Reading | None = None,
        out: Output | None = None,
    ) -> RolloutBatch:
        """The rollouts of a file, as far as they are asked for.

        Raises ConfigError for more groups than there are.
        """
        batch = load_batch(file, limit, reading, out)
        groups = batch.groups()
        if self.groups is not None:
            if self.groups > len(groups):
                raise ConfigError(
                    f"groups is {self.groups}, and {file} has {len(groups)} groups; it takes a "
                    f"whole number from 1 to {len(groups)}."
                )
            wanted = sorted(int(index) for members in groups[: self.groups] for index in members)
            batch = batch.select(wanted)
        if self.max_prompt_tokens is None and self.max_response_tokens is None:
            return batch
        cut: dict[int, Rollout] = {}
        for members in batch.groups():
            prompts = {int(index): _prompt_tokens(batch[int(index)]) for index in members}
            begin = max(0, min(prompts.values()) - (self.max_prompt_tokens or len(batch.token_ids)))
            for index, prompt in prompts.items():
                end = len(batch[index])
                if self.max_response_tokens is not None:
                    end = min(end, prompt + self.max_response_tokens)
                cut[index] = _part(batch[index], begin, end)
        return RolloutBatch(cut[index] for index in range(len(batch)))


def _prompt_tokens(rollout: Rollout) -> int:
    trained = np.flatnonzero(rollout.loss_mask)
    return int(trained[0]) if len(trained) else len(rollout)


def _part(rollout: Rollout, begin: int, end: int) -> Rollout:
    changes: dict[str, Any] = {}
    for name in PER_TOKEN:
        values = getattr(rollout, name)
        changes[name] = values[begin:end] if isinstance(values, np.ndarray) else values
    return replace(rollout, **changes)
