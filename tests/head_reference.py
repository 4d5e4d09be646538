"""Log-probs and entropies of forkpoint's head as a pair, and the yardstick of its tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.head import token_outputs


def token_logprobs(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T], and entropies [T] where they are asked for."""
    found = token_outputs(*given, **options)
    return found["logprobs"], found.get("entropies")


def token_logprobs_reference(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature_T: Tensor | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain PyTorch with all logits alive."""
    logits_TV = logits_reference(
        hidden_TC, weight_VC, bias_V, temperature_T, softcap=softcap, logit_scale=logit_scale
    )
    logprobs_TV = logits_TV.log_softmax(-1)
    logprobs_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1) if entropy else None


def logits_reference(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None = None,
    temperature_T: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> Tensor:
    """All logits, at least in float32."""
    logits_TV = F.linear(hidden_TC, weight_VC, bias_V)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if logit_scale is not None:
        logits_TV = logits_TV * logit_scale
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    return logits_TV if temperature_T is None else logits_TV / temperature_T[:, None]
