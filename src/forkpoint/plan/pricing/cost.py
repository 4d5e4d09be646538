"""Counted floating-point operations, bytes and tokens of a batch for a model shape.

This module defines the bound of every speed-up: FLOPs of dense training divided by FLOPs of the
edges that run. On both sides attention counts visible pairs, and the head counts labelled tokens,
once for each temperature. Recomputation, idle instructions and padding do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.mixtures import active_intermediate, mixture_shape, only_experts
from forkpoint.plan.pricing.sizes import MOST_LAYERS, REMEDY, count, needed, size
from forkpoint.rollouts.batch import short
from forkpoint.tree.forest import Forest, IntArray

# A backward runs two matrix products for each product of the forward. The backward of attention
# runs five for two.
LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5

UNGATED = ("arcee", "phi", "starcoder2")
"""Families whose MLPs have no gate."""
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Values of a configuration's layer_types. Granite hybrids write the last instead of the first."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with attention and MLP blocks, to predict time and memory."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    intermediate: int
    vocab: int
    mlp_products: int = 3
    """Number of matrix products of an MLP: 3 with a gate, 2 without."""
    windows: tuple[int, ...] = field(default=())
    """Number of positions that a query sees, itself included, for each attention layer. 0 means
    all. -n means chunks of n positions: a query sees those of its chunk up to itself."""
    attention_parameters: int | None = None
    """Number of weights of attention in a layer; None counts q, k, v and o projections."""
    attention_activations: int = 0
    """Numbers that an attention layer keeps per token in addition to q, k, v and output."""
    recurrent_layers: int = 0
    """Number of layers with a state instead of attention."""
    recurrent_parameters: int = 0
    """Multiply-adds per token in a layer with a state, without its MLP."""
    recurrent_activations: int = 0
    """Elements per token that its forward keeps for its backward."""
    state_elements: int = 0
    """Elements of its float32 state at the end of a segment."""
    tail_elements: int = 0
    """Elements of the last inputs of its convolution at the end of a segment."""
    recurrent_key_heads: int = 0
    """Number of heads of its keys, or groups of Mamba-2. If the number of context-parallel ranks
    does not divide them, each head is exchanged several times."""
    recurrent_key_elements: int = 0
    """Elements per token that these ranks exchange for one such head."""
    recurrent_elements: int = 0
    """Other elements per token that they exchange: values, gates and the output."""
    expert_layers: int = 0
    """Number of layers with a mixture of experts."""
    expert_activations: int = 0
    """Numbers that such a layer keeps per token, in addition to those of an MLP as wide as all
    experts of the token: see `plan.pricing.mixtures`."""
    reused_layers: int = 0
    """Number of last layers that read keys and values of earlier layers (Gemma 4)."""
    router_bytes: int = 0
    """Bytes per token that its router keeps, for any dtype of the model."""
    dtype_bytes: int = 2
    checkpointed: bool = False
    """Whether blocks keep only their inputs between forward and backward."""
    compiled: bool = False
    """Whether blocks are compiled, which keeps fewer activations: see `activation_bytes`."""
    context: int = 1
    """Number of context-parallel ranks. Bytes are those of one rank, per token of the whole
    microbatch. FLOPs of a step are those of all ranks, and FLOPs of meters those of one."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "value_dim", "vocab"):
            size(f"the model's {name}", getattr(self, name))
        size("the model's layers", self.layers, MOST_LAYERS)
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise ConfigError(
                    f"the model's {name} is {value}; it takes a whole number of at least 0. "
                    f"{REMEDY}"
                )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model has {self.heads} query heads and {self.kv_heads} key-value heads; each "
                "key-value head serves equally many query heads, so the first number is a multiple "
                "of the second. Correct num_attention_heads or num_key_value_heads."
            )
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.attention_layers)
        if len(self.windows) != self.attention_layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries for {self.attention_layers} layers; give "
                "one each."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **changes: Any) -> "ModelShape":
        """Read the shape from a transformers configuration as a mapping (a config.json).

        Raises:
            ConfigError: the configuration is no mapping, a size is missing or is not a positive
                whole number, or a kind of layer is not known.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config is {short(config)} of type {type(config).__name__}; it takes a mapping, "
                "such as model.config.to_dict() or a config.json."
            )
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        width = "moe_intermediate_size" if only_experts(config) else "intermediate_size"
        missing = [n for n in (*names, width) if config.get(n) is None]
        if missing:
            raise ConfigError(
                f"the model configuration lacks {', '.join(missing)}; forkpoint counts FLOPs of "
                "decoders described by these keys. Give the config.json that save_pretrained wrote."
            )
        layers, hidden, heads, vocab = (size(n, config[n]) for n in names)
        size(names[0], layers, MOST_LAYERS)
        # A window of 0 is none; the others may be left out, not 0.
        optional = ("head_dim", "num_key_value_heads")
        given = {n: size(n, config[n]) for n in optional if config.get(n) is not None}
        head_dim = given.get("head_dim") or hidden // heads
        window, chunk = (count(config, n) for n in ("sliding_window", "attention_chunk_size"))
        # Without kinds of layers, a window is that of all of them.
        given_kinds = config.get("layer_types") or ["sliding_attention"] * layers
        if not isinstance(given_kinds, list | tuple):
            raise ConfigError(f"layer_types is {short(given_kinds)}; it takes a list. {REMEDY}")
        kinds = list(given_kinds)
        if len(kinds) != layers:
            raise ConfigError(
                f"layer_types has {len(kinds)} entries and num_hidden_layers is {layers}; there is "
                "one for each layer. Give the config.json that save_pretrained wrote."
            )
        known = (*ATTENTION_KINDS, *recurrent_kinds(config))
        for kind in kinds:
            if kind not in known:
                raise ConfigError(
                    f"layer_types has {short(kind)}; allowed for this model are "
                    f"{', '.join(known)}. Use a model with these layers only."
                )
        recurrent = recurrent_shape(config, kinds, changes.get("dtype_bytes", 2))
        kinds = [kind for kind in kinds if kind not in recurrent_kinds(config)]
        if config.get("use_sliding_window") is False:
            window = 0
        windows = {"sliding_attention": window, "chunked_attention": -chunk}
        head_dim = _mean_head_dim(config, kinds, head_dim)
        return cls(
            **{
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": given.get("num_key_value_heads", heads),
                "head_dim": head_dim,
                "value_dim": head_dim,
                "intermediate": active_intermediate(config, layers),
                "vocab": vocab,
                "mlp_products": 2 if config.get("model_type") in UNGATED else 3,
                "windows": tuple(windows.get(kind, 0) for kind in kinds),
                "reused_layers": count(config, "num_kv_shared_layers"),
                **(_latent_attention(config) if config.get("kv_lora_rank") else {}),
                **recurrent,
                **mixture_shape(config, layers, changes.get("dtype_bytes", 2)),
                **changes,
            }
        )

    @property
    def leaves_early(self) -> bool:
        """Whether forwards can end inside the last block. The last layers must not reuse keys and
        values of earlier layers, and the model itself must not checkpoint blocks."""
        return not (self.checkpointed or self.reused_layers)

    @property
    def linear_parameters(self) -> int:
        """Number of weights of the blocks' matrix products. Every token uses each weight once."""
        attention = self.attention_parameters
        if attention is None:
            attention = self.hidden * self.head_dim * (self.heads + self.kv_heads)
            attention += self.value_dim * self.hidden * (self.kv_heads + self.heads)
        mixers = self.attention_layers * attention
        mixers += self.recurrent_layers * self.recurrent_parameters
        return mixers + self.layers * self.mlp_parameters

    @property
    def mlp_parameters(self) -> int:
        """Number of weights of the MLP of a layer that one token uses."""
        return self.mlp_products * self.hidden * self.intermediate

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def boundary_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all attention layers."""
        return self.attention_layers * self.boundary_elements * self.dtype_bytes

    @property
    def boundary_gradient_bytes_per_token(self) -> int:
        """Bytes of the float32 (float64 for a float64 model) gradients of one token's keys and
        values."""
        return self.attention_layers * self.boundary_elements * max(4, self.dtype_bytes)

    @property
    def exchanged_token_bytes(self) -> int:
        """Bytes of one token in the prefix cache, which ranks exchange for prompts: keys, values
        and their gradients."""
        return self.boundary_bytes_per_token + self.boundary_gradient_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers at the end of one segment, with gradients."""
        wide = max(4, self.dtype_bytes)
        elements = 2 * self.state_elements * wide + self.tail_elements * (self.dtype_bytes + wide)
        return self.recurrent_layers * -(-elements // self.context)

    @property
    def boundary_elements(self) -> int:
        heads = lcm(self.kv_heads, self.context) // self.context  # repeated if fewer than ranks
        return heads * (self.head_dim + self.value_dim)

    def activation_bytes(self, checkpointing: str = "none") -> int:
        """Bytes that the forward of one token keeps for its backward, counted tensor by tensor.

        A block keeps the inputs of its two norms and of its seven matrix products, q, k and v as
        attention reads them, the output of attention, and the values of the gate, of the up
        projection and of their product. A norm in float32 also keeps a float32 copy. Compiled code
        recomputes the norms and the activation of the gate instead. A checkpointed block keeps its
        input; one block at a time keeps everything during its recomputation. With checkpointing
        "selective" this holds for the MLPs alone. A mixture of experts also keeps copies of tokens
        (`plan.pricing.mixtures`).
        """
        attention = (self.heads + self.kv_heads) * self.head_dim
        values = (self.heads + self.kv_heads) * self.value_dim
        attends = 2 * attention + values + self.attention_activations
        if self.context > 1:  # the output is kept before and after the exchange
            attends += self.heads * self.value_dim
        blocks = [
            (self.attention_layers, attends),
            (self.recurrent_layers, self.recurrent_activations),
        ]
        norm_copies = 2 * self.hidden * 4 if self.dtype_bytes < 4 and not self.compiled else 0
        # Without compilation some activations keep more, so that an ungated MLP is counted alike.
        mlp = (self.mlp_products if self.compiled else 4) * self.intermediate
        rest = (4 * self.hidden + mlp) * self.dtype_bytes + norm_copies
        sizes = [(layers, rest + mixer * self.dtype_bytes) for layers, mixer in blocks if layers]
        experts = self.expert_activations * self.dtype_bytes + self.router_bytes
        experts *= self.expert_layers > 0
        if self.checkpointed or checkpointing == "full":
            inputs = self.layers * self.hidden * self.dtype_bytes
            return -(-(inputs + max(size for _, size in sizes) + experts) // self.context)
        every = sum(layers * size for layers, size in sizes) + self.expert_layers * experts
        if checkpointing == "selective":
            every -= (self.layers - 1) * mlp * self.dtype_bytes
            every -= max(0, self.expert_layers - 1) * experts
        return -(-every // self.context)

    def part(self, number: int) -> int:
        """Largest number of tokens or entries of one rank, if all ranks together have `number`."""
        return -(-number // self.context)

    def exchanged_bytes(self, tokens: int, *, ends_early: bool = False) -> int:
        """Bytes that a rank sends for attention in one forward or backward of a microbatch.

        Attention layers send queries, keys, values and outputs of the rank's tokens, without the
        heads that the rank keeps. Recurrent layers send inputs of the convolution, gates and
        outputs.

        Args:
            tokens: number of tokens of the microbatch.
            ends_early: whether only keys and values of the last layer are used.
        """
        queries = self.heads * (self.head_dim + self.value_dim)
        every = self.attention_layers * (queries + self.boundary_elements * self.context)
        key_heads = lcm(self.recurrent_key_heads, self.context)
        recurrent = key_heads * self.recurrent_key_elements + self.recurrent_elements
        every += self.recurrent_layers * recurrent
        sent = self.part(tokens) * (every - queries * ends_early) * self.dtype_bytes
        return sent * (self.context - 1) // self.context

    def gathered_bytes(self, tokens: int, *, backward: bool) -> int:
        """Bytes that a rank sends to gather a prefix cache that is split by heads.

        Args:
            tokens: number of tokens of the prefix cache.
            backward: whether gradients are sent back instead.
        """
        kept, gradients = self.boundary_bytes_per_token, self.boundary_gradient_bytes_per_token
        return (self.context - 1) * tokens * (gradients if backward else kept)

    def repeated_flops_share(self, checkpointing: str) -> float:
        """Part of the FLOPs of the blocks' forward that a checkpointed backward repeats."""
        if self.checkpointed or checkpointing == "full":
            return 1.0
        if checkpointing == "selective":
            # An MLP except its last product, whose output the backward does not need.
            repeated = (self.mlp_products - 1) * self.hidden * self.intermediate
            return self.layers * repeated / self.linear_parameters
        return 0.0


def _mean_head_dim(config: Mapping[str, Any], kinds: list[str], head_dim: int) -> int:
    """Mean head dimension of the layers, rounded up. Layers of Gemma 4 that see all tokens have
    wider heads."""
    wide = config.get("global_head_dim")
    if isinstance(layers := config.get("per_layer_config"), Mapping):
        found = (each.get("head_dim") for each in layers.values() if isinstance(each, Mapping))
        wide = next((dim for dim in found if dim is not None), None)
    if wide is None:
        return head_dim
    full = kinds.count("full_attention")
    every = full * size("global_head_dim", wide) + (len(kinds) - full) * head_dim
    return -(-every // len(kinds))


def _latent_attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Fields of multi-head latent attention, in which keys and values of every head are expanded
    from a low rank."""
    hidden, heads = needed(config, "hidden_size"), needed(config, "num_attention_heads")
    nope, rope, value = (
        needed(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent, q_rank = needed(config, "kv_lora_rank"), count(config, "q_lora_rank")
    queries = heads * (nope + rope)
    weights = q_rank * (hidden + queries) if q_rank else hidden * queries
    weights += hidden * (latent + rope) + latent * heads * (nope + value)
    return {
        "kv_heads": heads,
        "head_dim": nope + rope,
        "value_dim": value,
        "attention_parameters": weights + heads * value * hidden,
    }


# Layers that carry a state instead of attention. Their work does not depend on a token's position.
# It consists of the products of projections, the convolution, and the recurrence as defined, one
# token after another. Kernels do more work in chunks, which does not count. So one number of
# multiply-adds per token is enough. A backward has twice as many, like products of weights.
CHUNK = 64
"""Chunk length in tokens: a chunked recurrence keeps a row of a triangular matrix of this size for
each token and head."""


def recurrent_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of `layer_types` for layers that carry a state."""
    known = config.get("linear_num_value_heads") or config.get("mamba_n_heads")
    return ("linear_attention", "mamba") if known else ()


def recurrent_shape(
    config: Mapping[str, Any], kinds: list[str], dtype_bytes: int
) -> dict[str, int]:
    """Fields of a ModelShape for models with layers that carry a state; empty for other models."""
    recurrent = [kind for kind in kinds if kind in recurrent_kinds(config)]
    if not recurrent:
        return {}
    mamba2 = config.get("mamba_n_heads")
    counts = _mamba2(config, dtype_bytes) if mamba2 else _gated_delta_net(config)
    return {"recurrent_layers": len(recurrent), **counts}


def _gated_delta_net(config: Mapping[str, Any]) -> dict[str, int]:
    """Fields of Qwen3-Next and Qwen3.5. Their query projection also computes a gate of
    attention."""
    hidden = needed(config, "hidden_size")
    heads, kv_heads = (needed(config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    attention_dim = needed(config, "head_dim")
    keys, values = (needed(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (needed(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    width = needed(config, "linear_conv_kernel_dim")
    mixed, out = 2 * keys * key_dim + values * value_dim, values * value_dim
    state = values * key_dim * value_dim
    # q, k, v, the gate, beta and the decay in; the output out. The state is read by the key,
    # updated, and read by the query.
    weights = hidden * (mixed + out + 2 * values) + out * hidden
    return {
        "attention_parameters": hidden * attention_dim * (3 * heads + 2 * kv_heads),
        "attention_activations": 2 * heads * attention_dim,
        "recurrent_parameters": weights + width * mixed + 3 * state,
        "state_elements": state,
        "tail_elements": (width - 1) * mixed,
        "recurrent_key_heads": keys,
        "recurrent_key_elements": 2 * key_dim,
        "recurrent_elements": 2 * out + 2 * values,
        # Inputs and outputs of the convolution and of its activation, inputs of the recurrence with
        # the triangular matrix of the chunk, the output of the recurrence, the gate, and the result
        # of the norm.
        "recurrent_activations": 4 * mixed + CHUNK * values + 4 * out,
    }


def _mamba2(config: Mapping[str, Any], dtype_bytes: int) -> dict[str, int]:
    hidden, heads = needed(config, "hidden_size"), needed(config, "mamba_n_heads")
    inner, state_dim = heads * needed(config, "mamba_d_head"), needed(config, "mamba_d_state")
    width = needed(config, "mamba_d_conv")
    groups = needed(config, "mamba_n_groups")
    mixed = inner + 2 * groups * state_dim
    state = inner * state_dim
    # The state is updated and read. Inputs are x, B, C, the gate and the time steps.
    weights = hidden * (mixed + inner + heads) + inner * hidden
    return {
        "recurrent_parameters": weights + width * mixed + 2 * state,
        "state_elements": state,
        "tail_elements": (width - 1) * mixed,
        "recurrent_key_heads": groups,
        "recurrent_key_elements": 2 * state_dim,
        # The output has at least 4 bytes an element.
        "recurrent_elements": inner + heads + inner * max(4, dtype_bytes) // dtype_bytes,
        "recurrent_activations": 4 * mixed + CHUNK * heads + 4 * inner,
    }


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of tokens, visible pairs and labelled tokens, from which FLOPs of any model shape
    follow."""

    tokens: int = 0
    pairs: dict[int, int] = field(default_factory=dict)
    """Visible (query, key) pairs of one layer and head, for each entry of `ModelShape.windows`, and
    for 0."""
    num_loss_entries: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Sum of both. Their windows must be equal."""
        assert set(self.pairs) == set(other.pairs)
        return Work(
            tokens=self.tokens + other.tokens,
            pairs={window: self.pairs[window] + other.pairs[window] for window in self.pairs},
            num_loss_entries=self.num_loss_entries + other.num_loss_entries,
        )

    def forward_flops(self, shape: ModelShape) -> float:
        return self._flops(shape, 1.0, 1.0)

    def step_flops(self, shape: ModelShape) -> float:
        """FLOPs of forward and backward."""
        return self._flops(shape, 1.0 + LINEAR_BACKWARD, 1.0 + ATTENTION_BACKWARD)

    def _flops(self, shape: ModelShape, linear: float, attention: float) -> float:
        dense = 2.0 * (self.tokens * shape.linear_parameters)
        head = 2.0 * self.num_loss_entries * shape.hidden * shape.vocab
        per_pair = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
        pairs = sum(self.pairs[window] for window in shape.windows)
        return linear * (dense + head) + attention * per_pair * pairs


def bound_of(dense: Work, shared: Work, shape: ModelShape | None) -> float:
    """Ratio of dense work to `shared`: of FLOPs if the shape is known, else of tokens.

    It is the largest speed-up that sharing can give to the model's computation.
    """
    if not shared.tokens:
        return 1.0
    if shape is None:
        return dense.tokens / shared.tokens
    return dense.step_flops(shape) / shared.step_flops(shape)


def visible_pairs(start: IntArray, length: IntArray, window: int) -> int:
    """Number of pairs (query, key) of causal attention, for runs of tokens on their paths.

    Args:
        start: [S] number of tokens before each run on its path.
        length: [S] number of tokens of each run.
        window: an entry of `ModelShape.windows`.
    """
    start, length = np.asarray(start, np.int64), np.asarray(length, np.int64)
    return int((path_pairs(start + length, window) - path_pairs(start, window)).sum())


def path_pairs(tokens: IntArray, window: int) -> IntArray:
    """[n] number of pairs (query, key) of causal attention in the first `tokens` [n] of a path.

    window: as in `visible_pairs`.
    """
    if window < 0:
        chunks, tokens = np.divmod(tokens, -window)
        return chunks * (window * (window - 1) // 2) + tokens * (tokens + 1) // 2
    # Position p sees min(p + 1, window) positions.
    growing = np.minimum(tokens, window) if window else tokens
    return growing * (growing + 1) // 2 + (tokens - growing) * window


def dense_work(edges: IntArray, num_loss_entries: int, windows: tuple[int, ...]) -> Work:
    """Work of every rollout without sharing. `edges` [N]: number of tokens minus one, at least
    0."""
    return segments_work(np.zeros_like(edges), edges, num_loss_entries, windows)


def forest_work(
    forest: Forest, num_loss_entries: int, windows: tuple[int, ...], received: Sequence[int] = ()
) -> Work:
    """Work of each edge of a forest once, without segments `received` from other ranks."""
    start, length = np.delete(forest.start, received), np.delete(forest.length, received)
    return segments_work(start, length, num_loss_entries, windows)


def segments_work(
    start: IntArray, length: IntArray, num_loss_entries: int, windows: tuple[int, ...]
) -> Work:
    """Work of segments, once each. Arguments are those of `visible_pairs`."""
    pairs = {window: visible_pairs(start, length, window) for window in {0, *windows}}
    return Work(tokens=int(length.sum()), pairs=pairs, num_loss_entries=num_loss_entries)
