"""Activations of a microbatch between its forward and its backward: kept, offloaded or dropped.

A microbatch that is recomputed has two forwards. The first, for its prefix cache alone, drops saved
tensors as they come, rather than not recording them: both forwards run the same code (compiled for
autograd, if blocks are compiled) and give the same bits. The second does not write to the cache.

An offloaded microbatch is copied to host memory through hooks on saved tensors, by storage: views
of one storage, and tensors saved twice, are copied once. The backward asks for storages in nearly
the reverse of the order in which they were last saved, so they are fetched in that order, at least
two layers ahead of their use. The last time counts: the last layer is the first to ask for what all
layers save (rotary tables).

Fetching begins during the backward before, once that has freed memory: memory is fullest when it
begins. No more is fetched ahead than it has freed and new gradients do not take, or two layers if
these are more.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from forkpoint.engine.distributed import holder_of
from forkpoint.engine.feature import Feature, Pack, Unpack
from forkpoint.engine.host import Host
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.staging import Staging
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, RECOMPUTE, Instruction

# Names of the autograd nodes through which autocast's linear layers see a weight.
COPIES = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})
LAYERS_ALIVE = 2
"""Layers of a running backward that may be alive: one runs, the other gets its gradient."""
Stays = Callable[[Tensor], bool]
"""Tells tensors that others hold on the device anyway."""


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


def storage_id(tensor: Tensor) -> int:
    """Number that tells a storage from all others that are alive."""
    return tensor.untyped_storage()._cdata


# One offloaded microbatch
# ------------------------------------------------------------


@dataclass(eq=False)
class _Stored:
    """A storage in host memory, and on the device again once it has been fetched."""

    host: Tensor
    sent: Any
    index: int = -1
    """Its position in the order in which storages were last saved, after the forward."""
    device: Tensor | None = None
    arrived: Any = None


@dataclass(eq=False)
class _View:
    """Stand-in that autograd keeps for a tensor: which storage, and the view of it."""

    stored: _Stored
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, size and stride."""


class OffloadedMicrobatch:
    """Packs what a microbatch's forward saves, and fetches it in time for its backward."""

    def __init__(self, staging: Staging, stays: Stays, layers: int, stats: OffloadStats) -> None:
        """`layers`: of the model; a storage is fetched at least two of them ahead of its use."""
        self.staging: Staging = staging
        self.stays: Stays = stays
        self.layers: int = layers
        self.stats: OffloadStats = stats
        self._frame = staging.begin()
        # By storage. A weak reference keeps the address of a dead storage from being used again.
        self._of: dict[int, tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        # By when each was last saved: a dictionary keeps the order in which keys came in.
        self._saved: dict[weakref.ref[_Stored], None] = {}
        self._order: list[weakref.ref[_Stored]] = []
        self._begins: list[int] = [0]
        """Byte offsets of storages, were they laid end to end, and the end of all."""
        self._next = -1
        """The storage to fetch next; those behind it are on their way, or nobody needs them."""
        self.ahead_bytes: int = 0
        """How far ahead storages are fetched, once the forward is over."""
        staging.transfers.begin_microbatch()

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

    def pack(self, tensor: Tensor) -> Tensor | _View:
        # What stays is detached: a node that saved its own output itself would keep itself alive.
        transfers = self.staging.transfers
        moves = (
            type(tensor) is Tensor
            and tensor.device == transfers.device
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= max(1, transfers.least_bytes)
            and not self.stays(tensor)
        )
        if not moves:
            return tensor.detach()
        storage = tensor.untyped_storage()
        known = self._of.get(storage_id(tensor))
        stored = known[1]() if known else None
        if stored is None:
            nbytes = storage.nbytes()
            host = self._frame.take(nbytes)
            if host is None:
                self.stats.left_bytes += nbytes
                return tensor.detach()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored = _Stored(host, transfers.out(whole, host))
            self._of[storage_id(tensor)] = StorageWeakRef(storage), weakref.ref(stored)
            self.stats.out_bytes += nbytes
        reference = weakref.ref(stored)
        self._saved.pop(reference, None)
        self._saved[reference] = None
        view = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return _View(stored, tensor.dtype, view)

    def unpack(self, packed: Tensor | _View) -> Tensor:
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
        return found.set_(stored.device.untyped_storage(), *packed.view)

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
        for stored in wanted:
            if room is not None:
                room -= len(stored.host)
                if room < 0:
                    # Tried again when the backward asks for the next storage.
                    self.stats.held_back += 1
                    self._next = stored.index
                    return
            self.stats.prefetched += 1
            self._fetch(stored)


# Memory that a backward frees
# ------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Counted:
    """Stand-in that autograd keeps for a tensor, and its bytes until it is first asked for."""

    packed: Any
    nbytes: int


class FreedMemory:
    """Tells `then`, within the backward of a microbatch, how many bytes it has freed.

    Autograd frees the saved tensors of a node once that node has run. `then` is called once the
    backward has asked for half of what was saved, which leaves time enough for copies, and again
    each time that more is free by a quarter of a layer. A storage counts once, by the first tensor
    of it that is saved, which the backward asks for last.
    """

    def __init__(
        self,
        stays: Stays,
        then: Callable[[int], None],
        *,
        layers: int = 0,
        ahead_bytes: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            stays: tells tensors that a backward does not free.
            then: gets the bytes.
            layers: of the model.
            ahead_bytes: of a microbatch that is offloaded itself, how far ahead of its use it is
                fetched: it has no more than that on the device.
        """
        self.stays = stays
        self.layers = layers
        self.saved_bytes: int = 0
        self.asked_bytes: int = 0
        self.new_gradient_bytes: int = 0
        """Bytes of gradients that the backward makes."""
        self._then = then
        self._ahead_bytes = ahead_bytes
        self._told: int | None = None
        self._seen: dict[int, StorageWeakRef] = {}

    def hooks(
        self, pack: Pack = Tensor.detach, unpack: Unpack = lambda tensor: tensor
    ) -> tuple[Pack, Unpack]:
        """Those hooks, counting; by default hooks that leave every tensor where it is.

        These detach, since a node that saves its own output would otherwise keep itself alive.
        """

        def counting_pack(tensor: Tensor) -> Any:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not plain or self.stays(tensor) or not self._is_new(tensor):
                return pack(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            self.saved_bytes += nbytes
            return _Counted(pack(tensor), nbytes)

        def counting_unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Counted):
                return unpack(packed)
            found = unpack(packed.packed)
            self._asked(packed)
            return found

        return counting_pack, counting_unpack

    def _is_new(self, tensor: Tensor) -> bool:
        known = self._seen.get(storage_id(tensor))
        if known is not None and not known.expired():
            return False
        self._seen[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return True

    def _asked(self, saved: _Counted) -> None:
        if not saved.nbytes:  # a node may ask for what it saved several times
            return
        self.asked_bytes += saved.nbytes
        saved.nbytes = 0
        if 2 * self.asked_bytes < self.saved_bytes:
            return
        layer = self.saved_bytes // self.layers if self.layers else 0
        had = self.saved_bytes - LAYERS_ALIVE * layer
        if self._ahead_bytes is not None:
            had = self._ahead_bytes()
        free = max(0, had - (self.saved_bytes - self.asked_bytes) - self.new_gradient_bytes)
        # Looking for room takes the host some time: not at each of a layer's tensors.
        if self._told is None or free >= self._told + layer // 4:
            self._told = free
            self._then(free)


# The feature
# ------------------------------------------------------------


class Activations(Feature):
    """Keeps, offloads or drops the activations of a pass with backwards."""

    def __init__(
        self,
        plan: Plan,
        prepared: list[MicrobatchInputs],
        host: Host,
        staging: Staging | None,
        missing_bytes: Callable[[], int],
    ) -> None:
        """
        Args:
            plan: of the step.
            prepared: its microbatches as tensors.
            host: the model.
            staging: may be None if the plan offloads no microbatch.
            missing_bytes: gives the size of gradients that do not exist yet.
        """
        self.layers: int = host.shape.layers
        self._offloads = [each.activations == "offload" for each in plan.microbatches]
        self._follower = _followers(plan)
        self._cache: PrefixCache | None = None
        self._missing_bytes = missing_bytes
        self._staging = staging
        self._open: dict[int, OffloadedMicrobatch] = {}
        self._freed: dict[int, FreedMemory] = {}
        """By microbatch: tells the microbatch whose backward comes next."""
        self.stats: OffloadStats | None = None
        self._held: frozenset[int] = frozenset()
        if any(self._offloads):
            assert staging is not None, "a microbatch is offloaded, and there is nowhere to"
            self.stats = OffloadStats()
            tensors = [
                *(p for _, p in host.named_parameters()),
                *holder_of(host.group).whole_parameters(),
                *host.model.buffers(),
                *(x for inputs in prepared for x in vars(inputs).values() if isinstance(x, Tensor)),
            ]
            self._held = frozenset(storage_id(x) for x in tensors)

    def close(self) -> None:
        """End the pass, whether it failed or not: no copy is running, and host memory is free."""
        if self.stats is None or self._staging is None:
            return
        if self._open:
            # A device that has failed ends copies as well; its error is raised already.
            with suppress(RuntimeError):
                self._staging.transfers.drain()
            self._open.clear()
            self._freed.clear()
        self._staging.clear()
        self.stats.host_bytes = self._staging.held_bytes

    def begin_pass(self, cache: PrefixCache) -> None:
        self._cache = cache

    def saved_tensor_hooks(self, instruction: Instruction) -> tuple[Pack, Unpack] | None:
        if not instruction.keeps_graph:
            return _drop, _dropped
        if instruction.idle:
            return None
        index = instruction.microbatch
        offloaded = None
        if self._offloads[index] and instruction.operation != RECOMPUTE:
            assert self._staging is not None and self.stats is not None
            offloaded = OffloadedMicrobatch(self._staging, self._stays, self.layers, self.stats)
            self._open[index] = offloaded
        hooks: tuple[Pack, Unpack] | None = None
        if offloaded is not None:
            hooks = offloaded.pack, offloaded.unpack
        if index in self._follower:
            freed = self._freed[index] = FreedMemory(
                self._stays,
                self._open[self._follower[index]].prefetch,
                layers=self.layers,
                ahead_bytes=None if offloaded is None else lambda: offloaded.ahead_bytes,
            )
            hooks = freed.hooks() if hooks is None else freed.hooks(*hooks)
        return hooks

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if instruction.microbatch in self._open:
            self._open[instruction.microbatch].end_forward()

    def _stays(self, tensor: Tensor) -> bool:
        """Whether others hold a tensor on the device anyway: it is a parameter, a copy of one that
        autocast keeps, an input, or prefix cache."""
        assert self._cache is not None
        held = storage_id(tensor) in self._held or self._cache.holds(tensor)
        return held or is_copy_of_leaf(tensor)

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Fetch ahead what the backward before has not: it may have freed too little."""
        if instruction.operation != BACKWARD:
            return
        if instruction.microbatch in self._open:
            self._open[instruction.microbatch].prefetch()
        if instruction.microbatch in self._freed:
            self._freed[instruction.microbatch].new_gradient_bytes = self._missing_bytes()

    def after_backward(self, instruction: Instruction) -> None:
        self._freed.pop(instruction.microbatch, None)
        offloaded = self._open.pop(instruction.microbatch, None)
        if offloaded is not None:
            offloaded.close()


def _followers(plan: Plan) -> dict[int, int]:
    """By microbatch: the offloaded microbatch whose backward comes next, if that was offloaded
    before its own activations were recorded."""
    recorded: dict[int, int] = {}
    offloaded: set[int] = set()
    for at, instruction in enumerate(plan.program.training):
        if instruction.idle or instruction.operation == BACKWARD or not instruction.keeps_graph:
            continue
        recorded[instruction.microbatch] = at
        kept = plan.microbatches[instruction.microbatch].activations
        if kept == "offload" and instruction.operation == FORWARD:
            offloaded.add(instruction.microbatch)
    return {
        one.microbatch: after.microbatch
        for one, after in pairwise(plan.program.training)
        if one.operation == after.operation == BACKWARD
        and not one.idle
        and after.microbatch in offloaded
        and recorded[after.microbatch] < recorded[one.microbatch]
    }


def is_copy_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf's copy in another dtype, perhaps transposed: a weight's, then."""
    node = tensor.grad_fn
    while node is not None and node.name() in COPIES:
        node = node.next_functions[0][0]
        if node is not None and node.name().endswith("AccumulateGrad"):
            return True
    return False


def _drop(_: Tensor) -> None:
    return None


def _dropped(_: None) -> NoReturn:
    raise AssertionError("the backward of a forward whose activations were dropped")
