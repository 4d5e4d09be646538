"""Predicted steps on several ranks, for `forkpoint plan --ranks`. Imports no torch."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forkpoint.apps.cli.plan_text import counted
from forkpoint.config import Config
from forkpoint.errors import PlanError
from forkpoint.parallel.placement.items import by_tokens, in_order, split_groups
from forkpoint.parallel.placement.lockstep import exchange_plans, predict_step
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.place import place_paths
from forkpoint.plan import ModelShape, Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.shared_prompts import PlannedPrompt, SharedPrompt, cannot_exchange
from forkpoint.rollouts.batch import RolloutBatch

MakePlan = Callable[[RolloutBatch, tuple[PlannedPrompt, ...] | None], Plan]
"""Plans some rollouts. With prompts, the ranks exchange these."""


@dataclass
class Sums:
    """Sums over batches for one placement. Costs have the unit of plans."""

    step: float = 0.0
    """Cost of steps whose ranks wait for each other in every forward and backward."""
    mean: float = 0.0
    """Mean cost of a rank, without waits."""
    exchanged: float = 0.0
    """Cost of steps in which ranks exchange prompts."""
    tokens: int = 0
    groups_split: int = 0
    prompts: int = 0


@dataclass
class Ranks:
    """Predicted steps of several ranks, for each placement of the rollouts.

    The rollouts of each rank are planned as its policy would plan them, with the same options.
    """

    ranks: int
    shape: ModelShape | None
    calibration: Calibration | None
    config: Config
    whole_groups: bool
    """Whether the loss couples the rollouts of a group."""
    one_rank: float = 0.0
    """Cost of the batches on one rank."""
    computed_tokens: int = 0
    """Tokens that one rank runs."""
    groups: int = 0
    predicted_peak_bytes: int | None = None
    """Largest peak of any rank, with rollouts placed by forkpoint; None without a model shape."""
    checkpointing: Counter[str] = field(default_factory=Counter)
    """Number of their microbatches for each checkpointing policy."""
    sums: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))

    def add(self, batch: RolloutBatch, one_rank: Plan, make: MakePlan) -> None:
        """Place a batch by each method, and predict the step. `one_rank`: plan of the batch on one
        rank."""
        groups, count = batch.group_index, self.ranks
        rates = Rates.of(self.shape, self.calibration)
        paths = Paths.of_batch(batch, one_rank.run_lengths)
        exchanges = not cannot_exchange(self.config)
        placed = {
            "forkpoint": place_paths(
                paths,
                paths.forest(),
                rates,
                count,
                whole_groups=self.whole_groups,
                max_microbatch_tokens=self.config.max_microbatch_tokens,
            ),
            "token counts": by_tokens(groups, batch.lengths, count),
            "file order": in_order(groups, count, whole_groups=self.whole_groups),
        }
        self.one_rank += predict_step([one_rank], self.calibration).lockstep
        self.computed_tokens += one_rank.computed_tokens
        self.groups += int(groups.max()) + 1
        for name, rank in placed.items():
            members = [np.flatnonzero(rank == number).tolist() for number in range(count)]
            parts = [batch.select(of) if of else None for of in members]
            plans = [make(part, None) if part else None for part in parts]
            if name == "forkpoint":
                for plan in filter(None, plans):
                    self.checkpointing.update(each.checkpointing for each in plan.microbatches)
                    if plan.predicted_peak_bytes is not None:
                        peak = self.predicted_peak_bytes or 0
                        self.predicted_peak_bytes = max(peak, plan.predicted_peak_bytes)
            step = exchanged = predict_step(plans, self.calibration)
            prompts: tuple[SharedPrompt, ...] = ()
            try:
                if exchanges:
                    others, prompts = exchange_plans(parts, plans, make)
                    exchanged = predict_step(others, self.calibration, prompts)
            except PlanError:  # prompts that do not fit are not exchanged
                pass
            sums = self.sums[name]
            sums.step += step.lockstep
            sums.mean += step.mean
            sums.exchanged += (exchanged if prompts else step).lockstep
            sums.tokens += sum(plan.computed_tokens for plan in plans if plan)
            sums.groups_split += len(split_groups(groups, rank))
            sums.prompts += len(prompts)

    def facts(self) -> dict[str, Any]:
        """Fields of the JSON line."""
        share = self.one_rank / self.ranks
        found = {
            name: {
                "step_over_share": sums.step / share if share else 1.0,
                "idle_share": 1 - sums.mean / sums.step if sums.step else 0.0,
                "replicated_tokens": sums.tokens - self.computed_tokens,
                "groups_split": sums.groups_split,
                "exchanged_over_share": sums.exchanged / share if share else 1.0,
                "prompts_exchanged": sums.prompts,
            }
            for name, sums in self.sums.items()
        }
        return {"ranks": self.ranks, "placements": found}

    def answers(self) -> dict[str, str]:
        """Lines of the output, by their names."""
        ours, by_count, order = self.facts()["placements"].values()
        more = max(0, ours["replicated_tokens"])
        found = {
            "ranks": f"{counted(self.ranks, 'rank')}: step {ours['step_over_share']:.2f}x an equal "
            f"share, {ours['idle_share']:.0%} of it idle",
            "placed": f"{more:,} tokens replicated ({more / max(1, self.computed_tokens):.1%}), "
            f"{ours['groups_split']:,} of {self.groups:,} groups split",
            "or placed": f"by token counts {by_count['step_over_share']:.2f}x, in file order "
            f"{order['step_over_share']:.2f}x",
        }
        if count := ours["prompts_exchanged"]:
            found["or exchanged"] = (
                f"{counted(count, 'prompt')} of several ranks run on one each: "
                f"{ours['exchanged_over_share']:.2f}x"
            )
        return found
