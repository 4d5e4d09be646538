"""Statistics of steps and scores as one line of text."""

from collections.abc import Mapping

from torch import Tensor

from forkpoint.plan import Plan
from forkpoint.units import format_bytes


def step_line(
    loss: float,
    plan: Plan,
    phase_ms: Mapping[str, float],
    peak_memory_bytes: int | None,
    router_loss: float | None = None,
    off_route: float | None = None,
) -> str:
    """The line that `print(stats)` writes after a step.

    The memory is CUDA's peak; it is left out on the CPU (None). The last two are of mixtures of
    experts: the loss of routers, and the share of given routes that routers would not have taken.
    """
    parts = [f"loss={loss:.6g}"]
    if router_loss is not None:
        parts.append(f"router_loss={router_loss:.6g}")
    parts += [_plan_text(plan), f"{sum(phase_ms.values()):,.1f} ms"]
    if off_route is not None:
        parts.append(f"{100 * off_route:.2g}% of given routes otherwise")
    if peak_memory_bytes is not None:
        parts.append(f"peak memory {format_bytes(peak_memory_bytes)}")
    return f"StepStats({', '.join(parts)})"


def scores_line(per_token: Mapping[str, Tensor], plan: Plan) -> str:
    """The line that `print(scores)` writes."""
    return f"Scores({' and '.join(per_token)}, {_plan_text(plan)})"


def _plan_text(plan: Plan) -> str:
    count = len(plan.microbatches)
    away = plan.left_out.tokens
    return (
        f"computed {plan.computed_tokens:,} of {plan.logical_tokens:,} tokens "
        + f"({away:,} without gradient left out) " * bool(away)
        + f"in {count:,} microbatch{'' if count == 1 else 'es'}, {plan.sharing} + {plan.boundary}"
    )
