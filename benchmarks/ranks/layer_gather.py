"""Prefix caches that context ranks gather for one layer at a time (schedule-level reuse, section
4.4).

forkpoint gathers the cache of all layers once, before the responses that ranks run whole. Here the
cache stays split by heads. Each forward and each backward of a microbatch of responses gathers the
keys and values of a layer before its attention, and a backward sends their gradients back after it.
No collective runs beside other work.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor

from forkpoint.engine import engine
from forkpoint.engine.gathered_cache import GatheredCache
from forkpoint.engine.host_cache import HostCache, Rows
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.parallel.topology import Places
from forkpoint.plan.program import Instruction


def by_layer(when: bool) -> AbstractContextManager[object]:
    """Within it, steps gather prefix caches by layer, if `when`."""
    return patch.object(engine, "GatheredCache", _GatheredByLayer if when else GatheredCache)


class _GatheredByLayer(GatheredCache):
    def begin_pass(self, cache: PrefixCache) -> None:
        super().begin_pass(cache)
        # It has the calls of a host cache, whose layers also come and go one at a time.
        layers = cast(HostCache, _Layers(cache, self._places))
        cache.whole = PrefixCache(cache.tokens, gradients=cache.gradients, host=layers)

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        pass

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        pass


class _Layers:
    """Keys and values of all heads of the running layer."""

    def __init__(self, cache: PrefixCache, places: Places) -> None:
        self._cache = cache
        self._places = places
        self._backward = False
        self._gradients: dict[str, Tensor] = {}

    def begin(self, rows: Rows, *, backward: bool) -> None:
        self._backward = backward

    def has(self, module: Hashable, name: str) -> bool:
        return True

    def read(self, module: Hashable, name: str) -> tuple[Tensor, Tensor | None]:
        """Keys or values and, in a backward, the sums of their gradients. Collective."""
        heads, _ = self._cache.read((module, name))
        whole = self._places.all_heads(heads)
        if self._backward:
            wide = accumulate_dtype(whole.dtype)
            self._gradients[name] = torch.zeros_like(whole, dtype=wide)
        return whole, self._gradients.get(name)

    def close(self, module: Hashable) -> None:
        """Add the gradients of all ranks to those of this rank's heads. Collective."""
        for name in list(self._gradients):
            _, heads = self._cache.read((module, name))
            assert heads is not None
            heads += self._places.sum_of_heads(self._gradients.pop(name))

    def end(self) -> None:
        self._gradients.clear()
