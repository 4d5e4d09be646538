"""Prefix cache: tensors of a microbatch that later ones read, and their boundary gradients.

A layer names any tensors whose first dimension is the microbatch's tokens (K and V in attention). A
microbatch's forward copies them into the cache. Microbatches below read them as constants and add
their gradients to the cache, in float32. The microbatch's backward adds these boundary gradients to
the gradients from within the microbatch, where the tensor was captured. The total is rounded to the
tensor's dtype once. Activation checkpointing needs no special case.

Recurrent layers cache one state for the end of each segment, and the last inputs of a convolution,
in the same way. Often no token of the same microbatch reads a final state. So its gradient is added
at the layer's output (`RecurrentStates.keep`).
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

    The plan assigns the cache slots of each microbatch.
    """

    def __init__(
        self,
        tokens: int,
        *,
        gradients: bool,
        cache_states: int = 0,
        host: HostCache | None = None,
    ) -> None:
        """`tokens` and `cache_states`: numbers of slots for tokens, and for states at ends of
        segments. `host`: layers whose token slots are in host memory; None: no layers."""
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
        """Prefix cache of all heads (engine/gathered_cache.py); None if no prefix cache is
        gathered."""

    def write(self, key: Key, x_T: Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
        """Copy a microbatch's tensor [T, ...] into the cache, and set its boundary gradients to
        zero.

        `runs`: (first place, one past the last, first cache slot).
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
        """The host cache for a layer's first capture, if it takes the layer."""
        host = None if key in self._state else self.host
        if host is None or not host.takes(*key, like, self.tokens, self.gradients):
            return None
        return host

    def sums(self, key: Key, runs: Sequence[tuple[int, int, int]]) -> Sequence[Tensor | None]:
        """Boundary gradients of the running microbatch, one tensor for each run; None is zeros."""
        host = self._host_of(key)
        if host is not None:
            return host.own_sums(*key)
        gradient = self._gradient[key]
        return [gradient[at : at + end - begin] for begin, end, at in runs]

    def end(self) -> None:
        """End the microbatch's forward or backward."""
        if self.host is not None:
            self.host.end()

    def layout(self) -> dict[Key, tuple[bool, tuple[int, ...], torch.dtype]]:
        """By key: whether it is a state at ends of segments, the shape of one slot, and the
        dtype."""
        return {
            key: (key in self._of_states, tuple(state.shape[1:]), state.dtype)
            for key, state in self._state.items()
        }

    def buffers(
        self, key: Key, like: Tensor, *, of_states: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Buffer [tokens, ...] of `like`'s dtype, and that of its boundary gradients, made at the
        first call; [cache_states, ...] for states at ends of segments."""
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
        """The buffer, and that of its boundary gradients, as other microbatches read them.

        Microbatches write disjoint tokens of one buffer between another microbatch's forward and
        backward. `.data` has a separate version counter for each reader, so autograd does not
        mistake these writes for changes of saved tensors.
        """
        host = self._host_of(key)
        if host is not None:
            return host.read(*key)
        gradient = self._gradient.get(key)
        return self._state[key].data, None if gradient is None else gradient.data

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor shares its storage with one of the buffers."""
        begin = x.untyped_storage().data_ptr()
        every = (*self._state.values(), *self._gradient.values())
        return any(begin == buffer.data_ptr() for buffer in every)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Runs in the same order, with adjacent ones joined."""
    found: list[Run] = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


@dataclass(eq=False)
class Capture:
    """The tokens of a microbatch that are captured, and their cache slots."""

    cache: PrefixCache
    runs: list[tuple[int, int, int]]
    """(first place, one past the last, first cache slot)."""
    open: bool = True
    """False after the microbatch's forward, because a recomputation must not write to the cache."""
    _taken: set[Key] = field(default_factory=set, init=False)

    @property
    def count(self) -> int:
        """Number of tensors captured so far."""
        return len(self._taken)

    def takes(self, key: Key) -> bool:
        """Whether to capture a tensor now: once for each key, in the microbatch's forward.

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
    """Capture a tensor of a microbatch. The caller must continue with the returned tensor.

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
    """The gradient plus the boundary gradient from the cache, rounded once."""
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
    """The identity. Its backward adds the boundary gradients from the cache."""

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
    """A microbatch's tables for layers that carry a state, and its access to cached states."""

    cache: PrefixCache
    capture: Capture | None
    table: StateTable
    windows: ConvolutionTable

    def initial(self, key: Key, *made_with: Tensor) -> Tensor | None:
        """Initial states [S, ...] of the segments of the first level; None if all are zero.

        `made_with`: the tensors of this microbatch that later states are made with. If none of them
            requires gradients, the state needs none.
        """
        if self.table.reading is None:
            return None
        state, gradient = self.cache.read(key)
        anchor = next((x for x in made_with if x.requires_grad), made_with[0])
        return _Read.apply(anchor, state, gradient, self.table)  # type: ignore[return-value]

    def inputs(self, key: Key) -> tuple[Tensor | None, Tensor | None]:
        """The last inputs [A, C] of other microbatches, and their gradients, for
        `gathered_inputs`."""
        if self.table.reading is None:
            return None, None
        state, gradient = self.cache.read(key)
        return state.flatten(0, 1), None if gradient is None else gradient.flatten(0, 1)

    def keep(self, output_T: Tensor, states: dict[Key, Tensor | None]) -> Tensor:
        """Capture the states that other microbatches start from. The caller must continue with the
        returned output.

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
    """The identity of an output. Its backward also returns the boundary gradients of a state."""

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
    """Reads states of the cache as constants. The backward adds their gradients to the cache."""

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
