"""Dense attention written out, with windows and sinks that any model's layers can be given."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.hosts import refusals
from forkpoint.hosts.transformers import refusals as of_transformers

PLAIN_ATTENTION = "forkpoint_plain"
# Steps refuse functions and hooks of packages that they do not know.
of_transformers.ATTENTION_PACKAGES += (__name__,)
refusals.KNOWN_HOOKS += ((__name__, "force_windows_and_sinks.<locals>.add"),)


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rollouts, written out.

    query is [B, H, L, D], key and value have K heads, and [B, L, H, E] comes back. Scores are a
    full matrix in the inputs' dtype, masked by position; sinks join the softmax as one more column.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (
        query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None, :]
    hidden = (distance < 0) | (distance >= (sliding_window or query.shape[2]))
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    if s_aux is not None:
        column = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : query.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(PLAIN_ATTENTION, plain_attention)


def force_windows_and_sinks(causal: PreTrainedModel, *, window: int | None, sinks: bool) -> None:
    """Give every attention layer a window and learnable sinks that its family does not have.

    Both are passed through the layers' call arguments to whatever attention function is set; use
    `PLAIN_ATTENTION` for the dense side, since the stock functions know no sinks.
    """
    generator = torch.Generator().manual_seed(0)
    for module in causal.modules():
        if not hasattr(module, "layer_idx") or not hasattr(module, "q_proj"):
            continue
        extra: dict[str, Any] = {}
        if sinks:
            heads = causal.config.num_attention_heads
            weight = next(module.parameters())
            values = torch.randn(heads, generator=generator).to(weight)
            module.sinks = nn.Parameter(values)
            extra["s_aux"] = module.sinks
        if window is not None and hasattr(module, "sliding_window"):
            setattr(module, "sliding_window", window)  # noqa: B010
        elif window is not None:
            extra["sliding_window"] = window

        def add(_: nn.Module, args: tuple, kwargs: dict, extra: dict = extra) -> tuple[tuple, dict]:
            return args, {**kwargs, **extra}

        module.register_forward_pre_hook(add, with_kwargs=True)
