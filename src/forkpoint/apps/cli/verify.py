"""`forkpoint verify`: checks that sharing is exact for a model and rollouts."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forkpoint.apps.cli.losses import RoutedObjective
from forkpoint.apps.cli.options import (
    File,
    Flag,
    Limit,
    ModelPath,
    Positive,
    Reading,
    Runtime,
    check_kernels,
    load_batch,
)
from forkpoint.apps.cli.output import Output, options
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

if TYPE_CHECKING:
    from forkpoint.losses import Loss

CODES = {"passed": 0, "failed": 1, "nothing to verify": 3}
"""Exit codes by verdict."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that gradients with sharing are as exact as those of dense training of your model.

    The command compares the gradient of every parameter, shared and dense, with a dense run in
    higher precision (float32 for 16-bit models, else float64). It compares two plans: one that
    shares within microbatches, and one whose microbatches read prefix caches of others. The exit
    code is 1 if the error of a plan exceeds that of dense training, beyond rounding, and 3 if the
    rollouts share no tokens. It needs memory for a second model and time for two dense runs.

    Attributes:
        file: Rollouts of a trainer or of forkpoint, or the folder of a trace.
        model: A transformers model's folder, or a config.json for random weights. Nothing is
            downloaded.
        limit_groups: Use the first N groups with a gradient, as one batch. With losses of
            advantages, groups whose advantages are all 0 have none.
        limit: Read only the first N rollouts of the file.
        json: Print one line of JSON and nothing else.
        config: Options of planning and running, as in forkpoint.Config.
    """

    file: File
    model: ModelPath
    limit_groups: Positive = 1
    limit: Limit = None
    json: Flag = False
    objective: RoutedObjective = field(default_factory=RoutedObjective)
    reading: Reading = field(default_factory=Reading)
    config: Config = field(default_factory=Config)
    runtime: Runtime = field(default_factory=Runtime)

    def run(self) -> int:
        out = Output(json_only=self.json)
        check_kernels(self.config)
        everything = load_batch(self.file, self.limit, self.reading, out)
        with out.waiting("making the model"):
            from forkpoint.apps.cli.models import load_model, out_of_memory_explained
            from forkpoint.device import versions
            from forkpoint.wrapping import wrap

            # This check comes before a large model is loaded.
            loss, router = self.objective.make(), self.objective.make_router()
            members = groups_with_gradient(everything, loss)[: self.limit_groups]
            if not members:
                raise ConfigError(
                    f"no group of {self.file} gives {self.objective.loss or 'grpo'} a gradient, so "
                    "there is nothing to compare: no token is trained, or every advantage is 0. "
                    "Give other rollouts, or --loss likelihood."
                )
            batch = everything.select(int(index) for group in members for index in group)
            loss.check(batch)
            policy = wrap(load_model(self.model, self.runtime), self.config)
        with out_of_memory_explained(), out.waiting("comparing gradients") as follow:
            report = policy.verify(batch, loss, router=router, progress=follow)
        out.show(report.table(width=out.width))
        out.result(
            {
                "command": "verify",
                **report.to_dict(),
                "rollouts": len(batch),
                "groups": len(members),
                "config": options(self),
                "versions": versions(),
            }
        )
        return CODES[report.verdict]


def groups_with_gradient(batch: RolloutBatch, loss: "Loss") -> list[IntArray]:
    """Groups with a gradient. Without a gradient the comparison would prove nothing."""
    from forkpoint.losses.zeros import zero_rollouts

    untrained = batch.where_all_trained(np.zeros(batch.logical_tokens, bool))
    gradient = ~(untrained | zero_rollouts(loss, batch))
    return [members for members in batch.groups() if gradient[members].any()]
