"""Tools for tests of exactness.

With `dense_run` (ordinary training) and `lifted_upcasts` (float64 throughout) they check that a
family, a kernel or a loss is exact; see docs/develop/adding-a-model.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.refusals import ReadOnlyHook as ReadOnlyHook
from forkpoint.hosts.upcasts import lifted_upcasts as lifted_upcasts
from forkpoint.ops.attention import Kernel, registry
from forkpoint.verify.dense import DenseRun as DenseRun
from forkpoint.verify.dense import dense_run as dense_run


@contextmanager
def registered_kernel(kernel: Kernel) -> Iterator[None]:
    """Register a kernel inside the block, for `Config(attention_kernel=kernel.name)`; "auto" tries
    it first.

    Use it to develop a kernel; see docs/develop/adding-a-kernel.md.
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


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    critic: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """A random model of a family (llama, qwen3): 3 layers, 4 query and 2 key-value heads.

    critic: whether to make the family's token classifier with one label and no dropout, instead of
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
    if config.get_text_config() is not config:
        raise UnsupportedError(
            f"{family} is multimodal, and its model would have its full size. Give a family of "
            "text models, such as qwen3."
        )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    softcap = getattr(config, "attn_logit_softcapping", None)
    # Some versions of transformers choose sdpa, which ignores a softcap.
    options = {} if softcap is None else {"attn_implementation": "eager"}
    model = auto.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            # With the usual initialisation, attention is nearly uniform and all norm weights are
            # one.
            spread = 0.3 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape) * spread
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    torch.set_rng_state(state)
    return model.to(dtype)
