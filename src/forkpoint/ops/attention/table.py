"""Inputs of one microbatch's attention: its launches, and prefix caches of other microbatches.

They are built once a microbatch, and used by all layers and passes. AttentionTable is no dataclass,
because FSDP copies dataclasses in call arguments.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device, to_device
from forkpoint.tree import FROM_OWN, LONG_TOKENS, LaunchLayout, Table

ALIGNED_LENGTHS = 4
"""Number of int32 in 16 bytes."""


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
    """The launches of one microbatch on the device.

    own_gather and cache_gather are None except in windowed layers. They are int64 [2, *] on the
    device: indices of gathered keys in the first row, and in the second row the places of the
    microbatch, or the slots of the cache, from which these keys are read.
    """

    def __init__(self, table: Table, *, device: torch.device | str = "cpu") -> None:
        self.calls: list[Launch] = _launches(table.launches, device)
        self.own_gather: Tensor | None = None
        self.cache_gather: Tensor | None = None
        self.chosen: dict[Hashable, list[Any]] = {}
        """Chosen kernels for `calls`, by the properties of the attention, so that equal layers
        choose once."""
        key_index = table.key_index
        if key_index is not None:
            # Split here, on the host, so that no layer needs masks, clamps or a sync for it.
            (own,), (other,) = np.nonzero(key_index >= 0), np.nonzero(key_index < 0)
            self.own_gather = on_device(np.stack([own, key_index[own]]), device)
            if other.size:
                self.cache_gather = on_device(np.stack([other, -1 - key_index[other]]), device)


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


def _launches(layouts: Sequence[LaunchLayout], device: torch.device | str) -> list[Launch]:
    """Launches with their cumulative lengths, which are copied to the device together."""
    parts = [_cut_long(layout) for layout in layouts]
    every = [each for layout, its in zip(layouts, parts, strict=True) for each in (*its, layout)]
    cu = [np.cumsum((0, *side)) for each in every for side in (each.q_lengths, each.k_lengths)]
    # FlashAttention-4 copies lengths that do not begin at 16 bytes, in each layer's backward.
    padded = [np.pad(x, (0, -len(x) % ALIGNED_LENGTHS)) for x in cu]
    # Devices are explicit, because the user may have set another default device.
    cu_cpu = torch.tensor(np.concatenate(padded), dtype=torch.int32, device="cpu")
    begins = np.cumsum([0, *map(len, padded)])
    places = [slice(at, at + len(x)) for at, x in zip(begins, cu, strict=False)]
    cu_device = to_device(cu_cpu, device)
    cuts = ((cu_device[place], cu_cpu[place]) for place in places)

    def launch(layout: LaunchLayout, parts: tuple[Launch, ...] = ()) -> Launch:
        (cu_q, cu_q_cpu), (cu_k, cu_k_cpu) = next(cuts), next(cuts)
        return Launch(
            source=layout.source,
            causal=layout.causal,
            q_begin=layout.q_begin,
            q_end=layout.q_begin + sum(layout.q_lengths),
            k_begin=layout.k_begin,
            k_end=layout.k_begin + sum(layout.k_lengths),
            max_q=max(layout.q_lengths),
            max_k=max(layout.k_lengths),
            count=len(layout.q_lengths),
            cu_q=cu_q,
            cu_k=cu_k,
            cu_q_cpu=cu_q_cpu,
            cu_k_cpu=cu_k_cpu,
            parts=parts,
        )

    # Parts come before their launch, as in `every`.
    pairs = zip(layouts, parts, strict=True)
    return [launch(layout, tuple([launch(part) for part in its])) for layout, its in pairs]


def _cut_long(layout: LaunchLayout) -> list[LaunchLayout]:
    """The parts of a launch (`Launch.parts`)."""
    long = np.asarray(layout.q_lengths) >= LONG_TOKENS
    if not (layout.causal and layout.source == FROM_OWN and long.any()):
        return []
    # A part begins at each long sequence and after each.
    first = np.flatnonzero(long | np.append(True, long[:-1])).tolist()
    found = []
    for begin, end in pairwise([*first, len(long)]):
        at, lengths = sum(layout.q_lengths[:begin]), layout.q_lengths[begin:end]
        found.append(LaunchLayout(FROM_OWN, True, at, at, lengths, lengths))
    return found
