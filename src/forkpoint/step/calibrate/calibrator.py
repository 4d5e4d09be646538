"""Measures this device for a calibration, in seconds or in two minutes.

Rows of several lengths run forward and backward through two models of the shape, with few layers.
The difference of the two is the time of a block, and the rest is that of a row. Attention is timed
separately, as the operator that layers call, and subtracted from blocks. Bytes are counted from
storages that autograd saves, not from the allocator, so this also works on a CPU.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from forkpoint.device import device_name, measured_versions
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.libraries import host_of
from forkpoint.plan import ModelShape
from forkpoint.plan.pricing.calibration import Calibration, Curve
from forkpoint.step.calibrate.clock import Clock, Times
from forkpoint.step.calibrate.microbatches import HostRow, Rows, Sample, StepTimes
from forkpoint.step.calibrate.parts import Parts, curve
from forkpoint.tree import LONG_TOKENS

LAYERS = FEW, MORE = (1, 3)
DEEP, DEEP_BYTES = 8, 1 << 30
"""Most layers of the model that host times are measured on, and most bytes of its weights. It has
at least MORE layers. Only for small layers is the host slower than the device."""
FEWEST_FILLED, FILLED_BYTES = 8192, 1 << 28
"""If the queries of a launch that fills the device would take more than these bytes, it has fewer
tokens than the effort says, but at least this number."""
RESPONSE_TOKENS = 16
FORKS = 4
LEAST_LONG_MS = 0.1
"""A smaller additional host time of a long sequence is noise: such sequences run with others."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Measured sizes, and numbers of repeats."""

    row_tokens: tuple[int, ...]
    key_tokens: tuple[int, ...]
    """Numbers of tokens of attended ancestors, at least two."""
    filled_tokens: int
    """Most tokens of a launch of attention that fills the device."""
    wide_tokens: int = 0
    """Number of queries, and of keys, of a launch of WIDE_PAIRS; 0: not measured."""
    repeats: int
    busy_products: int = 0
    """Number of matrix products that the device runs while the host issues a row."""
    busy_products_of_parts: int = 0
    """The same for one operator, which takes the host less time."""
    copy_bytes: int
    host: bool = False
    """Whether the host's times are measured. On a CPU, times of blocks include them."""
    memory: bool = True
    """Whether bytes of checkpointing and of backwards are measured. Otherwise they are counted."""
    max_seconds: float
    """Time limit for all samples. Later measurements are then skipped and extrapolated. First runs,
    which compile code that a step also needs, do not count."""
    host_seconds: float = 0.7
    """Seconds that samples of the host may take beyond this limit."""


THOROUGH = {
    "cuda": Effort(
        wide_tokens=8192,
        row_tokens=(128, 512, 2048, 8192, 16384),
        key_tokens=(256, 1024, 2048, 8192),
        filled_tokens=32_768,
        repeats=5,
        busy_products=24,
        busy_products_of_parts=24,
        copy_bytes=1 << 28,
        host=True,
        max_seconds=110.0,
    ),
    "cpu": Effort(
        row_tokens=(16, 64, 256),
        key_tokens=(32, 256),
        filled_tokens=256,
        repeats=7,
        copy_bytes=1 << 22,
        max_seconds=110.0,
    ),
}
QUICK = {
    "cuda": Effort(
        row_tokens=(256, 2048, 8192),
        key_tokens=(256, 1024, 8192),
        filled_tokens=32_768,
        repeats=3,
        busy_products=16,
        busy_products_of_parts=5,
        copy_bytes=1 << 26,
        host=True,
        memory=False,
        max_seconds=2.0,
    ),
    "cpu": Effort(
        row_tokens=(16, 64),
        key_tokens=(16, 64),
        filled_tokens=64,
        repeats=1,
        copy_bytes=1 << 20,
        memory=False,
        max_seconds=2.0,
    ),
}

MakeModel = Callable[[int], nn.Module]
"""Makes a model of the measured shape with this number of layers, on the device, in training
mode."""


def calibrate(
    make_model: MakeModel,
    shape: ModelShape,
    *,
    compile_blocks: bool | None = None,
    kernel: str = "auto",
    efforts: Mapping[str, Effort] = THOROUGH,
    announces: bool = True,
) -> Calibration:
    """Measure all sizes. Sizes beyond the time limit are extrapolated.

    Args:
        make_model: makes the measured models. Their vocabulary may differ.
        compile_blocks, kernel: as in Config.
        efforts: by the device's type.
        announces: whether to log that blocks are compiled.

    Raises:
        UnsupportedError: some layers carry a state.
    """
    if shape.recurrent_layers:
        raise UnsupportedError(
            f"{shape.recurrent_layers} of the model's {shape.layers} layers carry a state; "
            "forkpoint measures only models whose layers all attend. Without a calibration, plans "
            "are priced in counted FLOPs."
        )
    begin = time.perf_counter()
    hosts = {n: host_of(make_model(n), compile_blocks=compile_blocks) for n in LAYERS}
    for each in hosts.values():
        each.compiling.announced = not announces
    host = hosts[FEW]
    effort = efforts[host.device.type]
    sizes = effort.row_tokens
    clock = Clock(host.device, repeats=effort.repeats, busy_products=effort.busy_products)
    vocab = min(host.shape.vocab, 1 << 15)
    whole = Rows(clock, kernel=kernel, vocab=vocab, segment_tokens=sizes[0])
    of_parts = Clock(
        host.device, repeats=effort.repeats, busy_products=effort.busy_products_of_parts
    )
    query_bytes = host.shape.heads * host.shape.head_dim * host.shape.dtype_bytes
    filled = min(effort.filled_tokens, max(FEWEST_FILLED, FILLED_BYTES // query_bytes))
    parts = Parts(of_parts, host.shape, kernel=kernel, filled_tokens=filled)
    # Memory first, which also warms up and compiles all code that is timed below. If a length
    # equals a size of the model, it is compiled as a constant, and blocks are compiled again for
    # other lengths.
    first = sizes[1] - 1
    none = whole.kept_bytes(hosts, first, "none")
    counted = shape.activation_bytes("selective") / shape.activation_bytes("none")
    kept = {
        "none": none,
        "selective": (counted * none[0], none[1]),
        "full": (float(host.shape.hidden * host.shape.dtype_bytes), none[1]),
    }
    if effort.memory:
        kept["full"] = whole.kept_bytes(hosts, first, "full")
    causal = parts.causal(sizes)
    rectangles = parts.rectangles(sizes[0], effort.key_tokens)
    head = parts.head(shape.vocab, sizes)
    copies = parts.copies(effort.copy_bytes)

    def left() -> float:
        return effort.max_seconds - clock.seconds - of_parts.seconds

    done, rows = _timed_rows(whole, hosts, effort, left)
    segments = [whole.num_segments(tokens) for tokens in done]
    block, rest = _block(done, rows, segments, causal), _rest(done, rows, segments, head)
    wide, share = (0.0, 0.0), 1.0
    if host.device.type == "cuda":
        # With the kernels for long segments. cuDNN takes 1.6 s for its first plan of a launch
        # without a mask.
        wide = tuple(causal.rate(sizes[-1], backward=way) for way in (False, True))
    if effort.wide_tokens:
        wide = parts.wide(sizes[0], effort.wide_tokens, rectangles.part)
    if left() > 0:
        share = whole.steady_share(hosts[MORE], done[-1], rows[MORE][-1])
    deep = hosts[MORE]
    if effort.host:
        layers = deep_layers(sum(p.nbytes for p in host.blocks[0].parameters()))
        if layers > MORE:
            deep = host_of(make_model(layers), compile_blocks=compile_blocks)
            deep.compiling.announced = not announces
    of_steps = {"few": whole.host_step(host, sizes[0], sizes[0])}
    of_steps["deep"] = whole.host_step(deep, sizes[0], sizes[0])
    of_rows: dict[str, HostRow] = {}
    if effort.host:
        # The prompt's sequence ends before its last token. The rollouts have more tokens than the
        # device runs.
        of_steps["long"] = whole.host_step(host, LONG_TOKENS + 1, RESPONSE_TOKENS, 16)
        of_rows = {
            "plain": whole.host_row(deep, sizes[0], RESPONSE_TOKENS),
            "forked": whole.host_row(deep, sizes[0], RESPONSE_TOKENS, 2, shares=True),
            "tree": whole.host_row(
                deep, sizes[0], RESPONSE_TOKENS, 1 + FORKS, shares=True, forks=FORKS
            ),
            "long": whole.host_row(deep, LONG_TOKENS, RESPONSE_TOKENS, 2),
        }
    samples: dict[str, Sample] = {f"{name} step": each for name, each in of_steps.items()}
    samples |= {f"{name} row": each for name, each in of_rows.items()}
    ran = whole.in_turn(
        samples,
        lambda: left() + effort.host_seconds,
        optional=("long step", "long row"),  # rotary frequencies may not allow such a prompt
    )
    steps = {name: each.times for name, each in of_steps.items() if f"{name} step" in ran}
    blocks = {name: each.block_ms for name, each in of_rows.items() if f"{name} row" in ran}
    of_host: dict[str, Any] = _host_times(deep, steps["deep"], blocks) if blocks else {}
    token_ms = _host_token(steps["few"], steps["long"]) if "long" in steps else 0.0
    # Last, because it compiles blocks again.
    if effort.memory and left() > 0:
        kept["selective"] = whole.kept_bytes(hosts, first, "selective")
    working = whole.working_bytes(host, done) if effort.memory else (0.0, 0.0)
    seconds = time.perf_counter() - begin
    return Calibration(
        device=device_name(clock.device),
        versions=measured_versions(),
        compiled=host.compiles,
        shape=shape,
        measured_layers=LAYERS,
        block=block.scaled(share),
        rest=rest.scaled(share),
        head=head.scaled(share),
        causal=causal.scaled(1 / share),
        rectangle=rectangles.pairs.scaled(1 / share),
        part=rectangles.part.scaled(share),
        wide=(wide[0] / share, wide[1] / share),
        walk_ms=(rectangles.walk_ms[0] * share, rectangles.walk_ms[1] * share),
        out_bytes_per_ms=copies["out_bytes_per_ms"],
        back_bytes_per_ms=copies["back_bytes_per_ms"],
        kept_bytes=kept,
        working_bytes=working,
        host_step_ms=_host_step({FEW: steps["few"], len(deep.blocks): steps["deep"]}),
        host_token_ms=token_ms,
        **of_host,
        seconds=seconds,
        first_seconds=seconds - clock.seconds - of_parts.seconds,
    )


def _timed_rows(
    whole: Rows, hosts: dict[int, ModelHost], effort: Effort, left: Callable[[], float]
) -> tuple[list[int], dict[int, list[Times]]]:
    """Time rows. Returns their lengths, at least two, and their times by the number of layers."""
    done: list[int] = []
    rows: dict[int, list[Times]] = {n: [] for n in hosts}
    for tokens in effort.row_tokens:
        if len(done) >= 2:
            # Matrix products take most of a row's time and grow with its length. Host time hardly
            # grows.
            more = tokens / done[-1]
            last = [times[-1] for times in rows.values()]
            each = (
                max(more * (t.forward + t.backward), t.issued_forward + t.issued_backward)
                for t in last
            )
            if effort.repeats * sum(each) / 1e3 > left():
                break
        done.append(tokens)
        for layers, host in hosts.items():
            rows[layers].append(whole.row_ms(host, tokens))
    return done, rows


def _of_block(rows: Mapping[int, list[Times]], index: int, figure: int) -> float:
    return (rows[MORE][index][figure] - rows[FEW][index][figure]) / (MORE - FEW)


def _block(
    sizes: list[int], rows: dict[int, list[Times]], segments: list[int], causal: Curve
) -> Curve:
    def at(index: int, backward: bool) -> float:
        each, length = _of_block(rows, index, int(backward)), sizes[index] // segments[index]
        pairs = sizes[index] * (length + 1) / 2
        attention = pairs / causal.rate(length, backward=backward)
        # With noise the difference could be 0 or negative.
        return max(each - attention, 0.05 * each, 1e-6)

    return curve(sizes, at)


def _rest(
    sizes: list[int], rows: dict[int, list[Times]], segments: list[int], head: Curve
) -> Curve:
    def at(index: int, backward: bool) -> float:
        way = int(backward)
        less = FEW * _of_block(rows, index, way) + head.time(segments[index], backward=backward)
        return max(rows[FEW][index][way] - less, 0.0)

    return curve(sizes, at)


def deep_layers(block_bytes: int) -> int:
    """Layers of the model that host times are measured on. `block_bytes`: of a block's weights."""
    return max(MORE, min(DEEP, DEEP_BYTES // block_bytes))


def _host_step(steps: Mapping[int, StepTimes]) -> tuple[float, float]:
    """Time of a step outside of its microbatches: per step, and per layer."""
    (few, less), (more, longer) = sorted(steps.items())
    layer = max((longer.outside - less.outside) / (more - few), 0.0)
    return max(less.outside - few * layer, 0.0), layer


def _host_token(short: StepTimes, long: StepTimes) -> float:
    """Time of a step outside of its microbatches, per token of the rollouts."""
    return max(long.outside - short.outside, 0.0) / (long.tokens - short.tokens)


def _host_times(
    host: ModelHost, step: StepTimes, blocks: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Host times of microbatches, forward and backward, by names of fields of a calibration.

    step: times of a step of this model.
    blocks: time of a block of a microbatch with one sequence ("plain"), with an additional launch
        ("forked"), with FORKS of them ("tree"), and with two long sequences ("long"), unless the
        model does not support these.
    """
    layers, full = len(host.blocks), max(host.shape.windows.count(0), 1)
    plain, forked, tree = blocks["plain"], blocks["forked"], blocks["tree"]
    long = blocks.get("long", plain)
    found: dict[str, list[float]] = {}
    for way in (0, 1):
        # A prompt takes at least as long.
        block = min(plain[way], step.prompt_block[way])
        launch = max(forked[way] - plain[way], 0.0)
        # The prices of launches and long sequences are for layers of full attention.
        long_ms = (long[way] - plain[way]) / 2 * layers / full
        each = {
            "block": block,
            "rest": step.reader[way] - layers * step.reader_block[way],
            "write": step.prompt_block[way] - block,
            "read": step.reader_block[way] - block - launch,
            "launch": launch * layers / full,
            "later_launch": (tree[way] - forked[way]) / (FORKS - 1) * layers / full,
            "long": long_ms if long_ms >= LEAST_LONG_MS else 0.0,
        }
        for name, ms in each.items():
            found.setdefault(f"host_{name}_ms", []).append(max(ms, 0.0))
    return {name: (forward, backward) for name, (forward, backward) in found.items()}
