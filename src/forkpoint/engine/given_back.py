"""When a row's backward is half over, as told by what it has asked for of what was saved.

What is fetched ahead for the next row needs memory, and before a backward begins there is least of
it: all that its row saved is alive. Autograd frees what a node saved once that node has run, so
when half has been asked for, nearly half has been given back, and the other half of the backward
is time enough for a copy.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _Saved:
    """What autograd keeps in the place of a tensor, and its bytes until it is first asked for."""

    __slots__ = ("nbytes", "packed")

    def __init__(self, packed: Any, nbytes: int) -> None:
        self.packed = packed
        self.nbytes = nbytes


class Halfway:
    """Calls `then` once, within the backward of a row, when that has asked for half of its bytes.

    Bytes are those of tensors: views of one storage count one by one, and so does a tensor that
    several nodes save. Within a layer that is much the same from layer to layer, and layers are
    what has to be told apart. Where a backward ends before half (nothing saved, or saved and not
    needed), `then` is not called.

    stays: tells tensors that others hold anyway: a backward gives nothing of them back. Of the
    head's weight, which is asked for first, half a row's bytes could be made.
    """

    def __init__(self, stays: Callable[[Tensor], bool], then: Callable[[], None]) -> None:
        self.stays = stays
        self.saved_bytes: int = 0
        self.asked_bytes: int = 0
        self._then: Callable[[], None] | None = then

    def counted(
        self, pack: Pack = Tensor.detach, unpack: Unpack = lambda tensor: tensor
    ) -> tuple[Pack, Unpack]:
        """Those hooks, counting; by default hooks that leave every tensor where it is.

        These detach, since a node that saves its own output would otherwise keep itself alive.
        """

        def counting_pack(tensor: Tensor) -> Any:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not plain or self.stays(tensor):
                return pack(tensor)
            nbytes = tensor.numel() * tensor.element_size()
            self.saved_bytes += nbytes
            return _Saved(pack(tensor), nbytes)

        def counting_unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Saved):
                return unpack(packed)
            found = unpack(packed.packed)
            self._asked(packed)
            return found

        return counting_pack, counting_unpack

    def _asked(self, saved: _Saved) -> None:
        # A node may ask for what it saved several times.
        self.asked_bytes += saved.nbytes
        saved.nbytes = 0
        if self._then is not None and 2 * self.asked_bytes >= self.saved_bytes:
            then, self._then = self._then, None
            then()
