"""Prices of a plan's microbatches: measured times, counted FLOPs or, without a shape, tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from forkpoint.plan.plan import CostUnit, Plan
from forkpoint.plan.pricing.calibration import WIDE_PAIRS, Calibration
from forkpoint.plan.pricing.cost import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    ModelShape,
    visible_pairs,
)
from forkpoint.tree import (
    LONG_TOKENS,
    REPEATED_BYTES,
    Microbatch,
    full_table,
    padded_length,
    windowed_table,
)

# With fewer tokens a matrix product is bound by reading its weights, so its time does not decrease.
# This is about the number of FLOPs per byte at which current GPUs change from memory-bound to
# compute-bound.
EFFICIENT_TOKENS = 256

# Additional cost of a query that attends to ancestors by an additional launch, in keys: reading and
# merging partial outputs, and passes of the backward over its queries. Measured on an H200 with
# FlashAttention-4, heads 32:8 of 128, as what sharing a prefix of 512 tokens adds to replicating it
# (benchmarks/results/attention-h200.jsonl, small/P512-N8-R2048). In that measurement it is a
# hundredth of the cost of a layer's matrix products for the token. For small models it is limited
# to LAUNCH_MOST of that cost, because their products are not bound by FLOPs either.
LAUNCH_KEYS = 240
LAUNCH_MOST = 0.02

# FLOPs that a rank computes while it sends or receives a byte, if no link was measured. At 500
# TFLOPS it corresponds to 244 GB/s, about the rate of GPUs of one host. A calibration without a
# link uses this rate.
EXCHANGE_FLOPS = 2048
EXCHANGE_BYTES_PER_MS = 2.44e8

# For sequences of several lengths, FlashAttention-2 and 4 sum gradients of queries in float32, with
# space for so many more queries in each sequence.
PADDED_QUERIES = 128

# Elements of keys and values of a prefix cache in one layer below which the memory of their
# gradients is not counted.
FEW_ELEMENTS = 1 << 25

# If the predicted times of two plans differ by less than this part, the simpler plan is chosen.
NOISE = 0.005

# Additional cost of the backward of each microbatch, in tokens, because it adds to all gradients.
# 12 ms on an H200 in a model of 8B (benchmarks/results/profile-h200.jsonl, "additions", and writing
# what is added).
ROW_TOKENS = 180

# Time of the host to issue the kernels of one block, forward or backward. On an H100, 60 ms each
# were measured for 28 compiled blocks; the rest of a microbatch takes little time. A GPU works
# asynchronously, so this time matters only if the work itself is shorter.
HOST_BLOCK_MS = 1.0
# Typical rates, which convert this time into FLOPs: for current GPUs by dtype size in bytes, and
# for a CPU.
GPU_FLOPS_PER_MS = {2: 4e11, 4: 5e10, 8: 3e10}
CPU_FLOPS_PER_MS = 3e7


class Meter(ABC):
    """Prices of the microbatches of one plan, in one unit.

    Prices do not depend on the storage of activations, so plans that differ only in it can use one
    meter.
    """

    unit: CostUnit

    @abstractmethod
    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        """Cost of a forward. With `boundary_only` it ends inside the last block, without the
        head."""

    @abstractmethod
    def backward(self, microbatch: Microbatch) -> float:
        """Cost of a backward, with the recomputation of checkpointing."""

    def host(self, microbatch: Microbatch, *, backward: bool) -> float:
        """Time of the host to issue a forward or a backward; 0 if `forward` and `backward` include
        it."""
        return 0.0

    def step(self) -> float:
        """Time of the host before and after the microbatches of a step, while the device is
        idle."""
        return 0.0

    def alone(
        self, microbatch: Microbatch, *, backward: bool, boundary_only: bool = False
    ) -> float:
        """Cost of a forward or a backward that begins on an idle device."""
        work = (
            self.backward(microbatch)
            if backward
            else self.forward(microbatch, boundary_only=boundary_only)
        )
        return max(work, self.host(microbatch, backward=backward))

    def filled_tokens(self, microbatch: Microbatch) -> float:
        """Number of tokens of a long microbatch that take as long as the forward of this
        microbatch."""
        return max(microbatch.tokens, EFFICIENT_TOKENS)

    def head(self, microbatch: Microbatch, *, backward: bool) -> float:
        """Cost of the head in a forward or a backward."""
        return 0.0

    def products(self, flops: float) -> float:
        """Cost of matrix products of `flops` FLOPs outside of microbatches; 0 if unknown."""
        return 0.0

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        """Cost of a copy of `nbytes` bytes to host memory (`out`) or back; None if unknown."""
        return None

    def kept_bytes(self, microbatch: Microbatch) -> int:
        """Bytes that a microbatch keeps between its forward and its backward."""
        return 0

    def working_bytes(self, microbatch: Microbatch) -> int:
        """Largest number of additional bytes that its backward needs."""
        return 0


class ShapeMeter(Meter):
    """Meter of a plan for a model with known sizes."""

    def __init__(self, plan: Plan) -> None:
        assert plan.shape is not None
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        sixteen_bits = self.shape.dtype_bytes == 2  # others have kernels without such memory
        self._counts_attention: bool = bool(
            self.shape.attention_layers and plan.capabilities.runs_ahead and sixteen_bits
        )
        """Whether memory of attention is counted: that of GPUs for 16 bits."""
        self._read_tokens: dict[int, int] = {}

    @abstractmethod
    def link(self, nbytes: int, transfers: int) -> float:
        """Cost of sending `nbytes` bytes to other context-parallel ranks in `transfers`
        transfers."""

    def _ancestor_bytes(self, microbatch: Microbatch) -> int:
        """Bytes that the backward of attention in one layer needs for keys of other microbatches:
        their gradients, and gradients for every head of queries (`Kernel.repeats_keys`)."""
        plan, shape = self.plan, self.shape
        if microbatch.parent < 0 or plan.cache_tokens * shape.boundary_elements < FEW_ELEMENTS:
            return 0
        if microbatch.index not in self._read_tokens:
            self._read_tokens[microbatch.index] = plan.read_tokens(microbatch)
        own = self._read_tokens[microbatch.index] * shape.boundary_elements * shape.dtype_bytes
        times = shape.heads // shape.kv_heads
        repeated = times * own if times > 1 else 0
        key_heads = max(1, shape.kv_heads // shape.context)
        return own + min(repeated, max(REPEATED_BYTES, repeated // key_heads))


class CountedMeter(ShapeMeter):
    """Prices in FLOPs: edges, padding, microbatches too short to fill a device, and fixed costs of
    microbatches and of additional launches of attention. Bytes are counted."""

    unit: CostUnit = "FLOPs"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._ahead: bool = plan.capabilities.runs_ahead
        rate = GPU_FLOPS_PER_MS[self.shape.dtype_bytes] if self._ahead else CPU_FLOPS_PER_MS
        self._host: float = HOST_BLOCK_MS * self.shape.layers * rate
        self._parts_of: dict[int, tuple[float, float, float]] = {}
        self._token_bytes: Callable[[str], int] = cache(self.shape.activation_bytes)

    def host(self, microbatch: Microbatch, *, backward: bool) -> float:
        return self._issued(microbatch, backward) if self._ahead else 0.0

    def _issued(self, microbatch: Microbatch, backward: bool) -> float:
        again = self.shape.repeated_flops_share(microbatch.checkpointing) if backward else 0.0
        return (1 + again) * self._host

    def filled_tokens(self, microbatch: Microbatch) -> float:
        tokens = max(microbatch.tokens, EFFICIENT_TOKENS * self.shape.context)
        host = self._host / (2.0 * self.shape.linear_parameters) * self.shape.context
        return max(tokens, host) if self._ahead else tokens + host

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        linear, head, attention = self._parts(microbatch)
        issued = 0.0 if self._ahead else self._issued(microbatch, False)
        sent = self.link(self.shape.exchanged_bytes(microbatch.tokens, ends_early=boundary_only), 0)
        return linear + attention + (0.0 if boundary_only else head) + issued + sent

    def backward(self, microbatch: Microbatch) -> float:
        linear, head, attention = self._parts(microbatch)
        again = self.shape.repeated_flops_share(microbatch.checkpointing)
        # A selective policy repeats products of MLPs, and no attention.
        repeated = again * linear + (attention if again == 1.0 else 0.0)
        sent = self.link(self.shape.exchanged_bytes(microbatch.tokens), 0)
        gradients = (1 + LINEAR_BACKWARD) * 2.0 * ROW_TOKENS * self.shape.linear_parameters
        return (
            LINEAR_BACKWARD * (linear + head)
            + (0.0 if microbatch.keeps_logits else head)
            + ATTENTION_BACKWARD * attention
            + repeated
            + sent * (2.0 if again == 1.0 else 1.0)
            + gradients
            + (0.0 if self._ahead else self._issued(microbatch, True))
        )

    def products(self, flops: float) -> float:
        return flops

    def link(self, nbytes: int, transfers: int) -> float:
        return EXCHANGE_FLOPS * nbytes

    def head(self, microbatch: Microbatch, *, backward: bool) -> float:
        head = self._parts(microbatch)[1]
        return (LINEAR_BACKWARD + (not microbatch.keeps_logits)) * head if backward else head

    def kept_bytes(self, microbatch: Microbatch) -> int:
        kept = microbatch.tokens * self._token_bytes(microbatch.checkpointing)
        return kept + logits_bytes(microbatch, self.shape)

    def working_bytes(self, microbatch: Microbatch) -> int:
        return self._ancestor_bytes(microbatch) if self._counts_attention else 0

    def _parts(self, microbatch: Microbatch) -> tuple[float, float, float]:
        """FLOPs of the parts of a forward: blocks without attention, head, attention."""
        if microbatch.index in self._parts_of:
            return self._parts_of[microbatch.index]
        shape, segments = self.shape, np.asarray(microbatch.segments)
        start, length = self.plan.forest.start[segments], self.plan.forest.length[segments]
        every = {w: visible_pairs(start, length, w) for w in set(shape.windows)}
        pairs = sum(every[window] for window in shape.windows)
        tokens = max(shape.part(microbatch.tokens), EFFICIENT_TOKENS)
        linear = 2.0 * tokens * shape.linear_parameters
        head = 2.0 * shape.part(microbatch.num_loss_entries) * shape.hidden * shape.vocab
        key = 2.0 * shape.heads / shape.context * (shape.head_dim + shape.value_dim)
        further = min(
            LAUNCH_KEYS * key * shape.windows.count(0),
            LAUNCH_MOST * 2.0 * shape.linear_parameters / shape.context,
        )
        # Tokens with ancestors outside of their causal sequence (`full_table` of `tree.launches`).
        parent = self.plan.forest.parent[segments]
        begins = np.append(True, parent[1:] != segments[:-1])
        above = parent[begins] >= 0
        queries = int(length[above[np.cumsum(begins) - 1]].sum())
        found = linear, head, key * pairs + further * queries
        self._parts_of[microbatch.index] = found
        return found


class TokenMeter(Meter):
    """Prices in tokens, for models without a shape. A backward costs twice its forward."""

    unit: CostUnit = "tokens"

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        return max(microbatch.tokens, EFFICIENT_TOKENS)

    def backward(self, microbatch: Microbatch) -> float:
        return 2 * self.forward(microbatch)


KEPT_ENTRIES = 8192
"""Number of entries whose logits the head keeps as one tensor, without rounding to chunks."""
Kind = Literal["causal", "rectangle", "wide"]
"""Kinds of attention: within a segment, to an ancestor, and to an ancestor in a launch of at least
WIDE_PAIRS."""


class AttentionLaunch(NamedTuple):
    """A launch of a microbatch's attention in one layer."""

    pairs: dict[tuple[Kind, float], int]
    """Visible pairs of its sequences, by kind and by the length that determines their rate."""
    further: int = 0
    """Number of its tokens if it is an additional launch, or of gathered keys."""
    longest: tuple[int, int] = (0, 0)
    """Largest numbers of keys and of queries of its sequences, if it is an additional launch."""
    long_sequences: int = 0
    """Number of its causal sequences of at least LONG_TOKENS."""


def full_launches(plan: Plan, microbatch: Microbatch) -> list[AttentionLaunch]:
    """The launches of a microbatch's attention in a layer without a window, as tables have them."""
    table = full_table(plan.forest, microbatch, plan.cache_of)
    found: list[AttentionLaunch] = []
    for number, launch in enumerate(table.launches):
        q, k = launch.q_lengths, launch.k_lengths
        wide = len(set(q)) == len(set(k)) == 1 and sum(q) * k[0] >= WIDE_PAIRS
        kind: Kind = "causal" if launch.causal else "wide" if wide else "rectangle"
        # The rate of each sequence by its own length: one may be a whole path, others short.
        every: dict[tuple[Kind, float], int] = {}
        for queries, keys in zip(q, k, strict=True):
            length = queries if launch.causal else keys
            pairs = queries * (queries + 1) // 2 if launch.causal else queries * keys
            every[kind, length] = every.get((kind, length), 0) + pairs
        long = sum(queries >= LONG_TOKENS for queries in q) if launch.causal else 0
        first = AttentionLaunch(every, long_sequences=long)
        found.append(AttentionLaunch(every, sum(q), (max(k), max(q))) if number else first)
    return found


class MeasuredMeter(ShapeMeter):
    """Prices in milliseconds, from a calibration.

    The time of a microbatch is the sum of four parts: products of its blocks, by tokens; launches
    of attention, by visible pairs and lengths; the head, by entries; and the rest. The calibration
    measured one rank. Each of several context-parallel ranks has its part of the tokens, heads and
    entries, and sends inputs of attention.
    """

    unit: CostUnit = "ms"

    def __init__(self, calibration: Calibration, plan: Plan) -> None:
        super().__init__(plan)
        self.calibration: Calibration = calibration
        attention = self.shape.linear_parameters / self.shape.layers
        attention -= self.shape.mlp_parameters
        # Queries, keys and values: about the work of a block before its attention.
        self._before_attention = 0.75 * attention * self.shape.layers / self.shape.linear_parameters
        self._attention: dict[tuple[int, bool], float] = {}
        self._launches: dict[tuple[int, int], list[AttentionLaunch]] = {}

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        num_loss_entries = 0 if boundary_only else microbatch.num_loss_entries
        return self._pass(microbatch, num_loss_entries, backward=False)

    def backward(self, microbatch: Microbatch) -> float:
        time = self._pass(microbatch, microbatch.num_loss_entries, backward=True)
        again = self.shape.repeated_flops_share(microbatch.checkpointing)
        if again:
            blocks = self.shape.layers * self.calibration.block.time(
                self.shape.part(microbatch.tokens), backward=False
            )
            time += again * blocks
        if again == 1.0:
            time += self._attention_ms(microbatch, backward=False)
            time += self._exchange_ms(microbatch, ends_early=False)
        if microbatch.keeps_logits:
            # The measured backward computes them first, like the forward.
            entries = self.shape.part(microbatch.num_loss_entries)
            time -= self.calibration.head.time(entries, backward=False)
        return max(time, 0.0)

    def host(self, microbatch: Microbatch, *, backward: bool) -> float:
        way, again = int(backward), 0.0
        if backward:
            again = self.shape.repeated_flops_share(microbatch.checkpointing)
        found, full = self.calibration, self.shape.windows.count(0)
        block = found.host_block_ms[way] + again * found.host_block_ms[0]
        time = self.shape.layers * block + found.host_rest_ms[way]
        if full and (found.host_launch_ms[way] or found.host_long_ms[way]):
            first, *further = self._launches_of(microbatch, 0)
            later = found.host_later_launch_ms or found.host_launch_ms
            time += full * found.host_launch_ms[way] * bool(further)
            time += full * later[way] * max(0, len(further) - 1)
            time += full * found.host_long_ms[way] * first.long_sequences
        layers = self.shape.attention_layers
        time += layers * found.host_write_ms[way] * bool(microbatch.children)
        return time + layers * found.host_read_ms[way] * (microbatch.parent >= 0)

    def step(self) -> float:
        fixed, layer = self.calibration.host_step_ms
        tokens = self.plan.logical_tokens * self.calibration.host_token_ms
        return fixed + self.shape.layers * layer + tokens

    def head(self, microbatch: Microbatch, *, backward: bool) -> float:
        entries = self.shape.part(microbatch.num_loss_entries)
        curve = self.calibration.head
        time = curve.time(entries, backward=backward)
        if backward and microbatch.keeps_logits:
            time -= curve.time(entries, backward=False)
        return max(time, 0.0)

    def products(self, flops: float) -> float:
        """The time that blocks take for the same number of FLOPs."""
        tokens = flops / (2.0 * self.shape.linear_parameters)
        return self.shape.layers * self.calibration.block.time(tokens, backward=False)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        found = self.calibration
        return nbytes / (found.out_bytes_per_ms if out else found.back_bytes_per_ms)

    def kept_bytes(self, microbatch: Microbatch) -> int:
        policy = "full" if self.shape.checkpointed else microbatch.checkpointing
        block, rest = self.calibration.kept_bytes[policy]
        # One block keeps all its activations during its recomputation.
        whole = self.calibration.kept_bytes["none"][0] if policy != "none" else 0.0
        bytes_per_token = self.shape.layers * block + rest + whole
        if self.shape.context > 1:  # the output of attention is kept before and after the exchange
            o_bytes = self.shape.heads * self.shape.value_dim * self.shape.dtype_bytes
            kept_layers = self.shape.attention_layers if policy != "full" else 1
            bytes_per_token += kept_layers * o_bytes
        kept = int(self.shape.part(microbatch.tokens) * bytes_per_token)
        return kept + logits_bytes(microbatch, self.shape)

    def working_bytes(self, microbatch: Microbatch) -> int:
        head, token = self.calibration.working_bytes
        tokens = self.shape.part(microbatch.tokens)
        measured = int(tokens * token + (head if microbatch.num_loss_entries else 0.0))
        return measured + self._attention_bytes(microbatch)

    def _attention_bytes(self, microbatch: Microbatch) -> int:
        """Bytes that the backward of attention in one layer needs for many short sequences, and for
        ancestors.

        A calibration measures one long sequence.
        """
        shape = self.shape
        if not self._counts_attention:
            return 0
        padding = PADDED_QUERIES * len(microbatch.segments)
        windows = set(shape.windows) - {0}
        keys = max((self._launches_of(microbatch, w)[0].further for w in windows), default=0)
        # Gathered keys and values, their gradients, and gradients for each head of queries.
        queries = shape.heads * (shape.head_dim + shape.value_dim) // shape.context
        key_bytes = (2 * shape.boundary_elements + queries) * shape.dtype_bytes
        padded = padding * 4 * shape.heads * shape.head_dim // shape.context
        return padded + keys * key_bytes + self._ancestor_bytes(microbatch)

    def _pass(self, microbatch: Microbatch, num_loss_entries: int, *, backward: bool) -> float:
        found = self.calibration
        layers = float(self.shape.layers)
        attention = self._attention_ms(microbatch, backward=backward)
        if not num_loss_entries:
            # Such a forward ends at the keys and values of the last layer.
            attention *= (layers - 1) / layers
            layers += self._before_attention - 1
        tokens, entries = self.shape.part(microbatch.tokens), self.shape.part(num_loss_entries)
        return (
            layers * found.block.time(tokens, backward=backward)
            + attention
            + self._exchange_ms(microbatch, ends_early=not num_loss_entries)
            + found.rest.time(tokens, backward=backward)
            + found.head.time(entries, backward=backward)
        )

    def _exchange_ms(self, microbatch: Microbatch, *, ends_early: bool) -> float:
        """Time in which context-parallel ranks exchange tensors for attention, in one forward or
        backward."""
        sent = self.shape.exchanged_bytes(microbatch.tokens, ends_early=ends_early)
        return self.link(sent, 2 * self.shape.layers - ends_early)

    def link(self, nbytes: int, transfers: int) -> float:
        link = self.calibration.link
        if not nbytes or link is None:
            return nbytes / EXCHANGE_BYTES_PER_MS
        return nbytes / link.send_bytes_per_ms + transfers * link.send_latency_ms

    def _attention_ms(self, microbatch: Microbatch, *, backward: bool) -> float:
        """Time of the attention launches of a microbatch in all layers."""
        if (microbatch.index, backward) not in self._attention:
            each = {w: self._layer_ms(microbatch, w, backward) for w in set(self.shape.windows)}
            self._attention[microbatch.index, backward] = sum(each[w] for w in self.shape.windows)
        return self._attention[microbatch.index, backward]

    def _layer_ms(self, microbatch: Microbatch, window: int, backward: bool) -> float:
        found, way = self.calibration, int(backward)
        ranks = self.shape.context  # each has its part of the heads
        pads = not window and any(found.host_long_ms)
        time = 0.0
        for launch in self._launches_of(microbatch, window):
            work = 0.0
            for (kind, length), visible in launch.pairs.items():
                pairs = float(visible)
                if pads and kind == "causal" and length >= LONG_TOKENS:
                    pairs *= (padded_length(int(length)) / length) ** 2
                curve = found.causal if kind == "causal" else found.rectangle
                rate = found.wide[way] if kind == "wide" else 0.0
                work += pairs / ranks / (rate or curve.rate(length, backward=backward))
            time += found.part.time(launch.further / ranks, backward=backward)
            time += max(work, found.walk_ms[way] * launch.longest[way])
        return time

    def _launches_of(self, microbatch: Microbatch, window: int) -> list[AttentionLaunch]:
        if (microbatch.index, window) not in self._launches:
            made = (
                self._windowed(microbatch, window)
                if window
                else full_launches(self.plan, microbatch)
            )
            self._launches[microbatch.index, window] = made
        return self._launches[microbatch.index, window]

    def _windowed(self, microbatch: Microbatch, window: int) -> list[AttentionLaunch]:
        forest, segments = self.plan.forest, list(microbatch.segments)
        pairs = visible_pairs(forest.start[segments], forest.length[segments], window)
        size, chunked = abs(window), window < 0
        table = windowed_table(forest, microbatch, self.plan.cache_of, size, chunked=chunked)
        length = min(size, microbatch.tokens / len(segments))
        copied = len(table.key_index) if table.key_index is not None else 0
        return [AttentionLaunch({("causal", length): pairs}, copied)]


class DealtMeter(Meter):
    """Prices of a plan with microbatches that context-parallel ranks split by responses.

    The price of such a microbatch is that of its costliest part, which one rank runs alone. Other
    microbatches have the prices by heads, plus the cost of gathering their prefix cache if it is
    gathered.
    """

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        assert plan.shape is not None
        self._plan, self._shape = plan, plan.shape
        self._heads = _shape_meter(plan, calibration)
        alone = replace(plan, shape=replace(plan.shape, context=1))
        # One meter for each part, because all parts have the index of their microbatch.
        self._alone = [_shape_meter(alone, calibration) for _ in range(plan.shape.context)]
        self.unit: CostUnit = self._heads.unit

    def _most(self, microbatch: Microbatch, price: Callable[[Meter, Microbatch], float]) -> float:
        """The price by heads, or that of the costliest part."""
        if not microbatch.parts:
            return price(self._heads, microbatch)
        return max(map(price, self._alone, microbatch.parts))

    def _gathered(self, microbatch: Microbatch, *, backward: bool) -> float:
        if not microbatch.gathered:
            return 0.0
        captured = self._plan.captured_tokens(microbatch)
        sent = self._shape.gathered_bytes(captured, backward=backward)
        return self._heads.link(sent, 2 * self._shape.attention_layers)

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        price = self._most(microbatch, lambda m, x: m.forward(x, boundary_only=boundary_only))
        return price + self._gathered(microbatch, backward=False)

    def backward(self, microbatch: Microbatch) -> float:
        price = self._most(microbatch, lambda m, x: m.backward(x))
        return price + self._gathered(microbatch, backward=True)

    def host(self, microbatch: Microbatch, *, backward: bool) -> float:
        return self._most(microbatch, lambda m, x: m.host(x, backward=backward))

    def step(self) -> float:
        return self._heads.step()

    def filled_tokens(self, microbatch: Microbatch) -> float:
        return self._heads.filled_tokens(microbatch)

    def head(self, microbatch: Microbatch, *, backward: bool) -> float:
        return self._most(microbatch, lambda m, x: m.head(x, backward=backward))

    def products(self, flops: float) -> float:
        return self._heads.products(flops)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        return self._heads.copy(nbytes, out=out)

    def kept_bytes(self, microbatch: Microbatch) -> int:
        return int(self._most(microbatch, lambda m, x: m.kept_bytes(x)))

    def working_bytes(self, microbatch: Microbatch) -> int:
        return int(self._most(microbatch, lambda m, x: m.working_bytes(x)))


def meter_of(plan: Plan, calibration: Calibration | None = None) -> Meter:
    """The meter of a plan's microbatches: measured if there is a calibration, else counted."""
    if plan.shape is None:
        return TokenMeter()
    if any(microbatch.parts for microbatch in plan.microbatches):
        return DealtMeter(plan, calibration)
    return _shape_meter(plan, calibration)


def _shape_meter(plan: Plan, calibration: Calibration | None) -> ShapeMeter:
    """The meter of microbatches that context-parallel ranks, if any, split by heads."""
    return CountedMeter(plan) if calibration is None else MeasuredMeter(calibration, plan)


def logits_bytes(microbatch: Microbatch, shape: ModelShape) -> int:
    """Bytes of the kept logits of a microbatch, in the dtype of the model, and of the sum of the
    weight's gradient in float32 if they are several tensors."""
    if not microbatch.keeps_logits:
        return 0
    entries = shape.part(microbatch.num_loss_entries)
    sums = 4 * shape.hidden if entries > KEPT_ENTRIES else 0
    return shape.vocab * (entries * shape.dtype_bytes + sums)
