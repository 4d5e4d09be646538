"""Counted floating-point operations, bytes and tokens of a batch for a model shape.

The bound of every speed-up is defined here and nowhere else: FLOPs of dense training over FLOPs of
the edges run, attention on visible pairs, the head on labelled tokens only on both sides (once for
each temperature), and nothing of ours (recomputation, zero roots, padding) counted as useful.
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

# A backward runs two matrix products for each one of the forward; attention's runs five for two.
LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Values of a configuration's layer_types; hybrids of Granite write the last for the first."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with attention and gated MLP blocks, to predict time and memory."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    intermediate: int
    vocab: int
    windows: tuple[int, ...] = field(default=())
    """Number of positions that a query sees, itself included, for each attention layer. 0 means
    all. For a layer with chunks, the number of positions of a chunk."""
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
    """Number of heads of its keys, or groups of Mamba-2. Ranks of context parallelism that do not
    divide them exchange each one several times."""
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
    """Number of ranks of context parallelism. Bytes are those of one rank, per token of the whole
    microbatch. FLOPs of a step are those of all ranks, and FLOPs of meters those of one."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "value_dim", "vocab"):
            size(f"the model's {name}", getattr(self, name))
        size("the model's layers", self.layers, MOST_LAYERS)
        for name, value in {**vars(self), "windows": min(self.windows, default=0)}.items():
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
            ConfigError: a size is missing or is not a positive whole number, or a kind of layer is
                not known.
        """
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
        if "mamba" in known:
            known = (*known, "attention")  # as older versions of transformers name these
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
        windows = {"sliding_attention": window, "chunked_attention": chunk}
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
        """Whether a microbatch can end in the last block: keys and values there must be made by all
        blocks before it, and no block may be checkpointed by the model itself."""
        return not (self.checkpointed or self.reused_layers)

    @property
    def linear_parameters(self) -> int:
        """Weights of the blocks' matrix products, each used once a token."""
        attention = self.attention_parameters
        if attention is None:
            attention = self.hidden * self.head_dim * (self.heads + self.kv_heads)
            attention += self.value_dim * self.hidden * (self.kv_heads + self.heads)
        mixers = self.attention_layers * attention
        mixers += self.recurrent_layers * self.recurrent_parameters
        return mixers + self.layers * 3 * self.hidden * self.intermediate

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def boundary_bytes_per_token(self) -> int:
        """K and V of one token in all layers that attend."""
        return self.attention_layers * self.boundary_elements * self.dtype_bytes

    @property
    def boundary_gradient_bytes_per_token(self) -> int:
        """The float32 (float64 for a float64 model) gradients of one token's K and V."""
        return self.attention_layers * self.boundary_elements * max(4, self.dtype_bytes)

    @property
    def exchanged_token_bytes(self) -> int:
        """Bytes that a token of a prompt takes between ranks: keys and values, and gradients."""
        return self.boundary_bytes_per_token + self.boundary_gradient_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes that all recurrent layers keep of the end of one segment, with its gradients."""
        wide = max(4, self.dtype_bytes)
        elements = 2 * self.state_elements * wide + self.tail_elements * (self.dtype_bytes + wide)
        return self.recurrent_layers * -(-elements // self.context)

    @property
    def boundary_elements(self) -> int:
        heads = lcm(self.kv_heads, self.context) // self.context  # repeated where they are fewer
        return heads * (self.head_dim + self.value_dim)

    def activation_bytes(self, checkpointing: str = "none") -> int:
        """Bytes that one token's forward leaves for its backward, counted tensor by tensor.

        A block keeps the inputs of its two norms and of its seven matrix products, q, k and v as
        attention reads them, attention's output, and the gate's, the up's and their product's
        values; a norm computed in float32 keeps that copy as well. Compiled code computes the norms
        and the gate's activation again instead. A checkpointed block keeps its input, and one block
        at a time is whole while it is recomputed. Checkpointing "selective" leaves out what an MLP
        keeps but its input, and one MLP at a time is whole. A mixture of experts keeps copies of
        tokens as well (`plan.pricing.mixtures`).
        """
        attention = (self.heads + self.kv_heads) * self.head_dim
        values = (self.heads + self.kv_heads) * self.value_dim
        attends = 2 * attention + values + self.attention_activations
        if self.context > 1:  # its output is kept on both sides of the exchange
            attends += self.heads * self.value_dim
        blocks = [
            (self.attention_layers, attends),
            (self.recurrent_layers, self.recurrent_activations),
        ]
        norm_copies = 2 * self.hidden * 4 if self.dtype_bytes < 4 and not self.compiled else 0
        mlp = (3 if self.compiled else 4) * self.intermediate
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
        """Largest number of tokens or entries that one rank runs, of `number` in all."""
        return -(-number // self.context)

    def exchanged_bytes(self, tokens: int, *, ends_early: bool = False) -> int:
        """Bytes that a rank sends around attention in one forward or backward of a microbatch.

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
        """The share of a forward of the blocks that a checkpointed backward runs again."""
        if self.checkpointed or checkpointing == "full":
            return 1.0
        if checkpointing == "selective":
            # All of an MLP but its last product, whose output the backward does not need.
            return self.layers * 2 * self.hidden * self.intermediate / self.linear_parameters
        return 0.0


def _mean_head_dim(config: Mapping[str, Any], kinds: list[str], head_dim: int) -> int:
    """Over layers, rounded up: those of Gemma 4 that see all tokens have wider heads."""
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
    """Multi-head latent attention: keys and values are expanded from a low rank for every head."""
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


# Layers that carry a state in place of attention. Such a layer's work is the same for every
# token, wherever it lies on its path: the products of its projections, its convolution, and the
# recurrence as it is defined, one token after another (kernels do more in chunks, which is not
# counted as useful). So one number a token says all: its multiply-adds, which a backward has
# twice as many of, like those of weights.
CHUNK = 64
"""Tokens whose triangular matrix a chunked recurrence keeps, for each token and head."""


def recurrent_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds among `layer_types` that carry a state."""
    known = config.get("linear_num_value_heads") or config.get("mamba_n_heads")
    return ("linear_attention", "mamba") if known else ()


def recurrent_shape(
    config: Mapping[str, Any], kinds: list[str], dtype_bytes: int
) -> dict[str, int]:
    """The fields of a ModelShape that such models have; empty for others."""
    recurrent = [kind for kind in kinds if kind in recurrent_kinds(config)]
    if not recurrent:
        return {}
    mamba2 = config.get("mamba_n_heads")
    counts = _mamba2(config, dtype_bytes) if mamba2 else _gated_delta_net(config)
    return {"recurrent_layers": len(recurrent), **counts}


def _gated_delta_net(config: Mapping[str, Any]) -> dict[str, int]:
    """Qwen3-Next and Qwen3.5, whose attention has a gate as well, made by its query projection."""
    hidden = needed(config, "hidden_size")
    heads, kv_heads = (needed(config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    attention_dim = needed(config, "head_dim")
    keys, values = (needed(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (needed(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    width = needed(config, "linear_conv_kernel_dim")
    mixed, out = 2 * keys * key_dim + values * value_dim, values * value_dim
    state = values * key_dim * value_dim
    # q, k, v, the gate, beta and the decay in; the output out. The state is read for what it holds
    # of a key, written to, and read by the query.
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
        # Before and after the convolution and its activation, and as the recurrence reads it, with
        # the chunk's triangular matrix; the recurrence's output, the gate, and the norm's result.
        "recurrent_activations": 4 * mixed + CHUNK * values + 4 * out,
    }


def _mamba2(config: Mapping[str, Any], dtype_bytes: int) -> dict[str, int]:
    hidden, heads = needed(config, "hidden_size"), needed(config, "mamba_n_heads")
    inner, state_dim = heads * needed(config, "mamba_d_head"), needed(config, "mamba_d_state")
    width = needed(config, "mamba_d_conv")
    groups = needed(config, "mamba_n_groups")
    mixed = inner + 2 * groups * state_dim
    state = inner * state_dim
    # The state is written to and read; x, B, C, the gate and the time steps in, the output out.
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
    """Tokens, visible pairs and labelled tokens; enough to count FLOPs for any model shape."""

    tokens: int = 0
    pairs: dict[int, int] = field(default_factory=dict)
    """For each window in use (0 is none): visible (query, key) pairs of one layer and head."""
    num_loss_entries: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Both, one after the other; their windows must be the same."""
        assert set(self.pairs) == set(other.pairs)
        return Work(
            tokens=self.tokens + other.tokens,
            pairs={window: self.pairs[window] + other.pairs[window] for window in self.pairs},
            num_loss_entries=self.num_loss_entries + other.num_loss_entries,
        )

    def forward_flops(self, shape: ModelShape) -> float:
        return self._flops(shape, 1.0, 1.0)

    def step_flops(self, shape: ModelShape) -> float:
        """Forward and backward."""
        return self._flops(shape, 1.0 + LINEAR_BACKWARD, 1.0 + ATTENTION_BACKWARD)

    def _flops(self, shape: ModelShape, linear: float, attention: float) -> float:
        dense = 2.0 * (self.tokens * shape.linear_parameters)
        head = 2.0 * self.num_loss_entries * shape.hidden * shape.vocab
        per_pair = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
        pairs = sum(self.pairs[window] for window in shape.windows)
        return linear * (dense + head) + attention * per_pair * pairs


def bound_of(dense: Work, shared: Work, shape: ModelShape | None) -> float:
    """The counted speed-up over dense: FLOPs where the shape is known, else tokens.

    It is the most that sharing can speed up what a model computes.
    """
    if not shared.tokens:
        return 1.0
    if shape is None:
        return dense.tokens / shared.tokens
    return dense.step_flops(shape) / shared.step_flops(shape)


def visible_pairs(start: IntArray, length: IntArray, window: int) -> int:
    """Pairs (query, key) that causal attention visits for runs of tokens on their paths.

    Args:
        start: [S] tokens before each run on its path.
        length: [S] tokens of each run.
        window: how many positions a query sees, itself included; 0 sees all.
    """
    start, length = np.asarray(start, np.int64), np.asarray(length, np.int64)
    if not window:
        return int((length * start + length * (length + 1) // 2).sum())
    # Position p sees min(p + 1, window): count those still below the window, then the full ones.
    growing = np.clip(window - start, 0, length)
    below = growing * start + growing * (growing + 1) // 2
    return int((below + (length - growing) * window).sum())


def dense_work(edges: IntArray, num_loss_entries: int, windows: tuple[int, ...]) -> Work:
    """Work of running every rollout on its own; `edges` [N] are tokens less one, at least 0."""
    return segments_work(np.zeros_like(edges), edges, num_loss_entries, windows)


def forest_work(
    forest: Forest, num_loss_entries: int, windows: tuple[int, ...], received: Sequence[int] = ()
) -> Work:
    """Work of running each edge of a forest once, but for segments `received` from other ranks."""
    start, length = np.delete(forest.start, received), np.delete(forest.length, received)
    return segments_work(start, length, num_loss_entries, windows)


def segments_work(
    start: IntArray, length: IntArray, num_loss_entries: int, windows: tuple[int, ...]
) -> Work:
    """Work of running segments, once each; arguments as those of `visible_pairs`."""
    pairs = {window: visible_pairs(start, length, window) for window in {0, *windows}}
    return Work(tokens=int(length.sum()), pairs=pairs, num_loss_entries=num_loss_entries)
