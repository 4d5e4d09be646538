"""Costs of placement, splitting and waiting, for `forkpoint plan --ranks`. Imports no torch."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.parallel.placement.exchanges import ExchangePrices, split_groups
from forkpoint.parallel.placement.items import by_tokens, in_order
from forkpoint.parallel.placement.lockstep import RanksStep, exchange_plans, predict_step
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.place import place_paths
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch

PLACEMENTS = ("forkpoint", "token counts", "file order")


class MakePlan(Protocol):
    """Makes the plan of some rollouts, as a policy would; with `prompts`, of ranks that exchange
    them."""

    def __call__(
        self, batch: RolloutBatch, /, *, prompts: tuple[PlannedPrompt, ...] | None = None
    ) -> Plan: ...


@dataclass
class Sums:
    """Sums over batches of one placement."""

    lockstep: float = 0.0
    once: float = 0.0
    """A step whose ranks wait for each other at its end alone."""
    mean: float = 0.0
    tokens: int = 0
    groups_split: int = 0
    gathered_once: int = 0
    """Steps in which gathering weights once is predicted to be faster."""
    exchanged: float = 0.0
    """As `lockstep`, where ranks exchange the prompts that several of them have."""
    prompts: int = 0
    """How many they would exchange."""

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time in lockstep in which they wait or idle."""
        return 1 - self.mean / self.lockstep if self.lockstep else 0.0


@dataclass
class Ranks:
    """Steps of many ranks, batch by batch, for each placement of their rollouts.

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
    sums: dict[str, Sums] = field(default_factory=lambda: {name: Sums() for name in PLACEMENTS})

    def add(self, batch: RolloutBatch, alone: Plan, make: MakePlan) -> None:
        """Place one batch in each way, and predict the step.

        Args:
            batch: the rollouts.
            alone: the plan of all of them on one rank.
            make: makes the plan of a part of them.
        """
        groups, count = batch.group_index, self.ranks
        paths = Paths.of_batch(batch, alone.run_lengths)
        prices = ExchangePrices.of(alone.shape, self.rates, self.calibration)
        placed = {
            "forkpoint": place_paths(
                paths,
                paths.forest(),
                self.rates,
                count,
                whole_groups=self.whole_groups,
                max_microbatch_tokens=self.max_microbatch_tokens,
                exchange=prices if self.exchanges else None,
            ),
            "token counts": by_tokens(groups, batch.lengths, count),
            "file order": in_order(groups, count, whole_groups=self.whole_groups),
        }
        self.alone += predict_step([alone], self.calibration).lockstep
        self.computed_tokens += alone.computed_tokens
        self.groups += int(groups.max()) + 1
        for name, rank in placed.items():
            members = [np.flatnonzero(rank == number).tolist() for number in range(count)]
            parts = [batch.select(of) if of else None for of in members]
            plans = [make(part) if part else None for part in parts]
            step = predict_step(plans, self.calibration)
            other, prompts = self._exchanged(parts, plans, make)
            sums = self.sums[name]
            sums.lockstep += step.lockstep
            sums.once += step.once
            sums.mean += step.mean
            sums.tokens += sum(plan.computed_tokens for plan in plans if plan)
            sums.groups_split += len(split_groups(groups, rank))
            sums.gathered_once += step.gathering is not None and step.gathering.gather == "step"
            sums.exchanged += (other or step).lockstep
            sums.prompts += prompts

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

    def _over_share(self, cost: float) -> float:
        """A cost over an equal share of what one rank would take for all."""
        share = self.alone / self.ranks
        return cost / share if share else 1.0

    def lines(self, label: int) -> list[str]:
        """Answers as lines, with names `label` wide."""
        own = self.sums["forkpoint"]
        over = {name: self._over_share(sums.lockstep) for name, sums in self.sums.items()}
        count = f"{self.ranks:,} rank{'' if self.ranks == 1 else 's'}"
        more = max(0, own.tokens - self.computed_tokens)
        answers = {
            "ranks": f"{count}: step {over['forkpoint']:.2f}x an equal share, "
            f"{own.idle_share:.0%} of it idle",
            "placed": f"{more:,} tokens replicated ({more / max(1, self.computed_tokens):.1%}), "
            f"{own.groups_split:,} of {self.groups:,} groups split",
            "or placed": f"by token counts {over['token counts']:.2f}x, in file order "
            f"{over['file order']:.2f}x",
        }
        if own.prompts:
            prompts = f"{own.prompts:,} prompt{'' if own.prompts == 1 else 's'}"
            step = self._over_share(own.exchanged)
            answers["or exchanged"] = f"{prompts} of several ranks run on one each: {step:.2f}x"
        return [f"{name:{label}}{answer}" for name, answer in answers.items()]

    def facts(self) -> dict[str, object]:
        """Fields of the JSON line."""
        return {
            "ranks": self.ranks,
            "ways": {
                name: {
                    "step_over_share": self._over_share(sums.lockstep),
                    "gathered_once_over_share": self._over_share(sums.once),
                    "idle_share": sums.idle_share,
                    "replicated_tokens": sums.tokens - self.computed_tokens,
                    "groups_split": sums.groups_split,
                    "steps_gathered_once": sums.gathered_once,
                    "exchanged_over_share": self._over_share(sums.exchanged),
                    "prompts_exchanged": sums.prompts,
                }
                for name, sums in self.sums.items()
            },
        }
