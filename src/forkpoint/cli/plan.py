"""`forkpoint plan`: what would run for a file of rollouts, and what it saves.

Imports no torch.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.table import Table
from tyro.conf import DisallowNone, arg

from forkpoint.cli.model_config import read_shape
from forkpoint.cli.options import (
    File,
    Flag,
    Limit,
    LossName,
    Memory,
    Planning,
    coupling,
    load_batch,
)
from forkpoint.cli.output import Output
from forkpoint.forest import sort_rollouts
from forkpoint.plan import make_plan
from forkpoint.rollouts import RolloutBatch

AnyModel = DisallowNone[
    Annotated[
        Path | None,
        arg(metavar="DIR|CONFIG.json", help_behavior_hint="(default: count tokens only)"),
    ]
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show what would run for a file of rollouts and what it saves, taking it as one batch.

    Runs no model: it needs neither weights nor a GPU.

    Attributes:
        file: Rollouts: one JSON object a line, plain, gzip or zstd.
        model: A model's folder or its config.json; with it FLOPs and bytes are counted, not only
            tokens.
        loss: The loss it is for. Losses that couple the tokens of a rollout (gspo) or the rollouts
            of a pair (dpo) can cost another forward.
        limit: Read only the first N rollouts of the file.
        json: Print only the JSON line.
    """

    file: File
    model: AnyModel = None
    loss: LossName = "grpo"
    limit: Limit = None
    json: Flag = False
    planning: Planning = field(default_factory=Planning)
    memory: Memory = field(default_factory=Memory)

    def run(self) -> int:
        out = Output(json_only=self.json)
        batch = load_batch(self.file, self.limit)
        shape = None
        if self.model is not None:
            shape = read_shape(self.model, self.memory)
            batch.check_vocabulary(shape.vocab)
        plan = make_plan(batch, shape, self.planning.config(), coupling=coupling(self.loss, batch))
        group_tokens = count_group_tokens(batch)
        counts = Table(title=f"tokens of {self.file.name}")
        for name in ("counted", "tokens", "of those given"):
            counts.add_column(name, justify="left" if name == "counted" else "right")
        for name, tokens in (
            ("as given (logical)", plan.logical_tokens),
            ("once shared within each group", group_tokens),
            ("once in the whole batch (unique)", plan.unique_tokens),
        ):
            counts.add_row(name, f"{tokens:,}", f"{tokens / plan.logical_tokens:.1%}")
        out.show(plan.explain(width=out.width), counts)
        out.result(
            {
                "command": "plan",
                "file": self.file,
                "rollouts": len(batch),
                "groups": len(batch.groups()),
                "logical_tokens": plan.logical_tokens,
                "group_tokens": group_tokens,
                "unique_tokens": plan.unique_tokens,
                "computed_tokens": plan.computed_tokens,
                "trained_tokens": batch.trained_tokens,
                "rows": len(plan.rows),
                "max_row_tokens": plan.max_row_tokens,
                "bound": plan.bound,
                "bound_unit": "tokens" if shape is None else "flops",
                "sharing": plan.sharing,
                "boundary": plan.boundary,
                "waves": plan.waves,
                "reason": plan.reason,
                "candidates": [asdict(candidate) for candidate in plan.candidates],
                "predicted_peak_bytes": plan.predicted_peak_bytes,
            }
        )
        return 0


def count_group_tokens(batch: RolloutBatch) -> int:
    """Distinct (path, token) pairs within each group, summed over the groups."""
    order = sort_rollouts(batch.token_ids, batch.offsets, batch.group_index)
    first_tokens = batch.token_ids[batch.offsets[:-1]]
    firsts = np.unique(np.stack([batch.group_index, first_tokens]), axis=1).shape[1]
    return int(order.new_edges.sum()) + firsts
