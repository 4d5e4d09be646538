"""FlashAttention-4's tiles and layouts on a Hopper GPU, by the shapes of launches.

The tiles that forkpoint.ops.attention.fa4 asks for rest on these figures: the forward with
sequences given by cumulative lengths ("varlen") or, where they have one length, as a batch, each
with the package's own tile and with others, and the backward either way. Every option is first
compared with varlen and its own tile; then all are timed in a new order each round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from benchmarks.attention.cases import check_cuda
from benchmarks.rows import ResultRow, timed_row
from benchmarks.runner import Benchmark, Deadline
from benchmarks.timing import time_cuda_shuffled

ROUNDS = 15
BAR = 1e-2
"""Relative difference from varlen with the package's own tile, in bfloat16."""
LONG = {"tile_mn": (192, 128), "mma_pv_is_rs": False, "num_threads": 512}
FORWARDS: dict[str, dict[str, Any]] = {
    "": {},
    " nopack": {"pack_gqa": False},
    " 192": LONG,
    " 192 nopack": {**LONG, "pack_gqa": False},
    " 192x112": {**LONG, "tile_mn": (192, 112)},
    " 160 nopack": {"tile_mn": (128, 160), "pack_gqa": False},
}
OTHER_DIMS = ("", " nopack")
"""Options that heads of other dims than 128 are measured with."""


@dataclass(frozen=True)
class Shape:
    """Sequences of one launch: causal, or every query sees every key."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = False
    dim: int = 128
    heads: tuple[int, int] = (32, 8)

    @property
    def equal(self) -> bool:
        return len(set(self.queries)) == len(set(self.keys)) == 1

    @property
    def flops(self) -> float:
        """Of the forward, on visible pairs."""
        lengths = zip(self.queries, self.keys, strict=True)
        pairs = sum(q * (q + 1) // 2 if self.causal else q * k for q, k in lengths)
        return 4.0 * self.heads[0] * self.dim * pairs


def rectangle(queries: int, keys: int, name: str = "", count: int = 1, **options: Any) -> Shape:
    times = f"{count}x({queries}x{keys})" if count > 1 else f"{queries}x{keys}"
    return Shape(f"rect {times}{name}", (queries,) * count, (keys,) * count, **options)


def causal(length: int, name: str = "", count: int = 1, **options: Any) -> Shape:
    times = f"{count}x{length}" if count > 1 else f"{length}"
    return Shape(f"causal {times}{name}", *[(length,) * count] * 2, causal=True, **options)


RAGGED = tuple(131 + 127 * i for i in range(16))
SMALL = (64, 100, 200, 350, 80, 400, 33, 150) * 2
SHAPES = (
    rectangle(16_384, 10_240),
    rectangle(4096, 10_240, count=3),
    rectangle(57_344, 16_384),
    rectangle(57_344, 4096),
    rectangle(8192, 6144),
    rectangle(16_384, 2048),
    Shape("rect ragged", (4096, 2500, 7000), (10_240, 3000, 6144)),
    rectangle(576, 16_384),
    rectangle(576, 16_384, count=9),
    rectangle(512, 512),
    Shape("rect small ragged", SMALL, tuple(3 * n for n in SMALL)),
    causal(12_288),
    causal(6144),
    causal(2048),
    causal(2048, count=8),
    Shape("causal ragged 16", RAGGED, RAGGED, causal=True),
    Shape("causal small ragged", SMALL, SMALL, causal=True),
    rectangle(16_384, 8192, " MHA", heads=(32, 32)),
    rectangle(16_384, 8192, " 16:1", heads=(16, 1)),
    rectangle(16_384, 8192, " 28:4", heads=(28, 4)),
    causal(8192, " 28:4", heads=(28, 4)),
    rectangle(16_384, 8192, " D64", dim=64),
    causal(8192, " D64", dim=64),
    rectangle(9216, 16_384, " D256", dim=256, heads=(16, 4)),
    causal(16_384, " D256", dim=256, heads=(16, 4)),
)


class Launch:
    """One shape's tensors, and calls of the package's functions on them."""

    def __init__(self, shape: Shape) -> None:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

        self.package: Any = interface
        self.shape: Shape = shape
        self.count: int = len(shape.queries)
        (h, k), (q_total, k_total) = shape.heads, (sum(shape.queries), sum(shape.keys))
        self.q, self.k, self.v = (
            torch.randn(n, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
            for n, heads in ((q_total, h), (k_total, k), (k_total, k))
        )
        self.lengths: dict[str, Any] = {
            f"cu_seqlens_{side}": torch.tensor([0, *accumulate(n)], dtype=torch.int32).cuda()
            for side, n in (("q", shape.queries), ("k", shape.keys))
        }
        self.lengths |= {"max_seqlen_q": max(shape.queries), "max_seqlen_k": max(shape.keys)}
        self.o, self.lse = self.forward(batch=False)
        self.do: Tensor = torch.randn_like(self.o)

    def forward(self, *, batch: bool, **options: Any) -> tuple[Tensor, ...]:
        o, lse, *_ = self.package._flash_attn_fwd(
            *self._given(batch, self.q, self.k, self.v),
            causal=self.shape.causal,
            return_lse=True,
            **({} if batch else self.lengths),
            **options,
        )
        return (o.flatten(0, 1), lse.transpose(0, 1).flatten(1)) if batch else (o, lse)

    def backward(self, *, batch: bool) -> tuple[Tensor, ...]:
        lse = self.lse.unflatten(1, (self.count, -1)).transpose(0, 1) if batch else self.lse
        found = self.package._flash_attn_bwd(
            *self._given(batch, self.q, self.k, self.v, self.o, self.do),
            lse,
            causal=self.shape.causal,
            **({} if batch else self.lengths),
        )[:3]
        return tuple(x.flatten(0, 1) if batch else x for x in found)

    def _given(self, batch: bool, *tensors: Tensor) -> list[Tensor]:
        return [x.unflatten(0, (self.count, -1)) if batch else x for x in tensors]


def options_of(launch: Launch, direction: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    layouts = {"varlen": False} | ({"batch": True} if launch.shape.equal else {})
    if direction == "backward":
        return {name: lambda b=b: launch.backward(batch=b) for name, b in layouts.items()}
    known = FORWARDS if launch.shape.dim == 128 else {name: FORWARDS[name] for name in OTHER_DIMS}
    return {
        f"{layout}{name}": lambda b=b, o=o: launch.forward(batch=b, **o)
        for layout, b in layouts.items()
        for name, o in known.items()
    }


def measured(shape: Shape, direction: str) -> Iterator[ResultRow]:
    launch = Launch(shape)
    calls = options_of(launch, direction)
    expected = calls["varlen"]()
    for name, call in list(calls.items()):
        error = max(
            float((found.float() - value.float()).norm() / value.float().norm())
            for found, value in zip(call(), expected, strict=True)
        )
        checked = ResultRow(
            bench=Fa4Tiles.NAME,
            case=shape.name,
            metric=f"{direction} {name} error",
            unit="relative",
            value=error,
            bar=BAR,
        )
        yield checked
        if checked.failed:
            del calls[name]
    flops = shape.flops * (2.5 if direction == "backward" else 1.0)
    for name, timing in time_cuda_shuffled(calls, rounds=ROUNDS).items():
        note = f"{flops / timing.p50 / 1e9:.0f} TFLOP/s on visible pairs"
        yield timed_row(Fa4Tiles.NAME, shape.name, f"{direction} {name}", timing, note=note)


@dataclass(frozen=True, kw_only=True)
class Fa4Tiles(Benchmark):
    """Time FlashAttention-4's tiles and layouts on a Hopper GPU, by the shapes of launches.

    Attributes:
        only: Beginnings of the names of shapes to measure; by default every shape.
        direction: Forward, backward or both.
    """

    NAME: ClassVar[str] = "fa4-tiles"

    only: tuple[str, ...] = ()
    direction: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")

    def check(self) -> None:
        check_cuda(self.NAME)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for shape in SHAPES:
            if not shape.name.startswith(self.only or ("",)):
                continue
            for direction in self.direction:
                if not deadline.over(f"{shape.name} {direction}"):
                    yield from measured(shape, direction)
            torch.cuda.empty_cache()
