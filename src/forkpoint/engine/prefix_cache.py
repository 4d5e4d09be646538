"""Prefix cache: what later microbatches need of earlier ones, captured, read, and injected.

A layer names any tensors whose first dimension is the microbatch's tokens (K and V in attention).
A microbatch's forward copies them into the cache. Microbatches below read them as constants and add
their gradients to the cache, in float32. The microbatch's backward adds these sums to the gradients
that arrive from within the microbatch, at the capture: the sum is rounded to the tensor's dtype
once, and activation checkpointing needs no care.

Recurrent layers have one state for the end of each segment, and the last inputs of a convolution.
They go the same way. Often no token of its own microbatch reads a final state, so its gradient is
added at the layer's output (`RecurrentStates.keep`).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.engine.host_cache import HostCache, Run
from forkpoint.errors import UnsupportedError
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import ConvolutionTable, StateTable

Key = tuple[Hashable, str]
"""The module that captures, and a name for the tensor within it."""


class PrefixCache:
    """One buffer for each layer and name, made when a layer first captures.

    The plan says which of its tokens a microbatch has.
    """

    def __init__(
        self,
        tokens: int,
        *,
        gradients: bool,
        cache_states: int = 0,
        host: HostCache | None = None,
    ) -> None:
        """`tokens` and `cache_states`: entries of tokens, and of the ends of segments. `host`: the
        layers whose entries of tokens are in host memory; None: no layer's are."""
        self.tokens: int = tokens
        self.cache_states: int = cache_states
        self.gradients: bool = gradients
        self.host: HostCache | None = host
        self._state: dict[Key, Tensor] = {}
        self._gradient: dict[Key, Tensor] = {}
        self._of_states: set[Key] = set()
        self.media: Any = None
        """Features of images and videos (engine/media.py); None in a batch without any."""
        self.whole: PrefixCache | None = None
        """The cache of all heads that ranks have gathered (engine/gathered_cache.py); None where
        they gather nothing."""

    def write(self, key: Key, x_T: Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
        """Copy a microbatch's tensor [T, ...]; its gradients are zeros then.

        `runs`: (first position, one past the last, first entry of the cache).
        """
        host = self._host_of(key) or self._new_host_of(key, x_T)
        if host is not None:
            host.write(*key, x_T.detach(), runs)
            return
        state, gradient = self.buffers(key, x_T)
        with torch.no_grad():
            for begin, end, at in runs:
                state[at : at + end - begin].copy_(x_T[begin:end])
                if gradient is not None:
                    gradient[at : at + end - begin].zero_()

    def _host_of(self, key: Key) -> HostCache | None:
        return self.host if self.host is not None and self.host.has(*key) else None

    def _new_host_of(self, key: Key, like: Tensor) -> HostCache | None:
        """The same for a layer's first capture."""
        host = None if key in self._state else self.host
        if host is None or not host.takes(*key, like, self.tokens, self.gradients):
            return None
        return host

    def sums(self, key: Key, runs: Sequence[tuple[int, int, int]]) -> Sequence[Tensor | None]:
        """For each run of the microbatch whose backward runs, the gradients that others left; None
        is zero."""
        host = self._host_of(key)
        if host is not None:
            return host.own_sums(*key)
        gradient = self._gradient[key]
        return [gradient[at : at + end - begin] for begin, end, at in runs]

    def end(self) -> None:
        """The microbatch's forward or backward has ended."""
        if self.host is not None:
            self.host.end()

    def layout(self) -> dict[Key, tuple[bool, tuple[int, ...], torch.dtype]]:
        """By key: whether it is of the ends of segments, the shape of one entry, and the dtype."""
        return {
            key: (key in self._of_states, tuple(state.shape[1:]), state.dtype)
            for key, state in self._state.items()
        }

    def buffers(
        self, key: Key, like: Tensor, *, of_states: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """State [tokens, ...] of `like`'s dtype and its gradient buffer, made if need be; those of
        the ends of segments are [cache_states, ...]."""
        if key not in self._state:
            if of_states:
                self._of_states.add(key)
            shape = (self.cache_states if of_states else self.tokens, *like.shape[1:])
            self._state[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self.gradients:
                wide = accumulate_dtype(like.dtype)
                self._gradient[key] = torch.empty(shape, dtype=wide, device=like.device)
        state = self._state[key]
        assert state.dtype == like.dtype and state.shape[1:] == like.shape[1:], (
            f"{key} is {state.dtype} {tuple(state.shape[1:])} in one microbatch and "
            f"{like.dtype} {tuple(like.shape[1:])} in another"
        )
        return state, self._gradient.get(key)

    def read(self, key: Key) -> tuple[Tensor, Tensor | None]:
        """State and gradient buffer as a microbatch below reads them.

        Microbatches write disjoint tokens of one buffer between another microbatch's forward and
        backward. `.data` has a version counter of its own for each reader, so that autograd does
        not take these writes for changes of what the reader saved.
        """
        host = self._host_of(key)
        if host is not None:
            return host.read(*key)
        gradient = self._gradient.get(key)
        return self._state[key].data, None if gradient is None else gradient.data

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies in one of the buffers; aliases of them begin where they do."""
        begin = x.untyped_storage().data_ptr()
        every = (*self._state.values(), *self._gradient.values())
        return any(begin == buffer.data_ptr() for buffer in every)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Runs of entries, in order, with neighbours as one."""
    found: list[Run] = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


@dataclass(eq=False)
class Capture:
    """Which tokens of a microbatch are prefix cache, and where they go in the cache."""

    cache: PrefixCache
    runs: list[tuple[int, int, int]]
    """(first position, one past the last, first entry of the cache)."""
    open: bool = True
    """False after the microbatch's forward: a recomputation must not write what children have
    read."""
    _taken: set[Key] = field(default_factory=set, init=False)

    def takes(self, key: Key) -> bool:
        """Whether a tensor is to be captured now: in the microbatch's forward, once for each key.

        Raises UnsupportedError if a module runs a second time in one forward.
        """
        if not self.open:
            return False
        if key in self._taken:
            raise UnsupportedError(
                f"a {type(key[0]).__name__} ran twice in one forward of the model, and forkpoint "
                "caches one result per module. Give each layer separate modules (copy.deepcopy). "
                "Their weights may be tied."
            )
        self._taken.add(key)
        return True


def capture_prefix(x_T: Tensor, key: Key, capture: Capture | None) -> Tensor:
    """Capture a tensor of a microbatch; callers continue with the tensor that is returned.

    Args:
        x_T: [T, ...], one entry for each token of the microbatch.
        key: the module that calls, and the name of the tensor within it.
        capture: None in microbatches that no other microbatch reads.
    """
    write_prefix(x_T, key, capture)
    if capture is None or not capture.cache.gradients or not x_T.requires_grad:
        return x_T
    return _Inject.apply(x_T, key, capture)


def write_prefix(x_T: Tensor, key: Key, capture: Capture | None) -> None:
    """Copy a tensor of a microbatch into the cache, if this is not a recomputation.

    Arguments as in `capture_prefix`.
    """
    if capture is not None and capture.takes(key):
        capture.cache.write(key, x_T, capture.runs)


def add_captured(grad_T: Tensor, key: Key, capture: Capture) -> Tensor:
    """A gradient plus what other microbatches left for it in the cache, rounded once."""
    runs = capture.runs
    sums = capture.cache.sums(key, runs)
    if len(runs) == 1 and runs[0][:2] == (0, len(grad_T)) and sums[0] is not None:
        return (sums[0] + grad_T).to(grad_T.dtype)
    total = grad_T.clone()
    for (begin, end, _), gradient in zip(runs, sums, strict=True):
        if gradient is not None:
            total[begin:end] = gradient + grad_T[begin:end]
    return total


class _Inject(torch.autograd.Function):
    """The identity, whose backward adds the gradients that other microbatches left in the cache."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, key: Key, capture: Capture) -> Tensor:
        # Not save_for_backward: the cache is written on purpose until this backward reads it.
        ctx.key, ctx.capture = key, capture
        return x_T.view_as(x_T)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        return add_captured(grad_outputs[0], ctx.key, ctx.capture), None, None


# States at the ends of segments
# ------------------------------------------------------------


@dataclass(eq=False)
class RecurrentStates:
    """A microbatch's tables for layers that carry a state, and the cache around it."""

    cache: PrefixCache
    capture: Capture | None
    table: StateTable
    windows: ConvolutionTable

    def initial(self, key: Key, *made_with: Tensor) -> Tensor | None:
        """[S, ...] states that segments of the first level start from; None if all are zero.

        `made_with`: the tensors of this microbatch that later states are made with. If none of them
            requires gradients, the state needs none.
        """
        if self.table.reading is None:
            return None
        state, gradient = self.cache.read(key)
        anchor = next((x for x in made_with if x.requires_grad), made_with[0])
        return _Read.apply(anchor, state, gradient, self.table)  # type: ignore[return-value]

    def inputs(self, key: Key) -> tuple[Tensor | None, Tensor | None]:
        """[A, C] the last inputs of other microbatches, and their gradients, for
        `gathered_inputs`."""
        if self.table.reading is None:
            return None, None
        state, gradient = self.cache.read(key)
        return state.flatten(0, 1), None if gradient is None else gradient.flatten(0, 1)

    def keep(self, output_T: Tensor, states: dict[Key, Tensor | None]) -> Tensor:
        """Capture the states that other microbatches start from; returns the output to use.

        `states` are [K, ...], in the order of the table's `kept_index`.
        """
        places = self.table.kept_index
        if self.capture is None or not len(places):
            return output_T
        for key, state_K in states.items():
            assert state_K is not None and len(state_K) == len(places)
            state, gradient = self.capture.cache.buffers(key, state_K, of_states=True)
            if self.capture.takes(key):
                with torch.no_grad():
                    state.index_copy_(0, places, state_K)
                    if gradient is not None:
                        gradient.index_fill_(0, places, 0)
            if gradient is not None and state_K.requires_grad:
                output_T = _Join.apply(output_T, state_K, gradient, places)  # type: ignore[assignment]
        return output_T


class _Join(torch.autograd.Function):
    """The identity of an output, whose backward gives a state the gradients that other
    microbatches left for it."""

    @staticmethod
    def forward(
        ctx: Any, output_T: Tensor, state_K: Tensor, gradient: Tensor, places: Tensor
    ) -> Tensor:
        # Not save_for_backward: the buffer is written on purpose until this backward reads it.
        ctx.gradient, ctx.slots, ctx.dtype = gradient, places, state_K.dtype
        return output_T.view_as(output_T)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        (grad_T,) = grad_outputs
        return grad_T, ctx.gradient.index_select(0, ctx.slots).to(ctx.dtype), None, None


class _Read(torch.autograd.Function):
    """States of the cache, as constants whose gradients add up there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, state: Tensor, gradient: Tensor | None, table: StateTable
    ) -> Tensor:
        ctx.gradient, ctx.table = gradient, table
        assert table.reading is not None
        out_S = state.new_zeros(table.starts, *state.shape[1:])
        return out_S.index_copy_(0, table.reading, state.index_select(0, table.read_index))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[None, None, None, None]:
        (grad_S,) = grad_outputs
        if ctx.gradient is not None:
            read = grad_S.index_select(0, ctx.table.reading).to(ctx.gradient.dtype)
            ctx.gradient.index_add_(0, ctx.table.read_index, read)
        return None, None, None, None
