"""TRL's fused head in plain torch, for TRL 1.15 where there is no Triton.

That version's head is made of Triton kernels. Without them TRL has None in its place, and its
trainers end in an AttributeError at their first loss.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from trl.trainer import utils


class PlainHead:
    """All logits at once, and everything after their product in float64."""

    @staticmethod
    def apply(
        hidden_TC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        temperature: float,
        _: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        logits_TV = F.linear(hidden_TC, weight_VC, bias_V).double() * logit_scale
        if softcap is not None:
            logits_TV = softcap * (logits_TV / softcap).tanh()
        logits_TV = logits_TV / temperature
        logp_TV = logits_TV.log_softmax(-1)
        taken_T = logp_TV.gather(-1, labels_T[:, None])[:, 0]
        found = {
            "entropy": -(logp_TV.exp() * logp_TV).sum(-1).float(),
            "log_sum_sq_probs": (2 * logp_TV).logsumexp(-1).float().detach(),
            "mean_logits": logits_TV.mean(-1).float().detach(),
            "is_top1": logits_TV.argmax(-1) == labels_T,
        }
        return taken_T.float(), *(x if name in outputs else None for name, x in found.items())


def give_trl_a_head() -> None:
    """Put it where TRL has none."""
    if getattr(utils, "_ChunkedLogProbFunction", PlainHead) is None:
        utils._ChunkedLogProbFunction = PlainHead
