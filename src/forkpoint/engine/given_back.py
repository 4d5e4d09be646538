"""How much a microbatch's backward has given back, as told by what it has asked for of what was
saved.

What is fetched ahead for the next microbatch needs memory, and when a backward begins there is
least of
it: all that its microbatch saved is alive. Autograd frees what a node saved once that node has run,
    so what has been asked for is free again soon after, and may be filled with the next
    microbatch's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

# What layers asked for last may be alive still: one at work, and one that its gradients pass to.
LAYERS_ALIVE = 2


class _Saved:
    """Stand-in that autograd keeps for a tensor, and its bytes until it is first asked for."""

    __slots__ = ("nbytes", "packed")

    def __init__(self, packed: Any, nbytes: int) -> None:
        self.packed = packed
        self.nbytes = nbytes


class GivenBack:
    """Tells `then`, within the backward of a microbatch, how many bytes of what the microbatch had
    are free.

    It is told again and again, as these grow. At first only once they are `least`; from when half
    has been asked for in any case, since the other half of the backward is time enough for a copy
    and memory is no longer at its fullest. Where a backward ends before (nothing saved, or saved
    and not needed), `then` is not called.

    A storage counts once, by the first tensor of it that is saved: the backward asks for that one
    last, and until then the storage is alive.

    stays: tells tensors that others hold anyway: a backward gives nothing of them back. Of the
    head's weight, which is asked for first, half a microbatch's bytes could be made.
    layers: of the model; what two of them asked for last counts as alive.
    least: see above.
    ahead_bytes: of a microbatch that is offloaded, how far ahead of its use it is fetched. What it
        has on the device is that much and what is at work, and no more than what it still has to
        ask for.
    """

    def __init__(
        self,
        stays: Callable[[Tensor], bool],
        then: Callable[[int], None],
        *,
        layers: int = 0,
        least: int = 0,
        ahead_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.stays = stays
        self.layers = layers
        self.least = least
        self.saved_bytes: int = 0
        self.asked_bytes: int = 0
        self.grows_bytes: int = 0
        """Bytes that the backward takes for good: gradients that do not exist before it."""
        self._then = then
        self._ahead_bytes = ahead_bytes
        self._told: int | None = None
        self._seen: dict[int, StorageWeakRef] = {}

    def counted(
        self, pack: Pack = Tensor.detach, unpack: Unpack = lambda tensor: tensor
    ) -> tuple[Pack, Unpack]:
        """Those hooks, counting; by default hooks that leave every tensor where it is.

        These detach, since a node that saves its own output would otherwise keep itself alive.
        """

        def counting_pack(tensor: Tensor) -> Any:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not plain or self.stays(tensor) or not self._new(tensor):
                return pack(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            self.saved_bytes += nbytes
            return _Saved(pack(tensor), nbytes)

        def counting_unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Saved):
                return unpack(packed)
            found = unpack(packed.packed)
            self._asked(packed)
            return found

        return counting_pack, counting_unpack

    def _new(self, tensor: Tensor) -> bool:
        key = storage_id(tensor)
        known = self._seen.get(key)
        if known is not None and not known.expired():
            return False
        # A weak reference keeps the address of a dead storage from being used again.
        self._seen[key] = StorageWeakRef(tensor.untyped_storage())
        return True

    def _asked(self, saved: _Saved) -> None:
        if not saved.nbytes:  # a node may ask for what it saved several times
            return
        self.asked_bytes += saved.nbytes
        saved.nbytes = 0
        layer = self.saved_bytes // self.layers if self.layers else 0
        free = self._free_bytes(layer)
        if free < self.least and 2 * self.asked_bytes < self.saved_bytes:
            return
        # Looking for room takes the host some time: not at each of a layer's tensors.
        if self._told is None or free >= self._told + layer // 4:
            self._told = max(0, free)
            self._then(self._told)

    def _free_bytes(self, layer_bytes: int) -> int:
        rest = self.saved_bytes - self.asked_bytes
        if self._ahead_bytes is not None:
            return self._ahead_bytes() - rest - self.grows_bytes
        return self.asked_bytes - LAYERS_ALIVE * layer_bytes - self.grows_bytes


def storage_id(tensor: Tensor) -> int:
    """Number that tells a storage from all others that are alive."""
    return tensor.untyped_storage()._cdata
