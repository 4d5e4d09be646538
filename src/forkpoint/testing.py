"""Tools for tests of exactness: tiny random models, and dense attention written out.

With `dense_run` (ordinary training) and `lifted_upcasts` (float64 throughout) they check that a
family, a kernel or a loss is exact; see docs/develop/adding-a-model.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.hosts.refusals import ReadOnlyHook as ReadOnlyHook
from forkpoint.hosts.upcasts import lifted_upcasts as lifted_upcasts
from forkpoint.ops.attention import Kernel, registry
from forkpoint.verify.dense import DenseRun as DenseRun
from forkpoint.verify.dense import dense_run as dense_run

PLAIN_ATTENTION = "forkpoint_plain"


@contextmanager
def registered_kernel(kernel: Kernel) -> Iterator[None]:
    """Within it `Config(attention_kernel=kernel.name)` finds the kernel, and "auto" asks it first.

    For kernels that are being written; see docs/develop/adding-a-kernel.md.
    """
    before = registry.KERNELS
    assert kernel.name not in {k.name for k in before}, f"there is a kernel {kernel.name!r} already"
    try:
        registry.KERNELS = (kernel, *before)
        registry.forget_choices()
        yield
    finally:
        registry.KERNELS = before
        registry.forget_choices()


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


def force_windows_and_sinks(
    causal: PreTrainedModel, *, window: int | None, sinks: bool, seed: int = 0
) -> None:
    """Give every attention layer a window and learnable sinks that its family does not have.

    Both are passed through the layers' call arguments to whatever attention function is set; use
    `PLAIN_ATTENTION` for the dense side, since the stock functions know no sinks.
    """
    generator = torch.Generator().manual_seed(seed)
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


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    critic: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """A random model of a family (llama, qwen3): 3 layers, 4 query and 2 key-value heads.

    critic: whether it is the family's token classifier with one label and no dropout, in place of
        its language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    auto = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    if critic:
        sizes |= {"num_labels": 1, "classifier_dropout": 0.0}
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    softcap = getattr(config, "attn_logit_softcapping", None)
    # Some versions of transformers choose sdpa, which leaves a softcap out.
    options = {} if softcap is None else {"attn_implementation": "eager"}
    model = auto.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initialisation is so small that attention is uniform and norms are all one.
            spread = 0.3 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape) * spread
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    torch.set_rng_state(state)
    return model.to(dtype)
