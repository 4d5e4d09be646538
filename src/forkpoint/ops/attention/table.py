"""Inputs of one microbatch's attention: its launches, and prefix caches of other microbatches.

They are built once a microbatch, and used by all layers and passes. AttentionTable is no dataclass,
because FSDP copies dataclasses in call arguments.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import to_device
from forkpoint.tree import FROM_OWN, LAUNCH_COLUMNS, LONG_TOKENS


@dataclass(frozen=True, slots=True)
class Launch:
    """One variable-length attention call: `count` sequences, back to back on both sides.

    Sequence i has queries `cu_q[i]` to `cu_q[i+1]` and keys `cu_k[i]` to `cu_k[i+1]`, counted from
    the start of the launch. Queries attend to all keys of their sequence or, if causal, to keys up
    to their own position, with the last query at the last key (bottom-right). No sequence is empty.
    """

    source: int
    causal: bool
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    max_q: int
    max_k: int
    count: int
    cu_q: Tensor
    cu_k: Tensor
    cu_q_cpu: Tensor
    cu_k_cpu: Tensor
    parts: tuple["Launch", ...] = ()
    """The same sequences as several launches in order, for kernels of single sequences: each
    sequence of at least LONG_TOKENS is a separate launch, and sequences between these are one
    launch. Their ranges are relative to the launch. Empty unless the launch is causal over keys of
    the microbatch and has such a sequence."""

    @property
    def ragged(self) -> bool:
        """Whether its sequences differ in length, on either side."""
        return (
            self.count * self.max_q != self.q_end - self.q_begin
            or self.count * self.max_k != self.k_end - self.k_begin
        )

    def sequences(self) -> Iterator[tuple[int, int, int, int]]:
        """(q_begin, q_end, k_begin, k_end) of each sequence, relative to the launch."""
        q, k = self.cu_q_cpu.tolist(), self.cu_k_cpu.tolist()
        return zip(q, q[1:], k, k[1:], strict=False)


class AttentionTable:
    """The launches of one microbatch; build it with `from_numpy`.

    own_gather and cache_gather are None except in windowed layers. They are int64 [2, *] on the
    device: indices of gathered keys in the first row, and in the second row the places of the
    microbatch, or the slots of the cache, from which these keys are read.
    """

    def __init__(
        self,
        calls: list[Launch],
        own_gather: Tensor | None = None,
        cache_gather: Tensor | None = None,
    ) -> None:
        self.calls: list[Launch] = calls
        self.own_gather: Tensor | None = own_gather
        self.cache_gather: Tensor | None = cache_gather
        self.chosen: dict[Hashable, list[Any]] = {}
        """Chosen kernels for `calls`, by the properties of the attention, so that equal layers
        choose once."""

    @classmethod
    def from_numpy(
        cls,
        launches: np.ndarray,
        cu: np.ndarray,
        key_index: np.ndarray | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> "AttentionTable":
        """Put a planner's table on the device.

        launches: integers [n, 11], columns as in LAUNCH_COLUMNS. source is 0 for keys of the
            microbatch, 1 for keys of the cache, 2 for keys gathered by key_index. Queries are
            q[q_begin:q_end], keys source[k_begin:k_end], cut into `count` sequences by `cu[cu_q_at
            : cu_q_at + count + 1]` and `cu[cu_k_at : ...]`. The first launch covers every query of
            the microbatch; later ones cover contiguous parts of it.
        cu: integers [*], runs of cumulative lengths, each starting at 0.
        key_index: integers [G]; i >= 0 is the place i of the microbatch, i < 0 is the entry -1 - i
            of the cache. A table with key_index has exactly one launch, of source 2.
        """
        own_gather = cache_gather = None
        if key_index is not None:
            # Split here, on the host, so that no layer needs masks, clamps or a sync for it.
            (own,), (other,) = np.nonzero(key_index >= 0), np.nonzero(key_index < 0)
            own_gather = to_device(torch.from_numpy(np.stack([own, key_index[own]])), device)
            if other.size:
                cache_gather = to_device(
                    torch.from_numpy(np.stack([other, -1 - key_index[other]])), device
                )
        return cls(_read_launches(launches, cu, device), own_gather, cache_gather)


class Ancestors(Protocol):
    """Prefix cache of one layer. It is on the device between `open` and `close`."""

    def open(self) -> "CacheSlice":
        """The cache, for one forward or backward of attention."""
        ...

    def close(self) -> None:
        """Called after a backward has added to the gradients."""
        ...


class CacheSlice:
    """Prefix cache of one layer, of the ancestors of a microbatch in other microbatches.

    k [A, K, D] and v [A, K, E] in the dtype of the microbatch's own; constants here, never
    differentiated. grad_k and grad_v, both or neither, float32 (float64 for float64) of the same
    shapes: the backward adds the gradients of k and v into them, in place.

    Usually slices of larger buffers, whose other slices are written between a microbatch's forward
    and backward.

    Raises AssertionError for a k or v that requires gradients.
    """

    def __init__(
        self, k: Tensor, v: Tensor, grad_k: Tensor | None = None, grad_v: Tensor | None = None
    ) -> None:
        assert not (k.requires_grad or v.requires_grad), (
            "a cache is constant: detach it, and take its gradients from grad_k and grad_v"
        )
        self.k: Tensor = k
        self.v: Tensor = v
        self.grad_k: Tensor | None = grad_k
        self.grad_v: Tensor | None = grad_v

    def open(self) -> Self:
        """Return self, because it is always on the device."""
        return self

    def close(self) -> None:
        """Does nothing."""


def _read_launches(
    launches: np.ndarray, cu: np.ndarray, device: torch.device | str
) -> list[Launch]:
    """The launches of a planner's table, with views of its cumulative lengths."""
    rows = [dict(zip(LAUNCH_COLUMNS, row, strict=True)) for row in launches.tolist()]
    lengths, at, parts = [cu], len(cu), []
    for row in rows:
        parts.append([])
        for first, last in _cut_long(row, cu):
            bounds = cu[row["cu_q_at"] + first : row["cu_q_at"] + last + 1]
            begin, end, longest = int(bounds[0]), int(bounds[-1]), int(np.diff(bounds).max())
            part = {"source": row["source"], "causal": 1, "count": last - first}
            for side in "qk":
                part |= {f"{side}_begin": begin, f"{side}_end": end, f"max_{side}": longest}
                part[f"cu_{side}_at"] = at
            parts[-1].append(part)
            lengths.append(bounds - begin)
            at += len(bounds)
    # Devices are explicit, because the user may have set another default device.
    cu_cpu = torch.tensor(np.concatenate(lengths), dtype=torch.int32, device="cpu")
    cu_device = to_device(cu_cpu, device)

    def read(row: dict[str, int], parts: Sequence[dict[str, int]]) -> Launch:
        q_cut, k_cut = (slice(at, at + row["count"] + 1) for at in (row["cu_q_at"], row["cu_k_at"]))
        return Launch(
            source=row["source"],
            causal=bool(row["causal"]),
            q_begin=row["q_begin"],
            q_end=row["q_end"],
            k_begin=row["k_begin"],
            k_end=row["k_end"],
            max_q=row["max_q"],
            max_k=row["max_k"],
            count=row["count"],
            cu_q=cu_device[q_cut],
            cu_k=cu_device[k_cut],
            cu_q_cpu=cu_cpu[q_cut],
            cu_k_cpu=cu_cpu[k_cut],
            parts=tuple(read(part, ()) for part in parts),
        )

    return [read(row, its) for row, its in zip(rows, parts, strict=True)]


def _cut_long(row: dict[str, int], cu: np.ndarray) -> list[tuple[int, int]]:
    """First sequence and end of each part of a launch; none without a long sequence."""
    long = np.diff(cu[row["cu_q_at"] :][: row["count"] + 1]) >= LONG_TOKENS
    if not (row["causal"] and row["source"] == FROM_OWN and long.any()):
        return []
    # A part begins at each long sequence and after each.
    begins = np.flatnonzero(long | np.append(True, long[:-1])).tolist()
    return list(zip(begins, [*begins[1:], row["count"]], strict=True))
