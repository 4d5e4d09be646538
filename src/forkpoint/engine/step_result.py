"""Results of one pass over a plan, and of two."""

from dataclasses import dataclass, replace

from torch import Tensor

from forkpoint.engine.offload import OffloadStats


@dataclass(frozen=True, eq=False)
class StepResult:
    """Results of a pass over a plan: T is the batch's tokens, entries not trained are 0."""

    loss: Tensor
    per_token: dict[str, Tensor]
    """[T] by name: what the host's head gives, and "entropies" where they were asked for."""
    events: tuple[str, ...]
    phase_ms: dict[str, float]
    event_ms: tuple[float, ...]
    event_memory_bytes: tuple[int, ...] | None
    offload: OffloadStats | None = None
    """Copies to the host's memory and back; None where the plan offloads nothing."""


def after(scored: StepResult, result: StepResult) -> StepResult:
    """The result of a pass, with what a pass of scores before it ran and took."""
    held = result.event_memory_bytes
    if held is not None:
        held = (*(scored.event_memory_bytes or ()), *held)
    return replace(
        result,
        events=(*scored.events, *result.events),
        phase_ms={k: scored.phase_ms[k] + ms for k, ms in result.phase_ms.items()},
        event_ms=(*scored.event_ms, *result.event_ms),
        event_memory_bytes=held,
    )
