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
FILLED_TOKENS = 8192


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

    def __init__(self, clock: Clock, shape: ModelShape, *, kernel: str) -> None:
        self.clock: Clock = clock
        self.shape: ModelShape = shape
        self.kernel: str = kernel
        self._alone: dict[int, Times] = {}
        """Times of segments without ancestors, by number of segments."""
        self._dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.dtype_bytes]

    def causal(self, sizes: tuple[int, ...]) -> Curve:
        """Pairs per ms of segments that attend to themselves alone, by their length."""
        # The fixed time of a launch then counts as part of the block.
        fill = _fill(sizes)
        counts = [max(1, fill // length) for length in sizes]
        times = [self._attention_ms(n, count, 0) for n, count in zip(sizes, counts, strict=True)]

        def at(index: int, backward: bool) -> float:
            pairs = counts[index] * sizes[index] * (sizes[index] + 1) / 2
            return pairs / times[index][int(backward)]

        return curve(sizes, at)

    def rectangles(self, sizes: tuple[int, ...], keys: tuple[int, ...]) -> Rectangles:
        """Costs of attention to ancestors.

        Launches have as many queries as a microbatch, because fewer would not fill the device. Two
        such launches separate the time of a query from that of a pair. A launch with few keys
        measures the backward of one block of keys. A launch with few queries measures the forward
        of one block of queries.
        """
        fill, short = _fill(sizes), sizes[0]
        # Launches of WIDE_PAIRS may run on another kernel.
        queries = [min(fill, WIDE_PAIRS // (2 * k)) for k in keys]
        whole = [self._added(short, q, k) for q, k in zip(queries, keys, strict=True)]
        call = self._added(short, short, TINY_KEYS)
        few_keys = self._added(short, fill, TINY_KEYS)
        few_queries = self._added(short, short, keys[-1])

        def filled(backward: bool) -> float:
            """Time of the queries of a launch that fills the device, without pairs."""
            (q, p), (other_q, other_p) = ((queries[i], queries[i] * keys[i]) for i in (0, -1))
            first, last = whole[0][int(backward)], whole[-1][int(backward)]
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

    def _added(self, length: int, queries: int, keys: int) -> Times:
        """Time that an ancestor of `keys` tokens adds to segments of `length` tokens."""
        count = queries // length
        if count not in self._alone:
            self._alone[count] = self._attention_ms(length, count, 0)
        with_it, without = self._attention_ms(length, count, keys), self._alone[count]
        # With noise the difference could be 0 or negative.
        return Times(*(max(a - b, 0.02 * a) for a, b in zip(with_it, without, strict=True)))

    def _attention_ms(self, length: int, count: int, keys: int) -> Times:
        """Time of one layer's attention of `count` segments with an ancestor of `keys` tokens.

        One more segment, of one token, makes lengths differ as in a microbatch, so that the same
        kernel is chosen.
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
        if keys:
            state = [draw(keys, one.kv_heads, d, False) for d in (one.head_dim, one.value_dim)]
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            cache = CacheSlice(*state, *(torch.zeros_like(x, dtype=wide) for x in state))
            launches.append(LaunchLayout(FROM_CACHE, False, 0, 0, (tokens,), (keys,)))
        table = AttentionTable(Table(tuple(launches)), device=self.clock.device)
        grad = draw(tokens, one.heads, one.value_dim, False)

        def forward() -> Tensor:
            scale = one.head_dim**-0.5
            o, _ = shared_attention(
                q, k, v, table=table, cache=cache, scale=scale, kernel=self.kernel
            )
            return o

        return self.clock.times(forward, lambda o: o.backward(grad))

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


def _fill(sizes: tuple[int, ...]) -> int:
    """Number of tokens of a microbatch."""
    return min(sizes[-1], FILLED_TOKENS)


def curve(sizes: Sequence[int], at: Callable[[int, bool], float]) -> Curve:
    """Make a curve over sizes. `at`: takes the index of a size and whether it is the backward."""
    return Curve(
        at=tuple(float(s) for s in sizes),
        forward=tuple(at(i, False) for i in range(len(sizes))),
        backward=tuple(at(i, True) for i in range(len(sizes))),
    )
