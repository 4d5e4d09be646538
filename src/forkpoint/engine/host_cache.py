"""Prefix cache in host memory. At most two of its layers are on the device at a time.

Only a layer's attention reads that layer's cache and adds to its boundary gradients. So a
microbatch's forward sends the keys and values of each layer to the host. Microbatches that read
them fetch one layer ahead: the next layer in a forward, the previous one in a backward. In a
backward, boundary gradients are fetched and sent back together with the keys and values. The
boundary gradients of a microbatch itself are fetched once, for its backward.

Boundary gradients without a contribution are zeros, which are made on the device instead of copied.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkpoint.engine.staging import Frame, OffloadStats, Staging
from forkpoint.ops.dtypes import accumulate_dtype

Run = tuple[int, int]
"""The first cache slot of a run, and one past its last."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Cache slots that one microbatch reads and writes."""

    read: tuple[Run, ...]
    """Cache slots of its ancestors in other microbatches, ascending."""
    own: tuple[Run, ...]
    """Cache slots that it captures, in the order of its tokens."""


class _Parts:
    """Rows of a tensor in host memory, in parts."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    @property
    def entry(self) -> Tensor:
        """The first row, [1, ...]."""
        return self._parts[0][:1]

    def pieces(self, begin: int, end: int) -> Iterator[tuple[Tensor, int, int]]:
        """Pieces of parts with the rows begin:end, and where each piece begins and ends among
        them."""
        at, number = begin, bisect_right(self._ends, begin)
        while at < end:
            part, last = self._parts[number], min(end, self._ends[number])
            first = self._ends[number] - len(part)
            yield part[at - first : last - first], at - begin, last - begin
            at, number = last, number + 1


@dataclass(eq=False)
class _Hosted:
    """One of a layer's tensors in host memory."""

    state: _Parts
    gradient: _Parts | None
    device: torch.device
    summed: np.ndarray
    """bool [tokens]: cache slots whose boundary gradient is in host memory; others are zero."""
    sent: Any = None
    """Event after which everything that was sent is in host memory."""


@dataclass(eq=False)
class _Fetched:
    """A layer on the device, for the running microbatch."""

    states: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """Boundary gradients of the microbatch itself, by tensor, one for each run; None is zeros."""
    arrived: list[Any] = field(default_factory=list)
    closed: bool = False
    """Whether its boundary gradients were sent back to the host. Then only `own` is valid."""


class HostCache:
    """Prefix cache in host memory of `hosted` of a model's `layers`, for one pass.

    Hosted layers are spread evenly among the others, so that computation of the others overlaps
    copies. A layer stays on the device if host memory does not suffice for it.
    """

    def __init__(self, staging: Staging, stats: OffloadStats, *, hosted: int, layers: int) -> None:
        self._staging = staging
        self._transfers = staging.transfers
        self._stats = stats
        self._share = hosted, layers
        self._frame: Frame | None = None
        self._seen: dict[Hashable, bool] = {}
        """Whether a layer is hosted, by layer, in the order of first captures."""
        self._hosted: dict[Hashable, dict[str, _Hosted]] = {}
        self._fetched: dict[Hashable, _Fetched] = {}
        self._rows = Rows((), ())
        self._backward = False

    # Layers
    # ------------------------------------------------------------

    def takes(self, layer: Hashable, name: str, like: Tensor, tokens: int, sums: bool) -> bool:
        """Make a layer's tensor [tokens, ...] in host memory; False if it stays on the device.

        `sums`: whether it has boundary gradients.
        """
        if layer not in self._seen:
            hosted, layers = self._share
            number = len(self._seen)
            self._seen[layer] = (number + 1) * hosted // layers > number * hosted // layers
        if not self._seen[layer]:
            return False
        state = self._take(tokens, like, like.dtype)
        gradient = self._take(tokens, like, accumulate_dtype(like.dtype)) if sums else None
        if state is None or (sums and gradient is None):
            self._stats.left_bytes += tokens * like[:1].nbytes
            return False
        tensors = self._hosted.setdefault(layer, {})
        tensors[name] = _Hosted(state, gradient, like.device, np.zeros(tokens, bool))
        return True

    def _take(self, tokens: int, like: Tensor, dtype: torch.dtype) -> _Parts | None:
        if self._frame is None:
            self._frame = self._staging.begin()
        entry = like.shape[1:]
        nbytes = entry.numel() * dtype.itemsize
        parts = self._frame.take(tokens * nbytes, nbytes)
        return None if parts is None else _Parts([x.view(dtype).view(-1, *entry) for x in parts])

    def has(self, layer: Hashable, name: str) -> bool:
        """Whether this tensor of a layer is in host memory."""
        return name in self._hosted.get(layer, {})

    def write(
        self, layer: Hashable, name: str, x_T: Tensor, runs: Sequence[tuple[int, int, int]]
    ) -> None:
        """Send a microbatch's tensor to the host, and set its boundary gradients to zero. `runs`:
        as in `Capture`."""
        hosted = self._hosted[layer][name]
        entry = hosted.state.entry
        assert entry.dtype == x_T.dtype and entry.shape[1:] == x_T.shape[1:], (layer, name)
        for begin, end, at in runs:
            self._send(hosted, x_T[begin:end], hosted.state, at)
            hosted.summed[at : at + end - begin] = False

    def _send(self, hosted: _Hosted, source: Tensor, to: _Parts, at: int) -> None:
        pieces = to.pieces(at, at + len(source))
        hosted.sent = self._transfers.out([(source[a:b], host) for host, a, b in pieces])
        self._stats.out_bytes += source.nbytes
        self._stats.cache_bytes += source.nbytes

    # A microbatch
    # ------------------------------------------------------------

    def begin(self, rows: Rows, *, backward: bool) -> None:
        """Begin a microbatch's forward or backward: fetch its first layer."""
        self._drop(tuple(self._fetched))
        self._rows, self._backward = rows, backward
        order = list(self._hosted)
        if order:
            self._fetch_ahead(order[-1 if backward else 0])

    def end(self) -> None:
        """End the microbatch's forward or backward: drop its layers from the device."""
        self._drop(tuple(self._fetched))

    def read(self, layer: Hashable, name: str) -> tuple[Tensor, Tensor | None]:
        """A layer's tensor and its boundary gradients, on the device.

        They have cache slots [0, n). Slots that the microbatch does not read have undefined values.
        """
        found = self._here(layer, reads=True)
        return found.states[name], found.sums.get(name)

    def close(self, layer: Hashable) -> None:
        """Send a layer's boundary gradients back to the host, after its backward has added to
        them."""
        found = self._fetched.get(layer)
        if found is None:
            return
        for name, total in found.sums.items():
            hosted = self._hosted[layer][name]
            assert hosted.gradient is not None
            for begin, end in self._rows.read:
                self._send(hosted, total[begin:end], hosted.gradient, begin)
                hosted.summed[begin:end] = True
        found.states, found.sums, found.closed = {}, {}, True

    def own_sums(self, layer: Hashable, name: str) -> list[Tensor | None]:
        """Boundary gradients for each run of slots that the running microbatch captured; None is
        zeros."""
        return self._here(layer, reads=False).own.pop(name)

    def _here(self, layer: Hashable, *, reads: bool) -> _Fetched:
        """Fetch a layer, begin to fetch the next one, and drop all others."""
        found = self._fetched.get(layer)
        if found is None or (reads and found.closed):
            self._stats.on_demand += 1
            found = self._fetch(layer)
        order = list(self._hosted)
        if self._backward:
            order.reverse()
        following = order[order.index(layer) + 1 :][:1]
        self._drop([other for other in self._fetched if other not in (layer, *following)])
        for other in following:
            self._fetch_ahead(other)
        self._wait(found)
        return found

    def _drop(self, layers: Sequence[Hashable]) -> None:
        for layer in layers:
            # An unused fetch may still write to memory that is about to be reused.
            self._wait(self._fetched.pop(layer))

    def _wait(self, found: _Fetched) -> None:
        while found.arrived:
            self._transfers.wait(found.arrived.pop())

    # Copies
    # ------------------------------------------------------------

    def _fetch_ahead(self, layer: Hashable) -> None:
        if layer in self._fetched or not (self._rows.read or self._backward):
            return
        room = self._transfers.headroom_bytes()
        if room is not None and room < self._needed_bytes(layer):
            self._stats.held_back += 1
            return
        self._stats.prefetched += 1
        self._fetch(layer)

    def _needed_bytes(self, layer: Hashable) -> int:
        """Bytes of a layer on the device."""
        top = max((end for _, end in self._rows.read), default=0)
        own = sum(end - begin for begin, end in self._rows.own)
        found = 0
        for hosted in self._hosted[layer].values():
            found += top * hosted.state.entry.nbytes
            if self._backward and hosted.gradient is not None:
                found += (top + own) * hosted.gradient.entry.nbytes
        return found

    def _fetch(self, layer: Hashable) -> _Fetched:
        """Start fetching a layer, and in a backward its boundary gradients."""
        found = _Fetched()
        rows = self._rows
        for name, hosted in self._hosted[layer].items():
            pairs: list[tuple[Tensor, Tensor]] = []
            if rows.read:
                found.states[name] = device = self._empty(hosted, hosted.state, rows.read[-1][1])
                for begin, end in rows.read:
                    pieces = hosted.state.pieces(begin, end)
                    pairs += [(host, device[begin + a : begin + b]) for host, a, b in pieces]
            if self._backward and hosted.gradient is not None:
                if rows.read:
                    total = self._empty(hosted, hosted.gradient, rows.read[-1][1])
                    found.sums[name] = total
                    for begin, end in rows.read:
                        pairs += self._sums(hosted, begin, end, total[begin:end])
                found.own[name] = []
                for begin, end in rows.own:
                    total = None
                    if hosted.summed[begin:end].any():
                        total = self._empty(hosted, hosted.gradient, end - begin)
                        pairs += self._sums(hosted, begin, end, total)
                    found.own[name].append(total)
            if pairs:
                copied = sum(host.nbytes for host, _ in pairs)
                self._stats.back_bytes += copied
                self._stats.cache_bytes += copied
                found.arrived.append(self._transfers.bring(pairs, hosted.sent))
        self._fetched[layer] = found
        return found

    def _empty(self, hosted: _Hosted, like: _Parts, rows: int) -> Tensor:
        entry = like.entry
        return torch.empty((rows, *entry.shape[1:]), dtype=entry.dtype, device=hosted.device)

    def _sums(
        self, hosted: _Hosted, begin: int, end: int, total: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Copies that fill `total` with boundary gradients of slots begin:end. Zeros are written at
        once."""
        assert hosted.gradient is not None
        summed = hosted.summed[begin:end]
        edges = [0, *(np.flatnonzero(np.diff(summed)) + 1).tolist(), end - begin]
        pairs: list[tuple[Tensor, Tensor]] = []
        for first, last in pairwise(edges):
            if summed[first]:
                pieces = hosted.gradient.pieces(begin + first, begin + last)
                pairs += [(host, total[first + a : first + b]) for host, a, b in pieces]
            else:
                total[first:last].zero_()
        return pairs
