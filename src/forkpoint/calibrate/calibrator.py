"""Measurements of this device that a calibration predicts from, in under two minutes.

Rows of several lengths run forward and backward through two models of the shape that was asked for,
of few layers; the difference is a block's, what is left is a row's. Attention is timed by itself,
as the operator that layers call, and taken off the blocks. Bytes are those of the storages that
autograd keeps, which needs no allocator's word and so works on a CPU as well.
"""

import time
from collections.abc import Callable

from torch import nn

from forkpoint.calibrate.clock import Clock
from forkpoint.calibrate.microbatches import Rows
from forkpoint.calibrate.parts import Parts, curve
from forkpoint.device import device_name, measured_versions
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.libraries import host_of
from forkpoint.plan import ModelShape
from forkpoint.plan.pricing.calibration import Calibration, Curve

LAYERS = (1, 3)
ROW_TOKENS: dict[str, tuple[int, ...]] = {
    "cuda": (128, 512, 2048, 8192, 16384),
    "cpu": (16, 64, 256),
}

MakeModel = Callable[[int], nn.Module]
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
        clock = Clock(host.device)
        whole = Rows(clock, kernel=self.kernel, vocab=min(shape.vocab, 1 << 15))
        parts = Parts(clock, host.shape, kernel=self.kernel)
        # Memory first: it warms up and compiles all that is timed below.
        sizes = self._row_tokens or ROW_TOKENS[clock.kind]
        kept = {p: whole.kept_bytes(hosts, sizes[1], p) for p in ("none", "full")}
        causal = parts.causal(sizes)
        part, rectangle = parts.rectangles(sizes)
        head = parts.head(host, sizes)
        rows: dict[int, list[tuple[float, float]]] = {n: [] for n in LAYERS}
        done: list[int] = []
        for tokens in sizes:
            if len(done) >= 2 and time.perf_counter() > self._end:
                break
            done.append(tokens)
            for layers, its in hosts.items():
                rows[layers].append(whole.row_ms(its, tokens))
        kept["selective"] = self._kept_selective(whole, hosts, sizes[1], kept["none"], shape)
        copies = parts.copies()
        return Calibration(
            device=device_name(clock.device),
            versions=measured_versions(),
            compiled=host.compiles,
            shape=shape,
            measured_layers=LAYERS,
            block=self._block(done, rows, causal, few, more),
            rest=self._rest(done, rows, head, few, more),
            head=head,
            causal=causal,
            rectangle=rectangle,
            part=part,
            out_bytes_per_ms=copies["out_bytes_per_ms"],
            back_bytes_per_ms=copies["back_bytes_per_ms"],
            kept_bytes=kept,
            working_bytes=whole.working_bytes(hosts[few], done),
            seconds=time.perf_counter() - self._begin,
        )

    def _host(self, layers: int) -> ModelHost:
        return host_of(self.make_model(layers), compile_blocks=self.compile_blocks)

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

        return curve(sizes, at)

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

        return curve(sizes, at)

    def _kept_selective(
        self,
        whole: Rows,
        hosts: dict[int, ModelHost],
        tokens: int,
        none: tuple[float, float],
        shape: ModelShape,
    ) -> tuple[float, float]:
        """Measured last, since compiled blocks are compiled once more for it; where the time is
        over, the counted share of what is kept without checkpointing."""
        if time.perf_counter() < self._end:
            return whole.kept_bytes(hosts, tokens, "selective")
        share = shape.activation_bytes("selective") / shape.activation_bytes("none")
        return share * none[0], none[1]
