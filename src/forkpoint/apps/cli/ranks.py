"""Costs of placement, splitting and waiting, for `forkpoint plan --ranks`. Imports no torch."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.parallel.placement.baselines import by_tokens, in_order
from forkpoint.parallel.placement.exchanges import ExchangePrices, split_groups
from forkpoint.parallel.placement.lockstep import RanksStep, exchange_plans, predict_step
from forkpoint.parallel.placement.paths import Paths
from forkpoint.parallel.placement.place import place_paths
from forkpoint.parallel.placement.rates import Rates
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch

WAYS = ("forkpoint", "token counts", "file order")


class MakePlan(Protocol):
    """Makes the plan of some rollouts, as a policy would; with `prompts`, of ranks that exchange
    them."""

    def __call__(
        self, batch: RolloutBatch, /, *, prompts: tuple[PlannedPrompt, ...] | None = None
    ) -> Plan: ...


@dataclass
class Sums:
    """Sums over batches of one way to place."""

    lockstep: float = 0.0
    once: float = 0.0
    mean: float = 0.0
    tokens: int = 0
    groups_split: int = 0
    gathered_once: int = 0
    """Steps in which gathering weights once is predicted to be faster."""
    exchanged: float = 0.0
    """As `lockstep`, where ranks exchange the prompts that several of them have."""
    prompts: int = 0
    """How many they would exchange."""

    def add(
        self, step: RanksStep, tokens: int, groups_split: int, other: RanksStep, prompts: int
    ) -> None:
        """Count one more batch: its step, the tokens that its ranks run, its split groups, and the
        step with so many prompts exchanged."""
        self.lockstep += step.lockstep
        self.once += step.once
        self.mean += step.mean
        self.tokens += tokens
        self.groups_split += groups_split
        self.exchanged += other.lockstep
        self.prompts += prompts
        self.gathered_once += step.gathering is not None and step.gathering.gather == "step"

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time in lockstep in which they wait or idle."""
        return 1 - self.mean / self.lockstep if self.lockstep else 0.0


@dataclass
class Ranks:
    """Steps of many ranks, batch by batch, for each way to place their rollouts.

    Every rank's rollouts are planned as a policy would plan them there, with the settings given.
    """

    ranks: int
    rates: Rates
    whole_groups: bool
    """Whether the loss couples rollouts of a group."""
    max_microbatch_tokens: int | None
    exchanges: bool
    """Whether the settings let ranks exchange prompts."""
    calibration: Calibration | None = None
    alone: float = 0.0
    """Cost of the batches on one rank."""
    computed_tokens: int = 0
    """Tokens that one rank runs."""
    groups: int = 0
    sums: dict[str, Sums] = field(default_factory=lambda: {way: Sums() for way in WAYS})

    def add(self, batch: RolloutBatch, alone: Plan, make: MakePlan) -> None:
        """Place one batch in each way, and predict the step.

        Args:
            batch: the rollouts.
            alone: the plan of all of them on one rank.
            make: makes the plan of a part of them.
        """
        groups, count = batch.group_index, self.ranks
        paths = Paths.of_batch(batch, alone.run_lengths)
        placed = {
            "forkpoint": place_paths(
                paths,
                paths.forest(),
                self.rates,
                count,
                whole_groups=self.whole_groups,
                max_microbatch_tokens=self.max_microbatch_tokens,
                exchange=self._prices(alone) if self.exchanges else None,
            ),
            "token counts": by_tokens(groups, batch.lengths, count),
            "file order": in_order(groups, count, whole_groups=self.whole_groups),
        }
        self.alone += predict_step([alone], self.calibration).lockstep
        self.computed_tokens += alone.computed_tokens
        self.groups += int(groups.max()) + 1
        for way, rank in placed.items():
            parts = [
                batch.select(np.flatnonzero(rank == number).tolist())
                if (rank == number).any()
                else None
                for number in range(count)
            ]
            plans = [make(part) if part else None for part in parts]
            step = predict_step(plans, self.calibration)
            other, prompts = self._exchanged(parts, plans, make)
            tokens = sum(plan.computed_tokens for plan in plans if plan)
            split = len(split_groups(groups, rank))
            self.sums[way].add(step, tokens, split, other or step, prompts)

    def _prices(self, alone: Plan) -> ExchangePrices | None:
        return ExchangePrices.of(alone.shape, self.rates, self.calibration)

    def _exchanged(
        self, parts: list[RolloutBatch | None], plans: list[Plan | None], make: MakePlan
    ) -> tuple[RanksStep | None, int]:
        """The step with prompts exchanged, and how many; None where it is no other."""
        if not self.exchanges:
            return None, 0
        try:
            others, prompts = exchange_plans(parts, plans, lambda b, t: make(b, prompts=t))
        except PlanError:  # they do not fit
            return None, 0
        if not prompts:
            return None, 0
        return predict_step(others, self.calibration, prompts), len(prompts)

    def exchanged_over_mean(self, way: str) -> float:
        """A step in lockstep with prompts exchanged, over the same as `over_mean`."""
        share = self.alone / self.ranks
        return self.sums[way].exchanged / share if share else 1.0

    def over_mean(self, way: str) -> float:
        """A step in lockstep over an equal share of what one rank would take for all."""
        share = self.alone / self.ranks
        return self.sums[way].lockstep / share if share else 1.0

    def once_over_mean(self, way: str) -> float:
        """A step whose ranks wait for each other at its end alone, over the same."""
        share = self.alone / self.ranks
        return self.sums[way].once / share if share else 1.0

    def replicated(self, way: str) -> int:
        """Tokens that ranks run besides those that one rank would."""
        return self.sums[way].tokens - self.computed_tokens

    def lines(self, label: int) -> list[str]:
        """Answers as lines, with names `label` wide."""
        own = self.sums["forkpoint"]
        count = f"{self.ranks:,} rank{'' if self.ranks == 1 else 's'}"
        share = self.replicated("forkpoint") / max(1, self.computed_tokens)
        answers = {
            "ranks": f"{count}: step {self.over_mean('forkpoint'):.2f}x an equal share, "
            f"{own.idle_share:.0%} of it idle",
            "placed": f"{max(0, self.replicated('forkpoint')):,} tokens replicated "
            f"({max(0.0, share):.1%}), {own.groups_split:,} of {self.groups:,} groups split",
            "or placed": f"by token counts {self.over_mean('token counts'):.2f}x, in file order "
            f"{self.over_mean('file order'):.2f}x",
        }
        if own.prompts:
            prompts = f"{own.prompts:,} prompt{'' if own.prompts == 1 else 's'}"
            step = self.exchanged_over_mean("forkpoint")
            answers["or exchanged"] = f"{prompts} of several ranks run on one each: {step:.2f}x"
        return [f"{name:{label}}{answer}" for name, answer in answers.items()]

    def facts(self) -> dict[str, object]:
        """Fields of the JSON line."""
        return {
            "ranks": self.ranks,
            "ways": {
                way: {
                    "step_over_share": self.over_mean(way),
                    "gathered_once_over_share": self.once_over_mean(way),
                    "idle_share": self.sums[way].idle_share,
                    "replicated_tokens": self.replicated(way),
                    "groups_split": self.sums[way].groups_split,
                    "steps_gathered_once": self.sums[way].gathered_once,
                    "exchanged_over_share": self.exchanged_over_mean(way),
                    "prompts_exchanged": self.sums[way].prompts,
                }
                for way in WAYS
            },
        }
