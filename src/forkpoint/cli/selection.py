"""Taking a part of a file of rollouts, for a smaller trial. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import DisallowNone, arg

from forkpoint.cli.options import Reading, load_batch
from forkpoint.cli.output import Output
from forkpoint.errors import ConfigError
from forkpoint.rollouts import Rollout, RolloutBatch

Most = DisallowNone[
    Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all of them)")]
]

PER_TOKEN = (
    *("token_ids", "loss_mask", "advantage", "weights"),
    *("old_logprobs", "reference_logprobs"),
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A smaller part of the rollouts, for a trial on a smaller machine.

    Attributes:
        groups: Take only the first N groups.
        max_prompt_tokens: Keep the last N tokens of each prompt, which is what comes before the
            first trained token.
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

        Raises ConfigError for a number below 1, or more groups than there are.
        """
        for name in ("groups", "max_prompt_tokens", "max_response_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")
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
        return RolloutBatch(self._cut(rollout) for rollout in batch)

    def _cut(self, rollout: Rollout) -> Rollout:
        trained = np.flatnonzero(rollout.loss_mask)
        prompt = int(trained[0]) if len(trained) else len(rollout)
        begin = 0 if self.max_prompt_tokens is None else max(0, prompt - self.max_prompt_tokens)
        end = len(rollout)
        if self.max_response_tokens is not None:
            end = min(end, prompt + self.max_response_tokens)
        changes: dict[str, Any] = {}
        for name in PER_TOKEN:
            values = getattr(rollout, name)
            changes[name] = values[begin:end] if isinstance(values, np.ndarray) else values
        return replace(rollout, **changes)
