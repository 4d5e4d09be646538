"""Keeps, offloads or drops the activations of a microbatch between its forward and backward.

A recomputed microbatch has two forwards. The first one computes its prefix cache. It records a
graph but drops the saved tensors, so that both forwards run the same code (compiled for autograd,
if blocks are compiled) and give the same bits. The second one does not write to the cache.

An offloaded microbatch is copied to host memory through hooks on saved tensors, by storage: views
of one storage, and tensors saved twice, are copied once. The backward needs storages in nearly the
reverse of the order in which they were last saved. They are fetched in that order, at least two
layers ahead of their use. If all layers save a storage, such as rotary tables, the last layer is
the first one that needs it.

Fetching begins during the preceding backward, once it has freed memory, because the peak of memory
is at its beginning. At most as many bytes are fetched ahead as it has freed, or two layers if they
have more. Gradients are not subtracted, because the memory budget leaves room for them.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from forkpoint.engine.feature import Feature, Pack, Unpack
from forkpoint.engine.host import Host
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.staging import OffloadStats, Staging
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, Instruction

# Names of the autograd nodes through which autocast's linear layers see a weight.
COPIES = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})
LAYERS_ALIVE = 2
"""Layers of a running backward whose tensors may be alive: one runs, and the next one waits for its
gradient."""
Stays = Callable[[Tensor], bool]
"""Returns whether something else keeps a tensor on the device."""


def storage_id(tensor: Tensor) -> int:
    """Identifier of a tensor's storage, unique among living storages."""
    return tensor.untyped_storage()._cdata


# Saved tensors of one microbatch
# ------------------------------------------------------------


@dataclass(eq=False)
class _Stored:
    """A storage in host memory, and its copy on the device after it was fetched."""

    nbytes: int
    host: Sequence[Tensor]
    """Parts, uint8."""
    sent: Any
    index: int = -1
    """Its position in the order in which storages were last saved, after the forward."""
    device: Tensor | None = None
    arrived: Any = None


@dataclass(eq=False, slots=True)
class _Saved:
    """Stand-in that autograd keeps for a tensor."""

    nbytes: int
    """Bytes of its storage, for the first saved tensor of a storage, until the backward needs it;
    otherwise 0."""
    where: Tensor | _Stored
    """The tensor itself if it stays on the device."""
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, size and stride."""


@dataclass(eq=False)
class SavedTensors:
    """Tensors that a microbatch's forward saves: moved to host memory or left on the device.

    Autograd frees the saved tensors of a node after that node has run. `then` is called with the
    bytes that the backward has freed: first when the backward has asked for half of the saved
    bytes, which leaves enough time for copies, then after each further quarter of a layer. A
    storage counts once, with its first saved tensor, which the backward asks for last.
    """

    stays: Stays
    """Returns whether a tensor is not moved, and not freed by the backward."""
    layers: int
    """Number of layers of the model. A storage is fetched at least two layers ahead of its use."""
    staging: Staging | None = None
    """Host memory; None leaves tensors where they are."""
    stats: OffloadStats = field(default_factory=OffloadStats)
    then: Callable[[int], None] | None = None
    """Called with the number of freed bytes."""
    saved_bytes: int = field(default=0, init=False)
    asked_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._told: int | None = None
        # By storage. A weak reference keeps the address of a dead storage from being used again.
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Stored] | None]] = {}
        # By when each was last saved: a dictionary keeps the order in which keys came in.
        self._last: dict[weakref.ref[_Stored], None] = {}
        self._order: list[weakref.ref[_Stored]] = []
        self._begins: list[int] = [0]
        """Cumulative bytes of the storages in `_order`, from 0."""
        self._next = -1
        """Index of the next storage to fetch. Later ones are being fetched, or are not needed."""
        self._ahead_bytes = 0
        """Bytes that are fetched ahead, set when the forward has ended."""
        self._frame = None if self.staging is None else self.staging.begin()
        if self.staging is not None:
            self.staging.transfers.begin_microbatch()

    def end_forward(self) -> None:
        """End the microbatch's forward: fix the order of fetches, the last saved storage first."""
        self._known.clear()
        for reference in self._last:
            stored = reference()
            if stored is not None:
                stored.index = len(self._order)
                self._order.append(reference)
                self._begins.append(self._begins[-1] + stored.nbytes)
        self._last.clear()
        self._next = len(self._order) - 1
        self._ahead_bytes = max(1, LAYERS_ALIVE * self._begins[-1] // self.layers)

    def prefetch(self, free_bytes: int = 0) -> None:
        """Fetch the storages that the backward will need first: `free_bytes`, or two layers if
        more."""
        self._ahead_bytes = max(self._ahead_bytes, free_bytes)
        self._fetch_ahead(len(self._order))

    def close(self) -> None:
        """Free the microbatch's host memory after its backward."""
        if self.staging is not None and self._frame is not None:
            self.staging.end(self._frame)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        # What stays is detached: a node that saved its own output itself would keep itself alive.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or self.stays(tensor):
            return tensor.detach()
        known = self._known.get(storage_id(tensor))
        nbytes = 0 if known else tensor.untyped_storage().nbytes()
        self.saved_bytes += nbytes
        stored = known[1]() if known and known[1] else None
        if stored is None:
            stored = self._move(tensor)
            reference = None if stored is None else weakref.ref(stored)
            storage = StorageWeakRef(tensor.untyped_storage())
            self._known[storage_id(tensor)] = storage, reference
        view = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        if stored is None:
            return _Saved(nbytes, tensor.detach(), tensor.dtype, view)
        reference = weakref.ref(stored)
        self._last.pop(reference, None)
        self._last[reference] = None
        return _Saved(nbytes, stored, tensor.dtype, view)

    def _move(self, tensor: Tensor) -> _Stored | None:
        """Start copying a tensor's storage to the host; None if it stays on the device."""
        if self.staging is None or self._frame is None:
            return None
        transfers, storage = self.staging.transfers, tensor.untyped_storage()
        nbytes = storage.nbytes()
        if tensor.device != transfers.device or nbytes < max(1, transfers.least_bytes):
            return None
        host = self._frame.take(nbytes)
        if host is None:
            self.stats.left_bytes += nbytes
            return None
        self.stats.out_bytes += nbytes
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return _Stored(nbytes, host, transfers.out(_in_parts(whole, host)))

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        found = saved.where if isinstance(saved.where, Tensor) else self._back(saved, saved.where)
        self._asked(saved)
        return found

    def _back(self, saved: _Saved, stored: _Stored) -> Tensor:
        assert self.staging is not None
        if stored.device is None:
            self.stats.on_demand += 1
            self._fetch(stored)
        self._fetch_ahead(stored.index)
        assert stored.device is not None
        self.staging.transfers.wait(stored.arrived)
        found = torch.empty(0, dtype=saved.dtype, device=stored.device.device)
        return found.set_(stored.device.untyped_storage(), *saved.view)

    def _asked(self, saved: _Saved) -> None:
        if self.then is None or not saved.nbytes:  # a node may ask several times
            return
        self.asked_bytes += saved.nbytes
        saved.nbytes = 0
        if 2 * self.asked_bytes < self.saved_bytes:
            return
        layer = self.saved_bytes // self.layers
        # An offloaded microbatch has only the bytes on the device that were fetched ahead.
        had = self._ahead_bytes if self.staging else self.saved_bytes - LAYERS_ALIVE * layer
        free = max(0, had - (self.saved_bytes - self.asked_bytes))
        # Looking for room takes host time, so this does not happen at each tensor of a layer.
        if self._told is None or free >= self._told + layer // 4:
            self._told = free
            self.then(free)

    def _fetch(self, stored: _Stored) -> None:
        assert self.staging is not None
        transfers = self.staging.transfers
        found = torch.empty(stored.nbytes, dtype=torch.uint8, device=transfers.device)
        pairs = [(host, part) for part, host in _in_parts(found, stored.host)]
        stored.device, stored.arrived = found, transfers.bring(pairs, stored.sent)
        self.stats.back_bytes += stored.nbytes

    def _fetch_ahead(self, index: int) -> None:
        """Fetch storages below `index`, in reverse order, until `_ahead_bytes` are on their way."""
        self._next = min(self._next, index - 1)
        wanted: list[_Stored] = []
        ahead = self._ahead_bytes
        while self._next >= 0 and self._begins[index] - self._begins[self._next + 1] < ahead:
            stored = self._order[self._next]()
            if stored is not None and stored.device is None:
                wanted.append(stored)
            self._next -= 1
        if not wanted:
            return
        assert self.staging is not None
        room = self.staging.transfers.headroom_bytes()
        for stored in wanted:
            if room is not None:
                room -= stored.nbytes
                if room < 0:
                    # Tried again when the backward asks for the next storage.
                    self.stats.held_back += 1
                    self._next = stored.index
                    return
            self.stats.prefetched += 1
            self._fetch(stored)


def _in_parts(whole: Tensor, host: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a part of a storage and the host memory for it."""
    return list(zip(whole.split([len(part) for part in host]), host, strict=True))


# The feature
# ------------------------------------------------------------


class Activations(Feature):
    """Keeps, offloads or drops the activations of a pass with backwards."""

    def __init__(
        self,
        plan: Plan,
        prepared: Iterable[MicrobatchInputs],
        host: Host,
        staging: Staging | None,
        stats: OffloadStats | None,
    ) -> None:
        """`staging` and `stats` may be None if the plan offloads no microbatch."""
        # Ranks in lockstep may run one again that is to be offloaded.
        self._offloads = {
            i.microbatch
            for i in plan.program.training
            if i.operation == FORWARD
            and i.keeps_graph
            and not i.idle
            and plan.microbatches[i.microbatch].activations == "offload"
        }
        self._layers = host.shape.layers if self._offloads else 0
        self._follower: dict[int, int] = {
            one.microbatch: after.microbatch
            for one, after in pairwise(plan.program.training)
            if one.operation == after.operation == BACKWARD and after.microbatch in self._offloads
        }
        """The offloaded microbatch whose backward follows directly, by microbatch."""
        self._staging = staging
        self._open: dict[int, SavedTensors] = {}
        self._stats = stats or OffloadStats()
        self._held: frozenset[int] = frozenset()
        if self._offloads:
            assert staging is not None, "a microbatch is offloaded, and there is nowhere to"
            tensors = [
                *(p for _, p in host.named_parameters()),
                *host.group.whole_parameters(),
                *host.model.buffers(),
                *(x for inputs in prepared for x in vars(inputs).values() if isinstance(x, Tensor)),
            ]
            self._held = frozenset(storage_id(x) for x in tensors)

    def saved_tensor_hooks(self, instruction: Instruction) -> tuple[Pack, Unpack] | None:
        if not instruction.keeps_graph:
            return _drop, _dropped
        index = instruction.microbatch
        offloads, follower = index in self._offloads, self._follower.get(index)
        if instruction.idle or (not offloads and follower is None):
            return None
        saved = self._open[index] = SavedTensors(
            self._stays,
            self._layers,
            staging=self._staging if offloads else None,
            stats=self._stats,
            then=None if follower is None else partial(self._prefetch, follower),
        )
        return saved.pack, saved.unpack

    def _prefetch(self, microbatch: int, free_bytes: int) -> None:
        self._open[microbatch].prefetch(free_bytes)

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if instruction.microbatch in self._open:
            self._open[instruction.microbatch].end_forward()

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a tensor stays on the device anyway: a parameter, a buffer, a copy of a weight
        that autocast keeps, an input, or prefix cache."""
        held = storage_id(tensor) in self._held or self.cache.holds(tensor)
        return held or is_copy_of_leaf(tensor)

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Fetch ahead two layers, if the preceding backward has freed too little for that."""
        if instruction.operation == BACKWARD and instruction.microbatch in self._open:
            self._open[instruction.microbatch].prefetch()

    def after_backward(self, instruction: Instruction) -> None:
        saved = self._open.pop(instruction.microbatch, None)
        if saved is not None:
            saved.close()


def is_copy_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a copy of a leaf, such as a weight, in another dtype, perhaps
    transposed."""
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
