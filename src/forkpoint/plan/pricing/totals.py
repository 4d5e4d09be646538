"""Sums over the plans of many batches, in the memory of a few numbers. Imports no torch."""

from collections import Counter

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of
from forkpoint.plan.runs import LeftOut


class Totals:
    """Sums over plans, one a batch: what an epoch of optimizer steps runs, and what it saves.

    batches, rollouts, microbatches: how many.
    logical_tokens, unique_tokens, computed_tokens: as in each plan.
    padding: places that are run besides.
    left_out: what gives no gradient, and is not run.
    dense, shared: the work of nobody sharing, which leaves out the same, and of the plans.
    kinds: how many batches each "sharing + boundary" was taken for.
    predicted_ms: of all steps; None without a calibration.
    predicted_peak_bytes: the largest of any batch; None without a model's shape.
    """

    def __init__(self) -> None:
        self.shape: ModelShape | None = None
        self.batches: int = 0
        self.rollouts: int = 0
        self.microbatches: int = 0
        self.logical_tokens: int = 0
        self.unique_tokens: int = 0
        self.computed_tokens: int = 0
        self.padding: int = 0
        self.left_out: LeftOut = LeftOut()
        self.dense: Work | None = None
        self.shared: Work | None = None
        self.kinds: Counter[str] = Counter()
        self.predicted_ms: float | None = None
        self.predicted_peak_bytes: int | None = None
        self.rests_on: str = ""
        self._cost: float = 0.0
        self._dense_cost: float | None = 0.0

    def add(self, plan: Plan) -> None:
        """Count one more batch, by its plan; all plans are made with the same settings."""
        self.batches += 1
        self.shape, self.rests_on = plan.shape, plan.rests_on
        self.rollouts += plan.rollouts
        self.microbatches += len(plan.microbatches)
        self.logical_tokens += plan.logical_tokens
        self.unique_tokens += plan.unique_tokens
        self.computed_tokens += plan.computed_tokens
        self.padding += plan.padded_tokens - plan.computed_tokens
        self.left_out += plan.left_out
        self.dense = plan.dense if self.dense is None else self.dense + plan.dense
        self.shared = plan.shared if self.shared is None else self.shared + plan.shared
        self.kinds[f"{plan.sharing} + {plan.boundary}"] += 1
        if plan.predicted_ms is not None:
            self.predicted_ms = (self.predicted_ms or 0.0) + plan.predicted_ms
        if plan.predicted_peak_bytes is not None:
            peak = self.predicted_peak_bytes or 0
            self.predicted_peak_bytes = max(peak, plan.predicted_peak_bytes)
        self._cost += plan.cost
        dense = [c.cost for c in plan.candidates if c.sharing == "none" and c.cost is not None]
        if self._dense_cost is not None:
            self._dense_cost = self._dense_cost + min(dense) if dense else None

    @property
    def bound(self) -> float:
        """The counted speed-up over dense: FLOPs where the shape is known, else tokens."""
        if self.dense is None or self.shared is None:
            return 1.0
        return bound_of(self.dense, self.shared, self.shape)

    @property
    def predicted_speedup(self) -> float | None:
        """Dense over the plans as the planner prices them: with padding, microbatches too short to
        fill a device and repeated forwards. None where dense was not looked at."""
        if not self._dense_cost or not self._cost:
            return None
        return self._dense_cost / self._cost
