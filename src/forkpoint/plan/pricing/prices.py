"""Costs of the plans that are tried for one batch.

Many combinations and lengths of microbatches come to the same microbatches; these are priced once.
"""

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from forkpoint.plan.entries import entries_of
from forkpoint.plan.plan import Plan
from forkpoint.plan.predict import peak_bytes, plan_cost
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import Meter, meter_of
from forkpoint.plan.routing import RouterDemand
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray


@dataclass(eq=False)
class Prices:
    """Meters and costs of one batch's plans."""

    batch: RolloutBatch
    shape: ModelShape | None
    coupling: IntArray | None
    calibration: Calibration | None
    uses_temperature: bool = True
    """Whether the head's outputs depend on temperatures."""
    routers: RouterDemand | None = None
    _labelled_of: dict[bytes, IntArray] = field(default_factory=dict)
    _meter_of: dict[bytes, Meter] = field(default_factory=dict)
    _cost_of: dict[tuple[object, ...], tuple[float, int | None]] = field(default_factory=dict)

    def num_loss_entries(self, forest: Forest) -> IntArray:
        """[S] how many entries the head computes for each segment's edges."""
        key = _key_of_forest(forest)
        if key not in self._labelled_of:
            edges = forest.token_edges(self.batch.offsets)
            entries = entries_of(
                forest.edges, edges, self.batch, uses_temperature=self.uses_temperature
            )
            self._labelled_of[key] = entries.of_segments(forest)
        return self._labelled_of[key]

    def meter(self, plan: Plan) -> Meter:
        """Prices of the microbatches of a plan, and of those that differ from it only in what is
        kept."""
        key = _key_of_microbatches(plan)
        if key not in self._meter_of:
            self._meter_of[key] = meter_of(plan, self.calibration)
        return self._meter_of[key]

    def splits(self, plan: Plan) -> bool:
        """Whether the loss couples rollouts across microbatches, so that scores come first."""
        return self.coupling is not None and plan.splits(self.batch, self.coupling)

    def counts_first(self, plan: Plan) -> bool:
        """Whether a statistic of routers spans microbatches, so that scores come first."""
        routers = self.routers
        return routers is not None and routers.spans(plan.forest, plan.microbatches)

    def priced(self, plan: Plan, meter: Meter, budget: int | None = None) -> Plan:
        """The plan with its cost and its peak, by a meter of its microbatches.

        Beyond a budget of bytes its cost is infinite: nobody asks what it would be.
        """
        key = (
            budget,
            _key_of_microbatches(plan),
            *(
                (microbatch.activations, microbatch.keeps_logits, microbatch.checkpointing)
                for microbatch in plan.microbatches
            ),
        )
        if key not in self._cost_of:
            peak = None if self.shape is None else peak_bytes(plan, meter, self.shape)
            fits = budget is None or peak is None or peak <= budget
            cost = plan_cost(plan, meter) if fits else math.inf
            self._cost_of[key] = cost, peak
        cost, peak = self._cost_of[key]
        return replace(
            plan,
            cost=cost,
            cost_unit=meter.unit,
            predicted_ms=cost if self.calibration else None,
            predicted_peak_bytes=peak,
            rests_on=self.calibration.describe() if self.calibration else "",
        )


def _key_of_forest(forest: Forest) -> bytes:
    """The same for forests of one batch with the same segments."""
    key = blake2b(digest_size=16)
    for column in (forest.parent, forest.start, forest.length, forest.owner_begin, forest.leaf):
        key.update(len(column).to_bytes(8))
        key.update(np.ascontiguousarray(column).data)
    return key.digest()


def _key_of_microbatches(plan: Plan) -> bytes:
    """The same for plans with the same microbatches over the same segments, wherever activations
    are."""
    key = blake2b(_key_of_forest(plan.forest), digest_size=16)
    for microbatch in plan.microbatches:
        numbers = (
            microbatch.parent,
            microbatch.tokens,
            len(microbatch.segments),
        )
        key.update(
            np.array((*numbers, *microbatch.segments, *microbatch.cache_begin), np.int64).data
        )
    return key.digest()
