"""Measures what `forkpoint.plan.calibration` predicts from, on this device, in under two minutes.

Rows of several lengths run forward and backward through two models of the shape that was asked for,
of few layers; the difference is a block's, what is left is a row's. Attention is timed by itself,
as the operator that layers call, and taken off the blocks. Bytes are those of the storages that
autograd keeps, which needs no allocator's word and so works on a CPU as well.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint.bench.rows import environment
from forkpoint.config import Config
from forkpoint.engine.boundary import Arena
from forkpoint.engine.device import device_name
from forkpoint.engine.head import token_logprobs
from forkpoint.engine.offload import storage_id
from forkpoint.engine.rows import RowContext, RowInputs, prepare_rows
from forkpoint.engine.staging import staging_for
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.refusals import plain_head
from forkpoint.hosts.transformers import TransformersHost
from forkpoint.ops.attention import ArenaSlice, AttentionTable, shared_attention
from forkpoint.plan import ModelShape, make_plan
from forkpoint.plan.calibration import Calibration, Curve
from forkpoint.rollouts import Rollout, RolloutBatch

LAYERS = (1, 3)
ROW_TOKENS: dict[str, tuple[int, ...]] = {
    "cuda": (128, 512, 2048, 8192, 16384),
    "cpu": (16, 64, 256),
}
KEY_TOKENS: dict[str, tuple[int, ...]] = {"cuda": (256, 2048, 8192), "cpu": (32, 256)}
COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
REPEATS = {"cuda": 5, "cpu": 7}
TINY_KEYS = 16
HEAD_TOKENS = 1024

MakeModel = Callable[[int], PreTrainedModel]
"""Makes a model of the shape in question with so many layers, on the device, in training mode."""


class Calibrator:
    """One run of the measurements."""

    def __init__(
        self,
        make_model: MakeModel,
        *,
        compile_blocks: bool | None = None,
        kernel: str = "auto",
        row_tokens: tuple[int, ...] | None = None,
        max_seconds: float = 110.0,
    ) -> None:
        self.make_model: MakeModel = make_model
        self.compile_blocks: bool | None = compile_blocks
        self.kernel: str = kernel
        self._row_tokens = row_tokens
        self._begin = time.perf_counter()
        self._end = self._begin + max_seconds

    def run(self, shape: ModelShape) -> Calibration:
        """Measure all; sizes for which the time is over are left to extrapolation."""
        if shape.recurrent_layers:
            raise UnsupportedError(
                f"{shape.recurrent_layers} of the model's {shape.layers} layers carry a state; "
                "forkpoint measures models whose layers all attend. Without a calibration plans "
                "are priced in counted FLOPs."
            )
        few, more = LAYERS
        hosts = {n: self._host(n) for n in LAYERS}
        host = hosts[few]
        self.device: torch.device = host.device
        self.kind: str = host.device.type
        self.repeats: int = REPEATS[self.kind]
        self.vocab: int = min(shape.vocab, 1 << 15)
        one = host.shape
        # Memory first: it warms up and compiles all that is timed below.
        sizes = self._row_tokens or ROW_TOKENS[self.kind]
        kept = {policy: self._kept_bytes(hosts, sizes[1], policy) for policy in ("none", "full")}
        causal = self._causal(one, sizes)
        part, rectangle = self._rectangles(one, sizes)
        head = self._head(host, sizes)
        rows: dict[int, list[tuple[float, float]]] = {n: [] for n in LAYERS}
        done: list[int] = []
        for tokens in sizes:
            if len(done) >= 2 and time.perf_counter() > self._end:
                break
            done.append(tokens)
            for layers, its in hosts.items():
                rows[layers].append(self._row_ms(its, tokens))
        kept["selective"] = self._kept_selective(hosts, sizes[1], kept["none"], shape)
        return Calibration(
            device=device_name(self.device),
            versions=cast(dict[str, str], environment()["versions"]),
            compiled=host.compiles,
            shape=shape,
            measured_layers=LAYERS,
            block=self._block(done, rows, causal, few, more),
            rest=self._rest(done, rows, head, few, more),
            head=head,
            causal=causal,
            rectangle=rectangle,
            part=part,
            **self._copies(),
            kept_bytes=kept,
            working_bytes=self._working_bytes(hosts[few], done),
            seconds=time.perf_counter() - self._begin,
        )

    def _host(self, layers: int) -> TransformersHost:
        return TransformersHost(self.make_model(layers), compile_blocks=self.compile_blocks)

    # Whole rows ----------------------------------------------------------------------------------

    def _block(
        self,
        sizes: list[int],
        rows: dict[int, list[tuple[float, float]]],
        causal: Curve,
        few: int,
        more: int,
    ) -> Curve:
        def at(index: int, backward: bool) -> float:
            tokens, way = sizes[index], int(backward)
            each = (rows[more][index][way] - rows[few][index][way]) / (more - few)
            attention = tokens * (tokens + 1) / 2 / causal.rate(tokens, backward=backward)
            # Noise must not make a block cost nothing.
            return max(each - attention, 0.05 * each, 1e-6)

        return _curve(sizes, at)

    def _rest(
        self,
        sizes: list[int],
        rows: dict[int, list[tuple[float, float]]],
        head: Curve,
        few: int,
        more: int,
    ) -> Curve:
        def at(index: int, backward: bool) -> float:
            way = int(backward)
            each = (rows[more][index][way] - rows[few][index][way]) / (more - few)
            return max(rows[few][index][way] - few * each - head.time(1, backward=backward), 0.0)

        return _curve(sizes, at)

    def _row_ms(self, host: TransformersHost, tokens: int) -> tuple[float, float]:
        """One row's forward and backward; it has one labelled token."""
        inputs, run = self._row(host, tokens, labelled=1)
        forwards, backwards = [], []
        with host.entered():
            for repeat in range(1 + self.repeats):
                marks = [self._mark()]
                logprobs = run(inputs)
                marks.append(self._mark())
                logprobs.sum().backward()
                marks.append(self._mark())
                if repeat:
                    forwards.append(self._between(marks[0], marks[1]))
                    backwards.append(self._between(marks[1], marks[2]))
        return self._typical(forwards), self._typical(backwards)

    def _row(
        self, host: TransformersHost, tokens: int, *, labelled: int, checkpointing: str = "none"
    ) -> tuple[RowInputs, Callable[[RowInputs], Tensor]]:
        ids = np.random.default_rng(0).integers(0, self.vocab, tokens + 1)
        mask = np.arange(tokens + 1) > tokens - labelled
        batch = RolloutBatch([Rollout(ids, mask, 1.0)])
        config = Config(
            sharing="none",
            boundary="in_row",
            max_row_tokens=tokens,
            checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        plan = make_plan(batch, host.shape, config)
        (inputs,) = prepare_rows(plan, batch, host.device)

        def run(inputs: RowInputs) -> Tensor:
            context = RowContext(
                plan,
                inputs,
                Arena(0, gradients=True),
                kernel=self.kernel,
                head_chunk_tokens=1024,
                entropy=False,
            )
            return host.forward(context).per_token["logprobs"]

        return inputs, run

    # Memory --------------------------------------------------------------------------------------

    def _kept_bytes(
        self, hosts: dict[int, TransformersHost], tokens: int, policy: str
    ) -> tuple[float, float]:
        few, more = LAYERS
        total = {n: self._saved_bytes(host, tokens, policy) for n, host in hosts.items()}
        block = (total[more] - total[few]) / (more - few)
        return block / tokens, max(total[few] - few * block, 0.0) / tokens

    def _kept_selective(
        self,
        hosts: dict[int, TransformersHost],
        tokens: int,
        none: tuple[float, float],
        shape: ModelShape,
    ) -> tuple[float, float]:
        """Measured last, since compiled blocks are compiled once more for it; where the time is
        over, the counted share of what is kept without checkpointing."""
        if time.perf_counter() < self._end:
            return self._kept_bytes(hosts, tokens, "selective")
        share = shape.activation_bytes("selective") / shape.activation_bytes("none")
        return share * none[0], none[1]

    def _saved_bytes(self, host: TransformersHost, tokens: int, policy: str) -> int:
        """Bytes of the storages that autograd keeps of a row, its parameters' not counted."""
        held = {storage_id(p) for _, p in host.named_parameters()}
        inputs, run = self._row(host, tokens, labelled=1, checkpointing=policy)
        kept: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            if x.device == self.device and storage_id(x) not in held:
                kept.setdefault(storage_id(x), x)
            return x

        with host.entered():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                logprobs = run(inputs)
            nbytes = sum(x.untyped_storage().nbytes() for x in kept.values())
            logprobs.sum().backward()
        return nbytes

    def _working_bytes(self, host: TransformersHost, sizes: list[int]) -> tuple[float, float]:
        if self.kind != "cuda":
            return 0.0, 0.0
        found = []
        for tokens in sizes[-2:]:
            inputs, run = self._row(host, tokens, labelled=min(tokens, HEAD_TOKENS))
            with host.entered():
                logprobs = run(inputs)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                logprobs.sum().backward()
                torch.cuda.synchronize()
                found.append(torch.cuda.max_memory_allocated() - before)
        token = max(0.0, (found[1] - found[0]) / (sizes[-1] - sizes[-2]))
        return max(0.0, found[0] - token * sizes[-2]), token

    # Parts ---------------------------------------------------------------------------------------

    def _causal(self, one: ModelShape, sizes: tuple[int, ...]) -> Curve:
        fill = sizes[-2]

        def at(index: int, backward: bool) -> float:
            length = sizes[index]
            count = max(1, fill // length)
            pairs = count * length * (length + 1) / 2
            return pairs / self._attention_ms(one, length, count, 0)[int(backward)]

        return _curve(list(sizes), at)

    def _rectangles(self, one: ModelShape, sizes: tuple[int, ...]) -> tuple[Curve, Curve]:
        """What a further launch costs by its queries, and pairs a ms by the length of its keys."""

        def added(queries: int, keys: int) -> tuple[float, float]:
            with_it, without = (self._attention_ms(one, queries, 1, k) for k in (keys, 0))
            # Noise must not make a launch cost nothing.
            return tuple(max(a - b, 0.02 * a) for a, b in zip(with_it, without, strict=True))  # type: ignore[return-value]

        few = [sizes[0], sizes[len(sizes) // 2], sizes[-2]]
        parts = {q: added(q, TINY_KEYS) for q in sorted(set(few))}
        part = _curve(list(parts), lambda i, backward: list(parts.values())[i][int(backward)])
        queries, keys = sizes[-2], list(KEY_TOKENS[self.kind])
        whole = [added(queries, k) for k in keys]

        def at(index: int, backward: bool) -> float:
            time_ms = whole[index][int(backward)]
            less = part.time(queries, backward=backward)
            return queries * keys[index] / max(time_ms - less, 0.1 * time_ms)

        return part, _curve(keys, at)

    def _attention_ms(
        self, one: ModelShape, length: int, count: int, keys: int
    ) -> tuple[float, float]:
        """One layer's attention over `count` segments, all below an ancestor of `keys` tokens."""
        tokens = length * count
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[one.dtype_bytes]

        def draw(n: int, heads: int, dim: int, grad: bool = True) -> Tensor:
            return torch.randn(n, heads, dim, device=self.device, dtype=dtype, requires_grad=grad)

        q = draw(tokens, one.heads, one.head_dim)
        k, v = draw(tokens, one.kv_heads, one.head_dim), draw(tokens, one.kv_heads, one.value_dim)
        cu = [length * i for i in range(count + 1)]
        launches = [[0, 1, 0, tokens, 0, tokens, length, length, 0, 0, count]]
        arena = None
        if keys:
            state = [draw(keys, one.kv_heads, d, False) for d in (one.head_dim, one.value_dim)]
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            arena = ArenaSlice(*state, *(torch.zeros_like(x, dtype=wide) for x in state))
            launches.append([1, 0, 0, tokens, 0, keys, tokens, keys, len(cu), len(cu) + 2, 1])
            cu += [0, tokens, 0, keys]
        table = AttentionTable.from_numpy(np.array(launches), np.array(cu), device=self.device)
        grad = draw(tokens, one.heads, one.value_dim, False)

        def forward() -> Tensor:
            scale = one.head_dim**-0.5
            o, _ = shared_attention(
                q, k, v, table=table, arena=arena, scale=scale, kernel=self.kernel
            )
            return o

        return self._times(forward, lambda o: o.backward(grad))

    def _head(self, host: TransformersHost, sizes: tuple[int, ...]) -> Curve:
        weight = plain_head(host.causal).weight
        counts = sorted({1, min(256, sizes[-1]), min(2048, sizes[-1])})

        def measured(count: int) -> tuple[float, float]:
            hidden = torch.randn(
                count, weight.shape[1], device=self.device, dtype=weight.dtype, requires_grad=True
            )
            labels = torch.zeros(count, dtype=torch.int64, device=self.device)
            return self._times(
                lambda: token_logprobs(hidden, weight, labels)[0], lambda x: x.sum().backward()
            )

        found = [measured(count) for count in counts]
        weight.grad = None
        return _curve(counts, lambda i, backward: found[i][int(backward)])

    def _copies(self) -> dict[str, float]:
        transfers = staging_for(self.device).transfers
        nbytes = COPY_BYTES[self.kind]
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        host = transfers.host_buffer(nbytes)
        out, back = [], []
        for repeat in range(1 + self.repeats):
            transfers.drain()
            begin = time.perf_counter()
            sent = transfers.out(source, host)
            transfers.drain()
            middle = time.perf_counter()
            transfers.back(host, sent)
            transfers.drain()
            if repeat:
                out.append((middle - begin) * 1e3)
                back.append((time.perf_counter() - middle) * 1e3)
        return {
            "out_bytes_per_ms": nbytes / self._typical(out),
            "back_bytes_per_ms": nbytes / self._typical(back),
        }

    # Time ----------------------------------------------------------------------------------------

    def _times(
        self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> tuple[float, float]:
        forwards, backwards = [], []
        for repeat in range(1 + self.repeats):
            marks = [self._mark()]
            result = forward()
            marks.append(self._mark())
            backward(result)
            marks.append(self._mark())
            if repeat:
                forwards.append(self._between(marks[0], marks[1]))
                backwards.append(self._between(marks[1], marks[2]))
        return self._typical(forwards), self._typical(backwards)

    def _typical(self, samples_ms: list[float]) -> float:
        """The median; on a CPU the least, since what else the machine does can only add to it."""
        return median(samples_ms) if self.kind == "cuda" else min(samples_ms)

    def _mark(self) -> float | torch.cuda.Event:
        if self.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return (end - begin) * 1e3
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end)


def _curve(sizes: list[int], at: Callable[[int, bool], float]) -> Curve:
    return Curve(
        at=tuple(float(s) for s in sizes),
        forward=tuple(at(i, False) for i in range(len(sizes))),
        backward=tuple(at(i, True) for i in range(len(sizes))),
    )
