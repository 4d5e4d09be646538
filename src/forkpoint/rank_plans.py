"""The plan of a rank for weights that are gathered once a step, beside the one for lockstep."""

from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.byte_sizes import shown
from forkpoint.config import Config
from forkpoint.engine.host import Host
from forkpoint.engine.memory import MemoryBudgets
from forkpoint.errors import PlanError
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration


@dataclass(frozen=True)
class Ways:
    """Facts that a rank needs of both ways to hold weights (`Config.gather`)."""

    host: Host
    config: Config
    budgets: MemoryBudgets
    calibration: Callable[[], Calibration | None]
    """Finds the one that plans are priced with."""
    again: Callable[[int], Plan] | None
    """Makes the plan within another memory budget, in bytes; None where it was given."""

    def once(self, plan: Plan) -> tuple[Plan | None, str]:
        """The plan for weights that are gathered once, or None and why there is none.

        Args:
            plan: that for weights that are gathered for each microbatch.

        Whole weights count against the plan's budget, unless the configuration asks for them.
        """
        if self.config.gather == "step":
            return plan, ""
        if self.config.gather == "microbatch":
            return None, "as asked"
        group = self.host.group
        assert group is not None
        weights = group.held_bytes("step") - group.held_bytes("microbatch")
        budget, peak = plan.memory_budget_bytes, plan.predicted_peak_bytes
        if budget is None or peak is None or peak + weights <= budget:
            return plan, ""
        why_not = (
            f"whole weights ({shown(weights)} more) do not fit the memory budget of {shown(budget)}"
        )
        if self.again is None or budget <= weights:
            return None, why_not
        try:
            found = self.again(budget - weights)
        except PlanError:
            return None, why_not
        return (found, "") if found.fits else (None, why_not)
