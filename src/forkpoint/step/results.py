"""Results of steps and of scores."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.route_replay import ReplayedRoutes
from forkpoint.engine.routing import ExpertCounts
from forkpoint.engine.staging import OffloadStats
from forkpoint.losses.base import Loss
from forkpoint.losses.outputs import PerToken
from forkpoint.plan import Plan
from forkpoint.plan.lanes import Lanes
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.metrics import policy_metrics
from forkpoint.units import format_bytes

LARGE_LOG_RATIO = 5.0
_log = logging.getLogger("forkpoint")


class WithExperts:
    """Reads how often the experts of a mixture were chosen. None unless it was asked for."""

    experts: ExpertCounts | None

    @property
    def expert_counts(self) -> Tensor | None:
        """int64 [layers, experts], of the layers that have a router, in their order: a token of N
        rollouts counts N times, whatever runs once or again."""
        return None if self.experts is None else self.experts.logical_LE

    @property
    def computed_expert_counts(self) -> Tensor | None:
        """int64 [layers, experts], the load that experts really had in one pass: each token counts
        as often as the plan runs it."""
        return None if self.experts is None else self.experts.computed_LE

    @property
    def rollout_expert_counts(self) -> Tensor | None:
        """int64 [rollouts, layers, experts]."""
        return None if self.experts is None else self.experts.by_rollout_NLE


@dataclass(frozen=True, eq=False, repr=False)
class Scores(PerToken, WithExperts):
    """`logprobs`, and `entropies` if asked for, or a critic's `values`, flat over the batch.

    All are float32 (float64 for a float64 model) [T] on the model's device; entry i belongs to
    token i, and entries outside the loss mask are 0. The value of token i is that of the tokens
    before it. Reading what the model does not give raises ConfigError.
    """

    per_token: Mapping[str, Tensor]
    plan: Plan
    events: tuple[str, ...]
    router_loss: float | None = None
    """Of `router=`, with its coefficients; None if there was none."""
    own_router_loss: float | None = None
    """The part of it that is of this rank's rollouts: those of all ranks add up to it."""
    experts: ExpertCounts | None = None
    routes: ReplayedRoutes | None = None
    """If the rollouts have `routed_experts`: for how many routers would have chosen others."""

    def __repr__(self) -> str:
        return f"Scores({' and '.join(self.per_token)}, {_plan_text(self.plan)})"


@dataclass(frozen=True, eq=False, repr=False)
class StepStats(PerToken, WithExperts):
    """Results of a step, and the model's `logprobs` or `values` before it as in `Scores`.

    Printed, it is one line of text.
    """

    loss: float
    logical_tokens: int
    unique_tokens: int
    computed_tokens: int
    plan: Plan
    events: tuple[str, ...]
    phase_ms: dict[str, float]
    """Milliseconds by phase. "prefix forward": forwards of microbatches that others read. "leaf":
    microbatches that none reads. "prefix backward": recomputes and backwards of those that others
    have read."""
    event_ms: tuple[float, ...]
    """Of each of `events`."""
    peak_memory_bytes: int | None
    """CUDA's peak of allocated bytes since it was last reset; None on the CPU."""
    per_token: Mapping[str, Tensor]
    """[T] by name; entries outside the loss mask are 0. Those of rollouts that the loss declares to
    be zero are NaN if the step has left them out: see `Config.all_logprobs`."""
    batch: RolloutBatch
    objective: Loss
    """The loss that the step was taken on."""
    offload: OffloadStats | None = None
    """Copies to the host's memory and back; None if the plan has nothing there."""
    router_loss: float | None = None
    """Of `router=`, with its coefficients and without the step's scale; `loss` is without it. None
    if the step had none."""
    experts: ExpertCounts | None = None
    routes: ReplayedRoutes | None = None
    """If the rollouts have `routed_experts`: for how many routers would have chosen others."""
    lanes: Lanes | None = None
    """On stages of a pipeline: what each stage ran and when, beside what was predicted."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, flat, by name: docs/reference/losses.md#metrics lists them.

        Means are over trained tokens that have run. On several ranks they are of this rank's
        rollouts, and `loss` is as in `StepStats`. Policy metrics are computed when this is called,
        which waits for the device once; a step that nobody asks for them does not compute them.
        """
        found = {
            "loss": self.loss,
            "given_tokens": float(self.logical_tokens),
            "computed_tokens": float(self.computed_tokens),
            "bound": self.plan.bound,
            "step_ms": sum(self.phase_ms.values()),
        }
        found |= {f"{name.replace(' ', '_')}_ms": ms for name, ms in self.phase_ms.items()}
        if self.router_loss is not None:
            found["router_loss"] = self.router_loss
        if self.plan.sent_bytes:
            found["sent_gib"] = self.plan.sent_bytes / 2**30
        if self.peak_memory_bytes is not None:
            found["peak_memory_gib"] = self.peak_memory_bytes / 2**30
        return found | policy_metrics(self.per_token, self.batch, self.objective)

    def __repr__(self) -> str:
        parts = [f"loss={self.loss:.6g}"]
        if self.router_loss is not None:
            parts.append(f"router_loss={self.router_loss:.6g}")
        parts += [_plan_text(self.plan), f"{sum(self.phase_ms.values()):,.1f} ms"]
        if self.routes is not None:
            parts.append(f"{100 * self.routes.elsewhere:.2g}% of given routes otherwise")
        if self.plan.sent_bytes:
            parts.append(f"each rank sends {format_bytes(self.plan.sent_bytes)}")
        if self.peak_memory_bytes is not None:
            parts.append(f"peak memory {format_bytes(self.peak_memory_bytes)}")
        return f"StepStats({', '.join(parts)})"


def _plan_text(plan: Plan) -> str:
    count, away = len(plan.microbatches), plan.left_out.tokens
    return (
        f"computed {plan.computed_tokens:,} of {plan.logical_tokens:,} tokens "
        + f"({away:,} without gradient left out) " * bool(away)
        + f"in {count:,} microbatch{'' if count == 1 else 'es'}, {plan.sharing} + {plan.boundary}"
    )


class Ratios:
    """Warns once of log-probs that are far from those that the rollouts carry."""

    def __init__(self) -> None:
        self._warned = False

    def read(self, loss: Tensor, logprobs_T: Tensor | None, batch: RolloutBatch) -> float:
        """A step's loss, read from the device together with the largest ratio.

        logprobs_T: of the model; None of a critic.
        """
        old = batch.old_logprobs
        if self._warned or logprobs_T is None or old is None or not batch.trained_tokens:
            return float(loss)
        trained = np.flatnonzero(batch.loss_mask)
        device = logprobs_T.device
        old_t = on_device(old[trained], device, logprobs_T.dtype)
        apart_t = (logprobs_T.detach()[on_device(trained, device)] - old_t).abs()
        apart_t = apart_t.nan_to_num(0.0)  # of rollouts that did not run
        found = (loss.detach(), apart_t.max(), (apart_t >= LARGE_LOG_RATIO).sum())
        value, largest, count = torch.stack([x.double() for x in found]).tolist()
        if count:
            self._warned = True
            _log.warning(
                "%d of %d trained tokens have a ratio of e^%g or more between the model's "
                "log-probs and their old_logprobs (the largest is e^%.1f). The old_logprobs may be "
                "of another model, another temperature or another tokenization, or stand at other "
                "tokens. This is said once.",
                *(count, len(trained), LARGE_LOG_RATIO, largest),
            )
        return value
