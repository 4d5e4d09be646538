"""Measures parts of a step separately: attention as layers call it, the head, copies to the
host."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.engine.staging import staging_for
from forkpoint.ops.attention import AttentionTable, CacheSlice, shared_attention
from forkpoint.ops.head import token_outputs
from forkpoint.plan import ModelShape
from forkpoint.plan.pricing.calibration import WIDE_PAIRS, Curve
from forkpoint.step.calibrate.clock import Clock, Times
from forkpoint.tree import FROM_CACHE, FROM_OWN, LaunchLayout, Table

TINY_KEYS = 16
QUERIES_PER_KEY = 8
"""Number of queries for each key in a launch that has several ancestors."""


class Rectangles(NamedTuple):
    """Costs of attention to ancestors."""

    part: Curve
    """Time of an additional launch, by number of its queries."""
    pairs: Curve
    """Pairs per ms, by number of keys."""
    walk_ms: tuple[float, float]
    """Least time per key of a sequence in the forward, and per query in the backward."""


class Parts:
    """Measures parts of a model of this shape on one device."""

    def __init__(self, clock: Clock, shape: ModelShape, *, kernel: str, filled_tokens: int) -> None:
        """`filled_tokens`: number of tokens of a launch of attention that fills the device."""
        self.clock: Clock = clock
        self.shape: ModelShape = shape
        self.filled_tokens: int = filled_tokens
        self.kernel: str = kernel
        self._alone: dict[int, Times] = {}
        """Times of segments without ancestors, by number of segments."""
        self._dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.dtype_bytes]

    def causal(self, sizes: tuple[int, ...]) -> Curve:
        """Pairs per ms of segments that attend to themselves alone, by their length."""
        # The fixed time of a launch then counts as part of the block.
        counts = [max(1, self.filled_tokens // length) for length in sizes]
        times = [self._attention_ms(n, count) for n, count in zip(sizes, counts, strict=True)]

        def at(index: int, backward: bool) -> float:
            pairs = counts[index] * sizes[index] * (sizes[index] + 1) / 2
            return pairs / times[index][int(backward)]

        return curve(sizes, at)

    def rectangles(self, short: int, keys: tuple[int, ...]) -> Rectangles:
        """Costs of attention to ancestors, of `keys` tokens, of segments of `short` tokens.

        Launches have as many queries as a long microbatch, because fewer would not fill the device.
        Ancestors of few keys would not fill it either, so a launch has several of these. The two
        launches of the most keys separate the time of a query from that of a pair. A launch with
        few keys measures the backward of one block of keys. A launch with few queries measures the
        forward of one block of queries.
        """
        fill = self.filled_tokens
        # Launches of WIDE_PAIRS may run on another kernel.
        queries = [min(fill, WIDE_PAIRS // (2 * k)) for k in keys]
        ancestors = [max(1, q // (QUERIES_PER_KEY * k)) for q, k in zip(queries, keys, strict=True)]
        sizes = zip(queries, keys, ancestors, strict=True)
        whole = [self._added(short, q, k, count) for q, k, count in sizes]
        call = self._added(short, short, TINY_KEYS)
        few_keys = self._added(short, fill, TINY_KEYS)
        few_queries = self._added(short, short, keys[-1])

        def filled(backward: bool) -> float:
            """Time of the queries of a launch that fills the device, without pairs."""
            (q, p), (other_q, other_p) = ((queries[i], queries[i] * keys[i]) for i in (-2, -1))
            first, last = (whole[i][int(backward)] for i in (-2, -1))
            each = (first * other_p - last * p) / (q * other_p - other_q * p)
            return max(fill * each, call[int(backward)])

        part = curve([short, fill], lambda i, backward: filled(backward) if i else call[backward])

        def at(index: int, backward: bool) -> float:
            time_ms = whole[index][int(backward)]
            less = part.time(queries[index], backward=backward)
            return queries[index] * keys[index] / max(time_ms - less, 0.1 * time_ms)

        walk = (
            max(few_queries.forward - call.forward, 0.0) / keys[-1],
            max(few_keys.backward - filled(True), 0.0) / fill,
        )
        return Rectangles(part, curve(keys, at), walk)

    def wide(self, length: int, tokens: int, part: Curve) -> tuple[float, float]:
        """Pairs per ms of a launch with equal numbers of queries, in segments of `length`, and of
        keys."""
        found = []
        for way, time_ms in enumerate(self._added(length, tokens, tokens)[:2]):
            less = part.time(tokens, backward=bool(way))
            found.append(tokens**2 / max(time_ms - less, 0.1 * time_ms))
        return found[0], found[1]

    def _added(self, length: int, queries: int, keys: int, ancestors: int = 1) -> Times:
        """Time that attention to ancestors of `keys` tokens adds to segments of `length` tokens."""
        count = queries // length
        if count not in self._alone:
            self._alone[count] = self._attention_ms(length, count)
        with_it = self._attention_ms(length, count, (keys,) * ancestors)
        # With noise the difference could be 0 or negative.
        pairs = zip(with_it, self._alone[count], strict=True)
        return Times(*(max(a - b, 0.02 * a) for a, b in pairs))

    def _attention_ms(self, length: int, count: int, ancestors: tuple[int, ...] = ()) -> Times:
        """Time of one layer's attention of `count` segments.

        One more segment, of one token, makes lengths differ as in a microbatch, so that the same
        kernel is chosen.

        ancestors: numbers of keys of ancestors, which the segments are divided among.
        """
        one, tokens, dtype = self.shape, length * count + 1, self._dtype

        def draw(n: int, heads: int, dim: int, grad: bool = True) -> Tensor:
            return torch.randn(
                n, heads, dim, device=self.clock.device, dtype=dtype, requires_grad=grad
            )

        q = draw(tokens, one.heads, one.head_dim)
        k, v = draw(tokens, one.kv_heads, one.head_dim), draw(tokens, one.kv_heads, one.value_dim)
        lengths = (*(length,) * count, 1)
        launches = [LaunchLayout(FROM_OWN, True, 0, 0, lengths, lengths)]
        cache = None
        if ancestors:
            dims = (one.head_dim, one.value_dim)
            state = [draw(sum(ancestors), one.kv_heads, d, False) for d in dims]
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            cache = CacheSlice(*state, *(torch.zeros_like(x, dtype=wide) for x in state))
            each = [tokens // len(ancestors)] * len(ancestors)
            each[-1] += tokens % len(ancestors)
            launches.append(LaunchLayout(FROM_CACHE, False, 0, 0, tuple(each), ancestors))
        table = AttentionTable(Table(tuple(launches)), device=self.clock.device)
        grad = draw(tokens, one.heads, one.value_dim, False)

        def forward() -> Tensor:
            scale = one.head_dim**-0.5
            o, _ = shared_attention(
                q, k, v, table=table, cache=cache, scale=scale, kernel=self.kernel
            )
            return o

        def backward(o: Tensor) -> None:
            # A backward that added to the gradients of its inputs would take longer than a layer's.
            torch.autograd.grad(o, (q, k, v), grad)

        return self.clock.times(forward, backward)

    def head(self, vocab: int, sizes: tuple[int, ...]) -> Curve:
        """Time of the head with log-probs, by number of labelled tokens."""
        shape = (vocab, self.shape.hidden)
        weight = torch.randn(shape, device=self.clock.device, dtype=self._dtype)
        weight.mul_(0.02).requires_grad_()
        counts = sorted({1, *(min(count, sizes[-1]) for count in (256, 2048, 4096))})

        def measured(count: int) -> Times:
            hidden = torch.randn(
                count,
                weight.shape[1],
                device=self.clock.device,
                dtype=weight.dtype,
                requires_grad=True,
            )
            labels = torch.zeros(count, dtype=torch.int64, device=self.clock.device)
            return self.clock.times(
                lambda: token_outputs(hidden, weight, labels)["logprobs"],
                lambda x: x.sum().backward(),
            )

        found = [measured(count) for count in counts]
        return curve(counts, lambda i, backward: found[i][int(backward)])

    def copies(self, nbytes: int) -> dict[str, float]:
        """Bytes per ms to the host and back, by names of fields of a calibration."""
        transfers = staging_for(self.clock.device).transfers
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.clock.device)
        host = transfers.host_buffer(nbytes)
        out, back = [], []
        for repeat in range(1 + self.clock.repeats):
            transfers.drain()
            begin = time.perf_counter()
            sent = transfers.out([(source, host)])
            transfers.drain()
            middle = time.perf_counter()
            transfers.bring([(host, torch.empty_like(source))], sent)
            transfers.drain()
            if repeat:
                out.append((middle - begin) * 1e3)
                back.append((time.perf_counter() - middle) * 1e3)
        return {
            "out_bytes_per_ms": nbytes / self.clock.typical(out),
            "back_bytes_per_ms": nbytes / self.clock.typical(back),
        }


def curve(sizes: Sequence[int], at: Callable[[int, bool], float]) -> Curve:
    """Make a curve over sizes. `at`: takes the index of a size and whether it is the backward."""
    return Curve(
        at=tuple(float(s) for s in sizes),
        forward=tuple(at(i, False) for i in range(len(sizes))),
        backward=tuple(at(i, True) for i in range(len(sizes))),
    )
