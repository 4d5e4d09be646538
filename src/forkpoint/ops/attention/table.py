"""Inputs of one microbatch's attention: its launches, and prefix cache of other microbatches.

Built once a microbatch and used by all of its layers and passes. Plain objects, no dataclasses:
FSDP copies dataclasses that it meets in call arguments.
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
    the start of what a kernel is given. It sees all of its keys, or, if causal, those up to its own
    position with the last query at the last key (bottom-right). No sequence is empty.
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
    """The same sequences as launches in order, for a kernel of single sequences: each of at least
    LONG_TOKENS alone, those between them together. Their ranges count from the start of the launch.
    Empty unless the launch is causal over keys of the microbatch and has such a sequence."""

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

    own_gather and cache_gather are None but in windowed layers: int64 [2, *] on the device,
    positions among the gathered keys above the places of the microbatch, or of the cache, that they
    are read from.
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
        """The operator's kernels for `calls`, by what it was asked for: layers choose once."""

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
        key_index: integers [G]; an entry >= 0 is a place of the microbatch, an entry < 0 is place
            -1 - entry of the cache. A table with it has exactly one launch, of source 2.
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
    """Prefix cache of one layer, which is on the device while it is open."""

    def open(self) -> "CacheSlice":
        """The cache, for one forward or backward of attention."""
        ...

    def close(self) -> None:
        """A backward has added to the gradients."""
        ...


class CacheSlice:
    """Prefix cache of ancestors in other microbatches, in one layer, as a microbatch sees it.

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
            "an cache is constant: detach it, and let its gradients go to grad_k and grad_v"
        )
        self.k: Tensor = k
        self.v: Tensor = v
        self.grad_k: Tensor | None = grad_k
        self.grad_v: Tensor | None = grad_v

    def open(self) -> Self:
        """Itself, because it is always on the device."""
        return self

    def close(self) -> None:
        """Nothing has to be done."""


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
    # Where each tensor is to be is said: the user may have set another default device.
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
    """First sequences of a launch's parts and the ends of these; none without a long sequence."""
    long = np.diff(cu[row["cu_q_at"] :][: row["count"] + 1]) >= LONG_TOKENS
    if not (row["causal"] and row["source"] == FROM_OWN and long.any()):
        return []
    # A part begins at a long sequence and behind one.
    begins = np.flatnonzero(long | np.append(True, long[:-1])).tolist()
    return list(zip(begins, [*begins[1:], row["count"]], strict=True))
