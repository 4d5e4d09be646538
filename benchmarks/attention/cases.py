"""The shapes on which shared-prefix attention is measured, and their inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.attention import AttentionTable, Kernel, Launch
from forkpoint.ops.attention.kernel import Asked, Options
from forkpoint.ops.attention.operator import Reading, attend, attend_backward
from forkpoint.ops.attention.registry import launch_kernel
from forkpoint.plan.packing import breadth_or_depth
from forkpoint.plan.pricing.cost import ATTENTION_BACKWARD, visible_pairs
from forkpoint.tree import Microbatch, full_table
from forkpoint.tree.forest import Forest


@dataclass(frozen=True)
class Case:
    """A row of groups: prefix lengths, and for each the lengths of its responses."""

    name: str
    prefixes: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    small: bool = False

    @classmethod
    def flat(cls, kind: str, prefix: int, lengths: tuple[int, ...], **options: Any) -> "Case":
        case = cls("", (prefix,), (lengths,), **options)
        ragged = len(set(lengths)) > 1
        size = f"U{min(lengths)}-{max(lengths)}" if ragged else f"{lengths[0]}"
        heads = f"H{case.heads}K{case.kv_heads}D{case.head_dim}"
        dtype = str(case.dtype).removeprefix("torch.")
        name = f"{kind}/P{prefix}-N{len(lengths)}-R{size}-{heads}-{dtype}"
        return cls(name, (prefix,), (lengths,), **options)

    def forest(self) -> Forest:
        parent, start, length = [], [], []
        for prefix, responses in zip(self.prefixes, self.responses, strict=True):
            root = len(parent)
            parent += [-1, *[root] * len(responses)]
            start += [0, *[prefix] * len(responses)]
            length += [prefix, *responses]
        zeros = np.zeros(len(parent), np.int64)
        parents, starts, lengths = (np.asarray(x, np.int64) for x in (parent, start, length))
        return Forest(zeros, parents, starts, lengths, zeros, zeros, zeros)

    def row(self, forest: Forest) -> Microbatch:
        order = breadth_or_depth(forest, list(range(len(forest))))
        begins = np.cumsum([0, *forest.length[order]]).tolist()
        return Microbatch(
            index=0,
            parent=-1,
            segments=tuple(order),
            segment_begin=tuple(begins[:-1]),
            cache_begin=(-1,) * len(order),
            children=(),
            tokens=begins[-1],
        )

    @property
    def pairs(self) -> int:
        forest = self.forest()
        return visible_pairs(forest.start, forest.length, 0)

    @property
    def dense_pairs(self) -> int:
        whole = np.asarray(
            [p + r for p, rs in zip(self.prefixes, self.responses, strict=True) for r in rs]
        )
        return visible_pairs(np.zeros_like(whole), whole, 0)

    def tflops(self, ms: float, *, backward: bool, pairs: int | None = None) -> float:
        flops = 4.0 * self.heads * self.head_dim * (self.pairs if pairs is None else pairs)
        return flops * (ATTENTION_BACKWARD if backward else 1.0) / (ms * 1e9)


def cases(suite: str) -> Iterator[Case]:
    """The cases of a suite: dualkv, prompt-caching, ragged, small, groups."""
    if suite == "dualkv":
        for n, p in ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536)):
            for dtype in (torch.bfloat16, torch.float16):
                yield Case.flat(suite, p, (2048,) * n, dtype=dtype)
    elif suite == "prompt-caching":
        for heads, kv_heads, dim in ((16, 4, 256), (32, 8, 128)):
            for p, r in ((16384, 64), (16384, 128), (16384, 1024), (8192, 4096)):
                options = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
                yield Case.flat(suite, p, (r,) * 9, **options)
    elif suite == "ragged":
        for p, n in ((5059, 32), (8192, 16), (16384, 8), (32768, 4)):
            lengths = tuple(np.random.default_rng(42).integers(131, 2048, n).tolist())
            yield Case.flat(suite, p, lengths)
        rng = np.random.default_rng(42)
        prefixes = tuple(rng.integers(256, 4096, 8).tolist())
        responses = tuple(tuple(rng.integers(131, 2048, 4).tolist()) for _ in prefixes)
        yield Case("ragged/8-groups-PU256-4096-N4-RU131-2048", prefixes, responses)
    elif suite == "small":
        for p in (64, 256, 512):
            for r in (64, 256, 2048):
                yield Case.flat(suite, p, (r,) * 8, small=True)
    else:
        raise ValueError(f"there is no suite {suite!r}")


SUITES = ("dualkv", "prompt-caching", "ragged", "small")


def check_cuda(name: str) -> None:
    """Raises ConfigError where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{name} measures GPU kernels, and torch sees no CUDA device here; run it on a machine "
            "with one."
        )


class Inputs:
    """One case's tensors, and what autograd calls with everything but the numbers fixed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        forest = case.forest()
        self.row: Microbatch = case.row(forest)
        table = full_table(forest, self.row, {})
        self.table: AttentionTable = AttentionTable.from_numpy(
            table.launches, table.cu, device="cuda"
        )
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (self.row.tokens, heads, case.head_dim)
            return torch.randn(shape, generator=generator, device="cuda", dtype=case.dtype)

        self.q: Tensor = normal(case.heads)
        self.do: Tensor = normal(case.heads)
        self.k: Tensor = normal(case.kv_heads)
        self.v: Tensor = normal(case.kv_heads)
        self.scale: float = case.head_dim**-0.5
        self.begin_of: dict[int, int] = dict(
            zip(self.row.segments, self.row.segment_begin, strict=True)
        )

    def forward(self, kernel: str) -> tuple[Tensor, Tensor]:
        return attend(self.q, self.k, self.v, None, self._reading(kernel))

    def backward(self, kernel: str, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        wants = (True, True, True, False)
        tensors = (self.do, self.q, self.k, self.v, o, lse)
        return attend_backward(*tensors, None, self._reading(kernel), wants)

    def _reading(self, kernel: str) -> Reading:
        return Reading(self.table, None, Options(self.scale), kernel)

    def launches(self) -> list[Launch]:
        return self.table.calls

    def stock_calls(
        self, kernel: str, o: Tensor, lse: Tensor
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The kernels' own calls that the operator is made of, forward and backward."""
        options = Options(self.scale)
        calls = []
        for launch in self.launches():
            chosen = kernel_for(kernel, self.q, launch)
            queries = slice(launch.q_begin, launch.q_end)
            keys = slice(launch.k_begin, launch.k_end)
            tensors = (self.q[queries], self.k[keys], self.v[keys])
            merged = (o[queries], lse[:, queries].contiguous())
            calls.append((chosen, launch, queries, tensors, merged))

        def forward() -> None:
            for chosen, launch, _, tensors, _ in calls:
                chosen.forward(*tensors, launch, options)

        def backward() -> None:
            for chosen, launch, queries, tensors, merged in calls:
                chosen.backward(self.do[queries], *tensors, *merged, launch, options)

        return forward, backward

    def copied(self) -> tuple[Tensor, Tensor, Launch, Tensor]:
        """Keys and values with each prefix before each of its responses, and one causal launch.

        Also returns which slots of the row the launch's queries are (all of them, prefixes first).
        """
        case, keys, q_lengths, k_lengths, slots = self.case, [], [], [], []
        forest = case.forest()
        for segment in sorted(range(len(forest)), key=lambda s: forest.parent[s] >= 0):
            begin, length = self.begin_of[segment], int(forest.length[segment])
            own = torch.arange(begin, begin + length, device="cuda")
            parent = int(forest.parent[segment])
            path = [own]
            if parent >= 0:
                at = self.begin_of[parent]
                above = torch.arange(at, at + int(forest.length[parent]), device="cuda")
                path = [above, own]
            keys.append(torch.cat(path))
            slots.append(own)
            q_lengths.append(length)
            k_lengths.append(len(keys[-1]))
        index = torch.cat(keys)
        cu_q, cu_k = (
            torch.tensor(np.cumsum([0, *x]), dtype=torch.int32) for x in (q_lengths, k_lengths)
        )
        launch = Launch(
            0, True, 0, sum(q_lengths), 0, sum(k_lengths), max(q_lengths), max(k_lengths),
            len(q_lengths), cu_q.cuda(), cu_k.cuda(), cu_q, cu_k,
        )  # fmt: skip
        return index, torch.cat(slots), launch, cu_k


def kernel_for(name: str, q: Tensor, launch: Launch) -> Kernel:
    """The kernel that the operator takes for a launch."""
    asked = Asked(q.device, q.dtype, q.shape[2], q.shape[2], 0.0, 0, False)
    return launch_kernel(name, launch, asked)
