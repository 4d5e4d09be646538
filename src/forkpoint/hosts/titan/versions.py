"""Differences between models of torchtitan 0.2 and 0.3, and replaced forwards of their inner
attention.

Blocks pass attention masks to the inner attention, and check their class: torch's BlockMask for
"flex" attention. The microbatch is passed in that argument.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from forkpoint.engine.changes import Changes
from forkpoint.hosts.attention import attend
from forkpoint.hosts.calls import CallContext, refuse_call
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.modules import plain_class

MASKS = "attention_masks"
"""The argument that layers pass on."""


class CarriedContext(CallContext, BlockMask):
    """Context of a call, passed as the attention mask. torchtitan passes it on unread."""

    def __init__(self, context: CallContext) -> None:
        vars(self).update(vars(context))


def attend_BLHD(
    module: nn.Module,
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    *,
    attention_masks: object = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Forward of the inner attention in microbatches: [B, L, H, E].

    With tensor parallelism, inputs and output are DTensors split by heads.
    """
    if not isinstance(attention_masks, CallContext):
        refuse_call()
    q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLHD, k_BLKD, v_BLKE))
    output = attend(attention_masks, module, q, k, v, scale=scale)
    if not isinstance(q_BLHD, DTensor):
        return output
    return DTensor.from_local(output, q_BLHD.device_mesh, q_BLHD.placements, run_check=False)


def attend_BHLD(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    *,
    block_mask: object = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Forward of the inner attention in microbatches: [B, H, L, E].

    With tensor parallelism it runs this rank's heads. Some families pass DTensors.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BHLD, k_BKLD, v_BKLE))
    return attend_BLHD(module, q, k, v, attention_masks=block_mask, scale=scale).transpose(1, 2)


class Version:
    """Models of torchtitan 0.2. Blocks take rotary embeddings, and the inner attention takes [B, H,
    L, D]. Classes of later versions override differences."""

    head: str = "output"
    """Name of the model's attribute with its head, which is None on stages without it."""
    linear: Definition = ("torch.nn.modules.linear", "Linear")
    """The class of the head."""
    packages: tuple[str, ...] = ("torchtitan.models.attention.", "torchtitan.models.moe.moe.")
    """Python modules outside the model's package whose classes have been shown exact."""
    inner: Definition = ("torchtitan.models.attention", "ScaledDotProductAttentionWrapper")
    """The supported inner attention. Its Python module defines all kinds."""
    remedy: str = "Set attn_type to 'sdpa' in the model's arguments."
    """How to build a model with it."""
    bias: str = "expert_bias"
    counts: str = "tokens_per_expert"
    """Names of buffers of a mixture of experts: bias of the scores, and number of tokens of each
    expert."""
    score_dimensions: int = 2
    """Number of dimensions of a router's scores."""

    def refused(self, module: nn.Module) -> str | None:
        """Reason and remedy if a module has not been shown exact; otherwise None."""
        return None

    def expert_dtype(self, mixture: Any) -> torch.dtype:
        """The narrowest dtype that experts compute in, for weights of any dtype."""
        return torch.bfloat16 if mixture.experts.use_grouped_mm else torch.float32

    def sizes(self, model: Any) -> Any:
        """The sizes of a model, under the names of 0.2's arguments."""
        return model.model_args

    def positions(self, model: Any, rope: str) -> int:
        """Number of positions with rotary embeddings. rope: name of their buffer in 0.2."""
        return model.get_buffer(rope).shape[0]

    def give_logits(self, model: Any, changes: Changes) -> None:
        """Let the model's own forward return logits, until the changes are undone."""

    def autocast(self, trainer: Any) -> AbstractContextManager[object]:
        """The context of mixed precision in which a trainer runs its model."""
        return trainer.maybe_enable_amp

    def microbatches(self, trainer: Any) -> int:
        """Number of batches that a trainer's step takes, one for each microbatch of its
        pipeline."""
        return 1

    def set_attention(self, blocks: Iterable[Any], changes: Changes) -> None:
        """Replace attention of blocks by that of microbatches, until the changes are undone."""
        for block in blocks:
            inner = block.attention.inner_attention
            changes.set(vars(block.attention), "attn_type", "flex")
            changes.replace_forward(inner, MethodType(attend_BHLD, inner))

    def run_blocks(
        self,
        model: Any,
        hidden_1TC: Tensor,
        positions_1T: Tensor,
        masks: object,
        rope: str,
        *,
        split: bool,
    ) -> Tensor:
        """Run all blocks. split: whether the model uses torchtitan's own context parallelism."""
        table = model.get_buffer(rope)
        given = {"positions": positions_1T} if split else {}
        if not split:  # else each layer looks them up
            table = table[positions_1T[0]]
        for block in model.layers.values():
            hidden_1TC = block(hidden_1TC, table, attention_masks=masks, **given)
        return hidden_1TC

    def build(self, model: Any, layers: int, vocabulary: int, positions: int) -> Any:
        """A model with these numbers of layers and token ids, at least `positions` rotary
        embeddings, and uninitialized weights."""
        args = deepcopy(model.model_args)  # with attributes that are no fields of it
        args.n_layers, args.vocab_size = layers, vocabulary
        args.max_seq_len = max(args.max_seq_len, positions)
        return plain_class(model)(args)

    def initialize(self, model: Any, device: Any) -> None:
        """Draw weights and compute buffers."""
        model.init_weights(buffer_device=device)


DISPATCHERS = ("LocalTokenDispatcher", "AllToAllTokenDispatcher")
"""Classes of torchtitan 0.3 that send tokens to experts and have been shown exact."""


class Version03(Version):
    """Models of torchtitan 0.3. Attention has the rotary embeddings, and the inner attention takes
    [B, L, H, D]."""

    head: str = "lm_head"
    linear: Definition = ("torchtitan.models.common.linear", "Linear")
    packages: tuple[str, ...] = (
        "torchtitan.protocols.module.",
        *(
            f"torchtitan.models.common.{name}."
            for name in (
                *("attention", "embedding", "feed_forward", "linear", "moe"),
                *("nn_modules", "rope"),
            )
        ),
    )
    inner: Definition = ("torchtitan.models.common.attention", "ScaledDotProductAttention")
    remedy: str = (
        "Set inner_attention of each layer's attention in the model's configuration to "
        "ScaledDotProductAttention.Config() before it is built."
    )

    bias: str = "expert_bias_E"
    counts: str = "tokens_per_expert_E"
    score_dimensions: int = 3

    def refused(self, module: nn.Module) -> str | None:
        dispatcher = type(vars(module).get("token_dispatcher"))
        if dispatcher is not type(None) and dispatcher.__name__ not in DISPATCHERS:
            return (
                f"sends tokens to experts by a {dispatcher.__name__}, which has not been shown "
                "exact. Set moe_comm_backend to 'standard' where the model is configured."
            )
        if plain_class(module).__name__ == "MTPTransformerBlock":
            return (
                "predicts tokens beyond the next, which has not been shown exact. Set "
                "num_mtp_layers to 0 where the model is configured."
            )
        return None

    def expert_dtype(self, mixture: Any) -> torch.dtype:
        return torch.bfloat16

    def sizes(self, model: Any) -> Any:
        config, layers = model.config, model.config.layers
        attention = layers[0].attention
        found = {
            "dim": config.dim,
            "vocab_size": config.vocab_size,
            "n_layers": len(layers),
            "n_heads": attention.n_heads,
            "enable_weight_tying": config.enable_weight_tying,
        }
        if hasattr(attention, "kv_lora_rank"):
            latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
            found |= {name: getattr(attention, name) for name in (*latent, "v_head_dim")}
        else:
            found["n_kv_heads"] = attention.n_kv_heads
            found["head_dim"] = attention.head_dim or config.dim // attention.n_heads
        dense = [layer.feed_forward for layer in layers if layer.moe is None]
        if dense:
            found["inter_dim"] = dense[0].w1.out_features
        mixtures = [layer.moe for layer in layers if layer.moe is not None]
        found["n_dense_layers"] = len(dense)
        if mixtures:
            moe = mixtures[0]
            width, shared = moe.routed_experts.inner_experts.hidden_dim, moe.shared_experts
            found["moe_inter_dim"] = width
            found["moe_args"] = SimpleNamespace(
                num_experts=moe.num_experts,
                top_k=moe.router.top_k,
                num_shared_experts=0 if shared is None else shared.w1.out_features // width,
                load_balance_coeff=moe.load_balance_coeff,
            )
        return SimpleNamespace(**found)

    def positions(self, model: Any, rope: str) -> int:
        return min(block.attention.rope.cache.shape[0] for block in model.layers.values())

    def give_logits(self, model: Any, changes: Changes) -> None:
        # A trainer whose loss runs the head in chunks sets the model to skip it.
        changes.set(vars(model), "_skip_lm_head", False)

    def autocast(self, trainer: Any) -> AbstractContextManager[object]:
        return nullcontext()  # its precision is that of fully_shard

    def microbatches(self, trainer: Any) -> int:
        return trainer.num_pipeline_parallel_microbatches

    def set_attention(self, blocks: Iterable[Any], changes: Changes) -> None:
        for block in blocks:
            inner = block.attention.inner_attention
            changes.replace_forward(inner, MethodType(attend_BLHD, inner))

    def run_blocks(
        self,
        model: Any,
        hidden_1TC: Tensor,
        positions_1T: Tensor,
        masks: object,
        rope: str,
        *,
        split: bool,
    ) -> Tensor:
        for block in model.layers.values():
            hidden_1TC = block(hidden_1TC, attention_masks=masks, positions=positions_1T)
        return hidden_1TC

    def build(self, model: Any, layers: int, vocabulary: int, positions: int) -> Any:
        config, few = model.config, []
        for index in range(layers):
            # More layers than the model has repeat its own.
            layer = config.layers[index % len(config.layers)]
            rope = layer.attention.rope
            rope = replace(rope, max_seq_len=max(rope.max_seq_len, positions))
            few.append(replace(layer, attention=replace(layer.attention, rope=rope)))
        return replace(
            config,
            layers=few,
            vocab_size=vocabulary,
            tok_embeddings=replace(config.tok_embeddings, num_embeddings=vocabulary),
            lm_head=replace(config.lm_head, out_features=vocabulary),
        ).build()

    def initialize(self, model: Any, device: Any) -> None:
        model.init_states(buffer_device=device)
