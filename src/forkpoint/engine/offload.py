"""One microbatch's activations in the memory of the host between its forward and its backward.

What autograd saves passes through hooks (torch.autograd.graph.saved_tensors_hooks). The unit is the
storage: views of one storage, and tensors saved twice, are copied once, since device memory is
freed by storages. The backward asks for them in nearly the reverse of the order in which they were
last saved, so they are fetched in that order, at least two layers ahead of their use, where there
is room, and further where the backward before has given back memory: from then on as much is on the
device as when this microbatch's backward began. It is the last time that counts: what all layers
save (rotary tables) is asked for by the last layer first.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from forkpoint.engine.feature import Pack, Unpack
from forkpoint.engine.given_back import GivenBack, storage_id
from forkpoint.engine.staging import Staging


@dataclass(eq=False)
class OffloadStats:
    """Traffic of a pass. Copies are counted in bytes of storages."""

    out_bytes: int = 0
    back_bytes: int = 0
    prefetched: int = 0
    """Storages that were on their way before the backward asked for them."""
    on_demand: int = 0
    """Those that it had to wait for from the start."""
    held_back: int = 0
    """Times that a prefetch was left for later, for want of device memory."""
    left_bytes: int = 0
    """Bytes that stayed on the device because the host's memory was at its limit."""
    host_bytes: int = 0
    """Host memory taken at the end of the pass; it is kept for the next."""


class _Stored:
    """A storage in host memory, and on the device again once it has been fetched."""

    def __init__(self, host: Tensor, sent: Any) -> None:
        self.host, self.sent = host, sent
        self.index = -1
        """Its place in the order in which storages were last saved, once the forward is over."""
        self.device: Tensor | None = None
        self.arrived: Any = None


class _View:
    """Stand-in that autograd keeps for a tensor: which storage, and the view of it."""

    def __init__(self, stored: _Stored, tensor: Tensor) -> None:
        self.stored = stored
        self.dtype = tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class OffloadedMicrobatch:
    """Packs what a microbatch's forward saves, and has it back in time for the microbatch's
    backward.

    stays: tells tensors that others hold on the device anyway, and that are therefore not moved.
    layers: of the model; two of them are how far ahead of its use a storage is fetched at least.
    """

    def __init__(
        self,
        staging: Staging,
        stays: Callable[[Tensor], bool],
        layers: int,
        stats: OffloadStats,
    ) -> None:
        self.staging: Staging = staging
        self.stays: Callable[[Tensor], bool] = stays
        self.layers: int = layers
        self.stats: OffloadStats = stats
        self._frame = staging.begin()
        # By storage. A weak reference keeps the address of a dead storage from being used again.
        self._of: dict[int, tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        # By when each was last saved: a dictionary keeps the order in which keys came in.
        self._saved: dict[weakref.ref[_Stored], None] = {}
        self._order: list[weakref.ref[_Stored]] = []
        self._begins: list[int] = [0]
        """Where each storage begins, in bytes, were they laid end to end, and the end of all."""
        self._next = -1
        """The storage to fetch next; those behind it are on their way, or nobody needs them."""
        self.ahead_bytes: int = 0
        """How far ahead storages are fetched, once the forward is over."""
        staging.transfers.begin_microbatch()

    def hooks(self, given_back: GivenBack | None = None) -> tuple[Pack, Unpack]:
        """Hooks on what the microbatch's forward saves; `given_back` is told what is saved and
        asked for."""
        if given_back is None:
            return self._pack, self._unpack
        return given_back.counted(self._pack, self._unpack)

    def end_forward(self) -> None:
        """The microbatch's forward is over: what it has saved last is fetched first."""
        self._of.clear()
        for reference in self._saved:
            stored = reference()
            if stored is not None:
                stored.index = len(self._order)
                self._order.append(reference)
                self._begins.append(self._begins[-1] + len(stored.host))
        self._saved.clear()
        self._next = len(self._order) - 1
        self.ahead_bytes = max(1, 2 * self._begins[-1] // self.layers)

    def prefetch(self, free_bytes: int = 0) -> None:
        """Fetch what the backward will ask for first, before it begins: so much, or two layers."""
        self.ahead_bytes = max(self.ahead_bytes, free_bytes)
        self._fetch_ahead(len(self._order))

    def close(self) -> None:
        """The microbatch's backward is over: its host memory is free again."""
        self.staging.end(self._frame)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        # What stays is detached: a node that saved its own output itself would keep itself alive.
        if not self._movable(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        known = self._of.get(key)
        stored = known[1]() if known else None
        if stored is None:
            nbytes = storage.nbytes()
            host = self.staging.take(nbytes)
            if host is None:
                self.stats.left_bytes += nbytes
                return tensor.detach()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            sent = self.staging.transfers.out(whole, host)
            stored = _Stored(host, sent)
            self._of[key] = StorageWeakRef(storage), weakref.ref(stored)
            self.stats.out_bytes += nbytes
        reference = weakref.ref(stored)
        self._saved.pop(reference, None)
        self._saved[reference] = None
        return _View(stored, tensor)

    def _movable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self.staging.transfers.device
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= max(1, self.staging.transfers.least_bytes)
            and not self.stays(tensor)
        )

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        stored = packed.stored
        if stored.device is None:
            self.stats.on_demand += 1
            self._fetch(stored)
        self._fetch_ahead(stored.index)
        assert stored.device is not None
        self.staging.transfers.wait(stored.arrived)
        found = torch.empty(0, dtype=packed.dtype, device=stored.device.device)
        return found.set_(
            stored.device.untyped_storage(), packed.offset, packed.size, packed.stride
        )

    def _fetch(self, stored: _Stored) -> None:
        stored.device, stored.arrived = self.staging.transfers.back(stored.host, stored.sent)
        self.stats.back_bytes += len(stored.host)

    def _fetch_ahead(self, index: int) -> None:
        """Fetch storages below `index`, in reverse order, until `ahead_bytes` are on their way."""
        self._next = min(self._next, index - 1)
        wanted: list[_Stored] = []
        ahead = self.ahead_bytes
        while self._next >= 0 and self._begins[index] - self._begins[self._next + 1] < ahead:
            stored = self._order[self._next]()
            if stored is not None and stored.device is None:
                wanted.append(stored)
            self._next -= 1
        if not wanted:
            return
        room = self.staging.transfers.headroom_bytes()
        for at, stored in enumerate(wanted):
            if room is not None:
                room -= len(stored.host)
                if room < 0:
                    # Tried again when the backward asks for the next storage.
                    self.stats.held_back += 1
                    self._next = wanted[at].index
                    return
            self.stats.prefetched += 1
            self._fetch(stored)
