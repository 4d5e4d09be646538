"""Prices of a plan's microbatches: measured, by counted FLOPs or, without a shape, by tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.calibration import WIDE_PAIRS, Calibration
from forkpoint.plan.pricing.cost import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    ModelShape,
    visible_pairs,
)
from forkpoint.tree import (
    LAUNCH_COLUMNS,
    LONG_TOKENS,
    Microbatch,
    full_table,
    padded_length,
    windowed_table,
)

# Below this many tokens a matrix product is bound by reading its weights, so that fewer tokens take
# no less time: about the FLOPs per byte at which current GPUs turn from memory- to compute-bound.
EFFICIENT_TOKENS = 256

# What a query that attends to ancestors by a further launch costs besides, in keys: reading and
# merging partial outputs, and the backward's passes over its queries. Measured on an H200 with
# FlashAttention-4, heads 32:8 of 128, as what sharing a prefix of 512 tokens adds to replicating it
# (benchmarks/results/attention-h200.jsonl, small/P512-N8-R2048). There it is a hundredth of what a
# layer's matrix products take for the token; of small models, whose products are not bound by their
# FLOPs either, it is at most so much of them.
LAUNCH_KEYS = 240
LAUNCH_MOST = 0.02

# FLOPs that a rank of context parallelism computes while it sends a byte to the others; taken where
# nothing was measured. At 500 TFLOPS it stands for 244 GB/s, about what GPUs of one host send at,
# which is taken where a calibration has not measured the link.
EXCHANGE_FLOPS = 2048
EXCHANGE_BYTES_PER_MS = 2.44e8

# Of two plans whose predicted times differ by less than this part, the simpler one is chosen.
NOISE = 0.005

# What each microbatch's backward costs besides, in tokens: it adds to all gradients. 12 ms on an
# H200 in a model of 8B (benchmarks/results/profile-h200.jsonl, "additions", and writing what is
# added).
ROW_TOKENS = 180

# What the host needs to issue the kernels of one block, forward or backward: 60 ms each way were
# measured on an H100 for 28 compiled blocks, and the rest of a microbatch is small beside. A GPU
# works behind the host, so that this counts where the work itself takes less.
HOST_BLOCK_MS = 1.0
# Typical rates, which turn it into FLOPs: of current GPUs by the bytes of a number, and of a CPU.
GPU_FLOPS_PER_MS = {2: 4e11, 4: 5e10, 8: 3e10}
CPU_FLOPS_PER_MS = 3e7


class Meter(ABC):
    """Prices of the microbatches of one plan, in one unit.

    They are the same wherever activations of microbatches are meanwhile: a meter of a plan serves
    those that differ from it in activations alone.
    """

    unit: str

    @abstractmethod
    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        """A forward; with `boundary_only` without the head."""

    @abstractmethod
    def backward(self, microbatch: Microbatch) -> float:
        """With what its checkpointing computes again."""

    def host(self, microbatch: Microbatch, *, backward: bool) -> float:
        """Time of the host to issue the work of one way; 0 where the price of it has that."""
        return 0.0

    def step(self) -> float:
        """Time of a step outside of its microbatches, while the device is idle."""
        return 0.0

    def alone(
        self, microbatch: Microbatch, *, backward: bool, boundary_only: bool = False
    ) -> float:
        """One way of a microbatch that begins with the device idle."""
        work = (
            self.backward(microbatch)
            if backward
            else self.forward(microbatch, boundary_only=boundary_only)
        )
        return max(work, self.host(microbatch, backward=backward))

    def filled_tokens(self, microbatch: Microbatch) -> float:
        """Tokens of a long microbatch whose forward takes as long as this one's alone."""
        return max(microbatch.tokens, EFFICIENT_TOKENS)

    def head(self, microbatch: Microbatch, *, backward: bool) -> float:
        """The head's part of a forward, or of a backward."""
        return 0.0

    def products(self, flops: float) -> float:
        """Matrix products of so many FLOPs outside of microbatches; 0 where nothing is known."""
        return 0.0

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        """A copy to the host's memory, or back from there; None where its price is unknown."""
        return None

    def link(self, nbytes: int, transfers: int) -> float:
        """Time in which a rank of context parallelism sends so much to the others."""
        return 0.0

    def kept_bytes(self, microbatch: Microbatch) -> int:
        """Bytes that a microbatch keeps between its forward and its backward."""
        return 0

    def working_bytes(self, microbatch: Microbatch) -> int:
        """Most bytes that its backward needs besides."""
        return 0


class CountedMeter(Meter):
    """FLOPs of what runs: edges, padding, microbatches too short to fill a device, and what a
    microbatch and a further launch of attention cost besides. Bytes as counted."""

    unit: str = "FLOPs"

    def __init__(self, plan: Plan) -> None:
        assert plan.shape is not None
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        self._ahead: bool = plan.capabilities.runs_ahead
        rate = GPU_FLOPS_PER_MS[plan.shape.dtype_bytes] if self._ahead else CPU_FLOPS_PER_MS
        self._host: float = HOST_BLOCK_MS * plan.shape.layers * rate
        self._parts_of: dict[int, tuple[float, float, float]] = {}

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
        # What a selective policy runs again are products of MLPs, and no attention.
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
        kept = microbatch.tokens * self.shape.activation_bytes(microbatch.checkpointing)
        return kept + logits_bytes(microbatch, self.shape)

    def _parts(self, microbatch: Microbatch) -> tuple[float, float, float]:
        """FLOPs of a forward: blocks without attention, head, attention."""
        if microbatch.index not in self._parts_of:
            self._parts_of[microbatch.index] = self._counted(microbatch)
        return self._parts_of[microbatch.index]

    def _counted(self, microbatch: Microbatch) -> tuple[float, float, float]:
        shape, segments = self.shape, list(microbatch.segments)
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
        return linear, head, key * pairs + further * self._queries_of_rectangles(microbatch)

    def _queries_of_rectangles(self, microbatch: Microbatch) -> int:
        """Tokens that have ancestors outside of their causal sequence (see `layout.full_table`)."""
        forest, segments = self.plan.forest, np.asarray(microbatch.segments)
        heads = np.ones(len(segments), bool)
        heads[1:] = forest.parent[segments[1:]] != segments[:-1]
        above = forest.parent[segments[heads]] >= 0
        return int(forest.length[segments][above[np.cumsum(heads) - 1]].sum())


class TokenMeter(Meter):
    """Passes of tokens, where nothing is known of the model: a backward counts as two."""

    unit: str = "tokens"

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        return max(microbatch.tokens, EFFICIENT_TOKENS)

    def backward(self, microbatch: Microbatch) -> float:
        return 2 * max(microbatch.tokens, EFFICIENT_TOKENS)


Kind = Literal["causal", "rectangle", "wide"]
"""Of attention: within a segment, to an ancestor, and that by at least WIDE_PAIRS in one launch."""


class AttentionLaunch(NamedTuple):
    """A launch of a microbatch's attention in one layer."""

    pairs: dict[tuple[Kind, float], int]
    """Visible pairs of its sequences, by their kind and by the length that says how fast they
    are."""
    further: int = 0
    """Its tokens where it is not the first, or keys that are gathered."""
    longest: tuple[int, int] = (0, 0)
    """Keys and queries of its longest sequences, where it is not the first."""
    long_sequences: int = 0
    """Causal ones of at least LONG_TOKENS."""


def full_launches(plan: Plan, microbatch: Microbatch) -> list[AttentionLaunch]:
    """The launches of a microbatch's attention in a layer without a window, as tables have them."""
    table = full_table(plan.forest, microbatch, plan.cache_of)
    cu = table.cu.tolist()
    found: list[AttentionLaunch] = []
    for number, values in enumerate(table.launches.tolist()):
        launch: dict[str, int] = dict(zip(LAUNCH_COLUMNS, values, strict=True))
        causal, count = bool(launch["causal"]), launch["count"]
        q, k = (cu[launch[f"cu_{s}_at"] :][: count + 1] for s in "qk")
        equal = q[-1] == count * launch["max_q"] and k[-1] == count * launch["max_k"]
        wide = equal and q[-1] * launch["max_k"] >= WIDE_PAIRS
        kind: Kind = "causal" if causal else "wide" if wide else "rectangle"
        # The rate of each sequence by its own length: one may be a whole path, others short.
        every: dict[tuple[Kind, float], int] = {}
        for at in range(count):
            queries, keys = q[at + 1] - q[at], k[at + 1] - k[at]
            length = queries if causal else keys
            pairs = queries * (queries + 1) // 2 if causal else queries * keys
            every[kind, length] = every.get((kind, length), 0) + pairs
        further = launch["q_end"] - launch["q_begin"]
        longest = (launch["max_k"], launch["max_q"])
        long = sum(b - a >= LONG_TOKENS for a, b in pairwise(q)) if causal else 0
        first = AttentionLaunch(every, long_sequences=long)
        found.append(AttentionLaunch(every, further, longest) if number else first)
    return found


class MeasuredMeter(Meter):
    """Milliseconds by a calibration.

    A microbatch's time is the sum of its blocks' products by how many tokens it has, of its
    attention launches by their visible pairs and lengths, of its head by its entries, and of the
    rest. One rank was measured: of several that run parts of microbatches each has its part of the
    tokens, heads and entries, and sends what attention reads.
    """

    unit: str = "ms"

    def __init__(self, calibration: Calibration, plan: Plan) -> None:
        assert plan.shape is not None
        self.calibration: Calibration = calibration
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        attention = self.shape.linear_parameters / self.shape.layers
        attention -= 3 * self.shape.hidden * self.shape.intermediate
        # Queries, keys and values: about what a block does before its attention is called.
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
            # The backward that was measured computes them first, as the forward does.
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
            time += full * found.host_launch_ms[way] * len(further)
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
        """As long as the products of blocks take for as many."""
        tokens = flops / (2.0 * self.shape.linear_parameters)
        return self.shape.layers * self.calibration.block.time(tokens, backward=False)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        found = self.calibration
        return nbytes / (found.out_bytes_per_ms if out else found.back_bytes_per_ms)

    def kept_bytes(self, microbatch: Microbatch) -> int:
        policy = "full" if self.shape.checkpointed else microbatch.checkpointing
        block, rest = self.calibration.kept_bytes[policy]
        # One block is whole while its backward computes it again.
        whole = self.calibration.kept_bytes["none"][0] if policy != "none" else 0.0
        bytes_per_token = self.shape.layers * block + rest + whole
        if self.shape.context > 1:  # attention's output is kept on both sides of the exchange
            o_bytes = self.shape.heads * self.shape.value_dim * self.shape.dtype_bytes
            kept_layers = self.shape.attention_layers if policy != "full" else 1
            bytes_per_token += kept_layers * o_bytes
        kept = int(self.shape.part(microbatch.tokens) * bytes_per_token)
        return kept + logits_bytes(microbatch, self.shape)

    def working_bytes(self, microbatch: Microbatch) -> int:
        head, token = self.calibration.working_bytes
        tokens = self.shape.part(microbatch.tokens)
        return int(tokens * token + (head if microbatch.num_loss_entries else 0.0))

    def _pass(self, microbatch: Microbatch, num_loss_entries: int, *, backward: bool) -> float:
        found = self.calibration
        layers = float(self.shape.layers)
        attention = self._attention_ms(microbatch, backward=backward)
        if not num_loss_entries:
            # Such a microbatch ends at the keys and values of its last layer.
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
        """Time in which ranks of context parallelism exchange tensors around attention, one way."""
        sent = self.shape.exchanged_bytes(microbatch.tokens, ends_early=ends_early)
        return self.link(sent, 2 * self.shape.layers - ends_early)

    def link(self, nbytes: int, transfers: int) -> float:
        link = self.calibration.link
        if not nbytes or link is None:
            return nbytes / EXCHANGE_BYTES_PER_MS
        return nbytes / link.send_bytes_per_ms + transfers * link.send_latency_ms

    def _attention_ms(self, microbatch: Microbatch, *, backward: bool) -> float:
        """All layers' launches of a microbatch."""
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
        table = windowed_table(forest, microbatch, self.plan.cache_of, window)
        length = min(window, microbatch.tokens / len(segments))
        copied = len(table.key_index) if table.key_index is not None else 0
        return [AttentionLaunch({("causal", length): pairs}, copied)]


class DealtMeter(Meter):
    """Prices of a plan some of whose microbatches are dealt out by whole segments.

    Such a microbatch takes as long as the rank that takes longest for its part, which one rank
    alone runs. Others have the prices of microbatches by heads, and those whose prefix cache is
    gathered that of the transfers.
    """

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        assert plan.shape is not None
        self._shape = plan.shape
        self._heads = _meter_by_heads(plan, calibration)
        alone = replace(plan, shape=replace(plan.shape, context=1))
        # A meter each, since parts have the index of their microbatch.
        self._alone = [_meter_by_heads(alone, calibration) for _ in range(plan.shape.context)]
        self.unit: str = self._heads.unit

    def _most(self, microbatch: Microbatch, price: Callable[[Meter, Microbatch], float]) -> float:
        """The price by heads, or of the part that costs most."""
        if not microbatch.parts:
            return price(self._heads, microbatch)
        return max(map(price, self._alone, microbatch.parts))

    def _gathered(self, microbatch: Microbatch, *, backward: bool) -> float:
        if not microbatch.gathered:
            return 0.0
        sent = self._shape.gathered_bytes(microbatch.captured_tokens, backward=backward)
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

    def link(self, nbytes: int, transfers: int) -> float:
        return self._heads.link(nbytes, transfers)

    def kept_bytes(self, microbatch: Microbatch) -> int:
        return int(self._most(microbatch, lambda m, x: m.kept_bytes(x)))

    def working_bytes(self, microbatch: Microbatch) -> int:
        return int(self._most(microbatch, lambda m, x: m.working_bytes(x)))


def meter_of(plan: Plan, calibration: Calibration | None = None) -> Meter:
    """The meter of a plan's microbatches: measured where there is a calibration, else counted."""
    if any(microbatch.parts for microbatch in plan.microbatches):
        return DealtMeter(plan, calibration)
    return _meter_by_heads(plan, calibration)


def _meter_by_heads(plan: Plan, calibration: Calibration | None) -> Meter:
    """The meter of microbatches that ranks of context parallelism, if any, run by heads."""
    if plan.shape is None:
        return TokenMeter()
    return CountedMeter(plan) if calibration is None else MeasuredMeter(calibration, plan)


def logits_bytes(microbatch: Microbatch, shape: ModelShape) -> int:
    """Bytes of a microbatch's kept logits, as the head's product leaves them."""
    return (
        shape.part(microbatch.num_loss_entries) * shape.vocab * shape.dtype_bytes
        if microbatch.keeps_logits
        else 0
    )
