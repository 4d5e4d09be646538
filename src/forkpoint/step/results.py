"""Results of steps and scores, and metrics."""

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
from forkpoint.losses.policy_loss import PolicyLoss, kl_terms, ratios
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.plan import Plan
from forkpoint.plan.lanes import Lanes
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import format_bytes

NAMES = {"logprobs": "logprob", "entropies": "entropy", "values": "value"}


@torch.inference_mode(mode=False)  # gradients tell which tokens are clipped
def policy_metrics(
    per_token: Mapping[str, Tensor], batch: RolloutBatch, loss: Loss, plan: Plan
) -> dict[str, float]:
    """Metrics by name, over the trained tokens that ran; see docs/reference/losses.md#metrics.

    Args:
        per_token: [T] by name.
        loss: the loss of the step.
        plan: the plan that ran.
    """
    ran = batch.loss_mask & labels_run(batch.offsets, plan.run_lengths)
    averaged = int(np.count_nonzero(ran))
    found = {
        "trained_tokens": float(batch.trained_tokens),
        "averaged_tokens": float(averaged),
    }
    if not per_token or not averaged:
        return found
    some_T = next(iter(per_token.values()))
    views = LossViews(batch, batch_denominators(batch), some_T.device, some_T.dtype)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    ran_T = on_device(ran, some_T.device)

    def mean(values_T: Tensor) -> Tensor:
        return torch.where(ran_T, values_T, 0).sum() / averaged

    means = {NAMES.get(name, name): mean(values_T) for name, values_T in per_token.items()}
    if "logprobs" in per_token:
        # Tokens that did not run are whole rollouts, so 0 at these tokens changes no other rollout.
        logprobs_T = torch.where(ran_T, per_token["logprobs"], 0)
        if view.old_logprobs is not None:
            change_T = torch.where(ran_T, logprobs_T - view.old_logprobs, 0)
            means["ratio_mean"] = mean(ratios(change_T))
            means["ratio_max"] = torch.where(ran_T, ratios(change_T), 0).max()
            means["approx_kl"] = mean(kl_terms(change_T, "k3"))
            if isinstance(loss, PolicyLoss):
                means["clip_fraction"] = mean(loss.clipped(logprobs_T, view).to(some_T.dtype))
        if view.reference_logprobs is not None:
            away_T = torch.where(ran_T, view.reference_logprobs - logprobs_T, 0)
            means["reference_kl"] = mean(kl_terms(away_T, "k3"))
    values = torch.stack([value.double() for value in means.values()]).tolist()
    return found | dict(zip(means, values, strict=True))


LARGE_LOG_RATIO = 5.0
_log = logging.getLogger("forkpoint")


class WithExperts:
    """Counts of chosen experts, for steps with `router=` or `expert_counts=True`; otherwise
    None."""

    experts: ExpertCounts | None

    @property
    def expert_counts(self) -> Tensor | None:
        """int64 [layers, experts], for layers with a router, in order. A token that N rollouts
        contain counts N times."""
        return None if self.experts is None else self.experts.logical_LE

    @property
    def computed_expert_counts(self) -> Tensor | None:
        """int64 [layers, experts], the load of the experts in one pass: a token counts each time
        that the plan runs it."""
        return None if self.experts is None else self.experts.computed_LE

    @property
    def rollout_expert_counts(self) -> Tensor | None:
        """int64 [rollouts, layers, experts], the counts of each rollout."""
        return None if self.experts is None else self.experts.by_rollout_NLE


@dataclass(frozen=True, eq=False, repr=False)
class Scores(PerToken, WithExperts):
    """Results of `Policy.score`: `logprobs`, `entropies` on request, or the `values` of a critic.

    All are float32 (float64 for a float64 model) [T] on the device of the model. Entry i belongs to
    token i of the batch. Entries outside the loss mask are 0. The value of token i is computed from
    the tokens before it. Reading a result that the model does not have raises ConfigError.
    """

    per_token: Mapping[str, Tensor]
    plan: Plan
    events: tuple[str, ...]
    router_loss: float | None = None
    """Value of the router loss, with its coefficients; None without `router=`."""
    own_router_loss: float | None = None
    """Part of `router_loss` from the rollouts of this rank. The sum over ranks is `router_loss`."""
    experts: ExpertCounts | None = None
    routes: ReplayedRoutes | None = None
    """Counts of choices in `routed_experts` that differ from those of the routers. None without
    routed_experts."""

    def __repr__(self) -> str:
        return f"Scores({' and '.join(self.per_token)}, {_plan_text(self.plan)})"


@dataclass(frozen=True, eq=False, repr=False)
class StepStats(PerToken, WithExperts):
    """Results of `Policy.forward_backward`, with `logprobs` or `values` as in `Scores`.

    `logprobs` are those of the weights before the optimizer step. `print(stats)` writes one line.
    """

    loss: float
    """Loss of the step, without `scale` and without the router loss."""
    logical_tokens: int
    """Number of tokens of all rollouts."""
    unique_tokens: int
    """Number of tokens with each shared token counted once."""
    computed_tokens: int
    """Number of tokens that ran on this rank."""
    plan: Plan
    """Plan that ran."""
    events: tuple[str, ...]
    """Events that ran, in order, as in `Plan.events`."""
    phase_ms: dict[str, float]
    """Milliseconds of each phase. "prefix forward": forwards of microbatches that others read.
    "leaf": microbatches that no other one reads. "prefix backward": recomputation and backwards of
    microbatches that others read."""
    event_ms: tuple[float, ...]
    """Milliseconds of each of `events`."""
    peak_memory_bytes: int | None
    """Peak of allocated bytes on CUDA since the last reset of the peak; None on the CPU."""
    per_token: Mapping[str, Tensor]
    """Results [T] by name, float32 (float64 for a float64 model). Entries outside the loss mask are
    0. Entries of rollouts that the step left out are NaN: see `Config.all_logprobs`."""
    batch: RolloutBatch
    """Rollouts of the step."""
    objective: Loss
    """Loss of the step."""
    offload: OffloadStats | None = None
    """Copies to host memory and back; None if the plan stores nothing there."""
    router_loss: float | None = None
    """Value of the router loss, with its coefficients, without the scale of the step; None without
    `router=`. `loss` does not include it."""
    experts: ExpertCounts | None = None
    routes: ReplayedRoutes | None = None
    """Counts of choices in `routed_experts` that differ from those of the routers. None without
    routed_experts."""
    lanes: Lanes | None = None
    """Measured and predicted times of the stages of a pipeline."""

    def metrics(self) -> dict[str, float]:
        """Make a flat dictionary for a logger: docs/reference/losses.md#metrics lists its names.

        Means are over the trained tokens that ran. On several ranks they are over the rollouts of
        this rank, and `loss` is that of `StepStats`. Each call computes the metrics of the policy,
        and waits for the device once.
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
        return found | policy_metrics(self.per_token, self.batch, self.objective, self.plan)

    def __repr__(self) -> str:
        parts = [f"loss={self.loss:.6g}"]
        if self._cancels():
            parts.append("on-policy advantages sum to 0")
        if self.router_loss is not None:
            parts.append(f"router_loss={self.router_loss:.6g}")
        parts += [_plan_text(self.plan), f"{sum(self.phase_ms.values()):,.1f} ms"]
        if self.routes is not None:
            parts.append(f"{100 * self.routes.elsewhere:.2g}% of routed_experts not chosen here")
        if self.plan.sent_bytes:
            parts.append(f"each rank sends {format_bytes(self.plan.sent_bytes)}")
        if self.peak_memory_bytes is not None:
            parts.append(f"peak memory {format_bytes(self.peak_memory_bytes)}")
        return f"StepStats({', '.join(parts)})"

    def _cancels(self) -> bool:
        """Whether the loss is 0 only because every ratio is 1, so that the gradient is not 0."""
        advantages = np.abs(self.batch.advantages[self.batch.loss_mask])
        if not isinstance(self.objective, PolicyLoss) or self.batch.old_logprobs is not None:
            return False
        return abs(self.loss) <= 1e-6 * advantages.max(initial=0.0) and bool(advantages.any())


def _plan_text(plan: Plan) -> str:
    count, away = len(plan.microbatches), plan.left_out.tokens
    return (
        f"computed {plan.computed_tokens:,} of {plan.logical_tokens:,} tokens "
        + f"({away:,} without gradient left out) " * bool(away)
        + f"in {count:,} microbatch{'' if count == 1 else 'es'}, {plan.sharing} + {plan.boundary}"
    )


class Ratios:
    """Warns once if log-probs of the model are far from `old_logprobs`."""

    def __init__(self) -> None:
        self._warned = False

    def read(self, loss: Tensor, logprobs_T: Tensor | None, batch: RolloutBatch) -> float:
        """Read the loss of a step from the device, together with the largest ratio.

        logprobs_T: log-probs of the model; None for a critic.
        """
        old = batch.old_logprobs
        if self._warned or logprobs_T is None or old is None or not batch.trained_tokens:
            return float(loss)
        trained = np.flatnonzero(batch.loss_mask)
        device = logprobs_T.device
        old_t = on_device(old[trained], device, logprobs_T.dtype)
        apart_t = (logprobs_T.detach()[on_device(trained, device)] - old_t).abs()
        apart_t = apart_t.nan_to_num(0.0)  # NaN at rollouts that did not run
        found = (loss.detach(), apart_t.max(), (apart_t >= LARGE_LOG_RATIO).sum())
        value, largest, count = torch.stack([x.double() for x in found]).tolist()
        if count:
            self._warned = True
            _log.warning(
                "%d of %d trained tokens have a ratio of e^%g or more between the model's "
                "probabilities and those of old_logprobs (the largest is e^%.1f). The old_logprobs "
                "may be of another model, another temperature or another tokenization, or belong "
                "to other tokens. This warning is logged once.",
                *(count, len(trained), LARGE_LOG_RATIO, largest),
            )
        return value
