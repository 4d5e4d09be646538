"""Differences between models of torchtitan 0.2 and 0.3."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.titan import calls


class Version:
    """Models of torchtitan 0.2: blocks take rotary embeddings, and the inner attention
    [B, H, L, D]. Later versions override what differs."""

    head: str = "output"
    """The model's attribute that is its head; None on a stage without one."""
    linear: Definition = ("torch.nn.modules.linear", "Linear")
    """The class of the head."""
    packages: tuple[str, ...] = ("torchtitan.models.attention.", "torchtitan.models.moe.moe.")
    """Modules outside of the model's package whose classes have been shown exact."""
    inner: Definition = ("torchtitan.models.attention", "ScaledDotProductAttentionWrapper")
    """The inner attention whose stock forwards have been shown exact; its module defines every
    kind."""
    remedy: str = "Set attn_type to 'sdpa' in the model's arguments."
    """How to build a model that has it."""

    def refused(self, module: nn.Module) -> str | None:
        """A reason, with a remedy, why a module has not been shown exact; None if there is none."""
        return None

    def sizes(self, model: Any) -> Any:
        """The sizes of a model, under the names of 0.2's arguments."""
        return model.model_args

    def positions(self, model: Any, rope: str) -> int:
        """For how many positions there are rotary embeddings. rope: their buffer's name in 0.2."""
        return model.get_buffer(rope).shape[0]

    def set_attention(self, blocks: Iterable[Any], changes: Changes) -> None:
        """Let attention of blocks run microbatches, until the changes are undone."""
        calls.set_attention(blocks, changes)

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
        """Run all blocks. split: torchtitan's own context parallelism is in the model."""
        table = model.get_buffer(rope)
        given = {"positions": positions_1T} if split else {}
        if not split:  # else each layer looks them up
            table = table[positions_1T[0]]
        for block in model.layers.values():
            hidden_1TC = block(hidden_1TC, table, attention_masks=masks, **given)
        return hidden_1TC

    def build(self, model: Any, layers: int, vocabulary: int) -> Any:
        """A model of fewer layers and tokens, its weights not initialized."""
        args = deepcopy(model.model_args)  # with attributes that are no fields of it
        args.n_layers, args.vocab_size = layers, vocabulary
        return plain_class(model)(args)

    def initialize(self, model: Any, device: Any) -> None:
        """Draw weights and compute buffers."""
        model.init_weights(buffer_device=device)


class Version03(Version):
    """torchtitan 0.3: attention has rotary embeddings, and gives its inner one [B, L, H, D]."""

    head: str = "lm_head"
    linear: Definition = ("torchtitan.models.common.linear", "Linear")
    packages: tuple[str, ...] = (
        "torchtitan.protocols.module.",
        *(
            f"torchtitan.models.common.{name}."
            for name in ("attention", "embedding", "feed_forward", "linear", "nn_modules", "rope")
        ),
    )
    inner: Definition = ("torchtitan.models.common.attention", "ScaledDotProductAttention")
    remedy: str = (
        "Set inner_attention of each layer's attention in the model's configuration to "
        "ScaledDotProductAttention.Config() before it is built."
    )

    def refused(self, module: nn.Module) -> str | None:
        if plain_class(module).__module__ == "torchtitan.models.common.moe":
            return (
                "is a mixture of experts of torchtitan 0.3, which computes in bfloat16 for weights "
                "of every dtype and has not been shown exact. Use a dense model, or torchtitan "
                "0.2.2."
            )
        return None

    def sizes(self, model: Any) -> Any:
        config, attention = model.config, model.config.layers[0].attention
        return SimpleNamespace(
            dim=config.dim,
            vocab_size=config.vocab_size,
            n_layers=len(config.layers),
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads,
            head_dim=attention.head_dim or config.dim // attention.n_heads,
            enable_weight_tying=config.enable_weight_tying,
        )

    def positions(self, model: Any, rope: str) -> int:
        return min(block.attention.rope.cache.shape[0] for block in model.layers.values())

    def set_attention(self, blocks: Iterable[Any], changes: Changes) -> None:
        calls.set_inner_attention(blocks, changes)

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

    def build(self, model: Any, layers: int, vocabulary: int) -> Any:
        config = model.config
        return replace(
            config,
            layers=config.layers[:layers],
            vocab_size=vocabulary,
            tok_embeddings=replace(config.tok_embeddings, num_embeddings=vocabulary),
            lm_head=replace(config.lm_head, out_features=vocabulary),
        ).build()

    def initialize(self, model: Any, device: Any) -> None:
        model.init_states(buffer_device=device)
