"""Numbers to log of a step, from its per-token results: ratios, divergences, clipped tokens."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from forkpoint.losses.base import Loss
from forkpoint.losses.policy_loss import PolicyLoss, kl_terms, ratios
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.rollouts.batch import RolloutBatch

NAMES = {"logprobs": "logprob", "entropies": "entropy", "values": "value"}


def policy_metrics(
    per_token: Mapping[str, Tensor], batch: RolloutBatch, loss: Loss
) -> dict[str, float]:
    """Metrics by name, of the trained tokens that have run; see docs/reference/losses.md#metrics.

    Args:
        per_token: [T] by name, NaN at tokens that have not run.
        loss: the step's.
    """
    found = {"trained_tokens": float(batch.trained_tokens)}
    if not per_token or not batch.trained_tokens:
        return found
    some_T = next(iter(per_token.values()))
    views = LossViews(batch, batch_denominators(batch), some_T.device, some_T.dtype)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    ran_T = view.loss_mask & ~some_T.isnan()
    count = ran_T.sum().clamp(min=1)

    def mean(values_T: Tensor) -> Tensor:
        return torch.where(ran_T, values_T, 0).sum() / count

    means = {NAMES.get(name, name): mean(values_T) for name, values_T in per_token.items()}
    if "logprobs" in per_token:
        # Rollouts that have not run are whole, so that 0 in their place changes no other rollout.
        logprobs_T = per_token["logprobs"].nan_to_num(0.0)
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
