"""Attention in compiled decoder blocks: one operator, so that a block is one graph.

One compiled graph serves all layers and microbatches, so its operator has neither tables nor prefix
cache among its arguments. Its forward finds them from the block that its thread runs, and returns a
handle with which its backward finds them. The forward also captures keys and values, and the
backward adds their boundary gradients, so that no other operator has side effects.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.prefix_cache import Capture, add_captured, write_prefix
from forkpoint.hosts.calls import CallContext, has_chunks
from forkpoint.hosts.operators import differentiable, operator
from forkpoint.ops.attention.kernel import Options
from forkpoint.ops.attention.operator import Reading, attend, attend_backward
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.parallel.topology import Places

T = TypeVar("T")


class LayerCall:
    """Inputs and outputs of the attention operator of one layer in one microbatch."""

    def __init__(
        self, context: CallContext, layer: nn.Module, k_TKD: Tensor, v_TKE: Tensor, options: Options
    ) -> None:
        """Captures keys and values."""
        state = context.state
        self.places: Places = context.places
        self.tokens: int = context.inputs.part.tokens
        self.layer: nn.Module = layer
        self.capture: Capture | None = state.capture
        write_prefix(k_TKD, (layer, "k"), state.capture)
        write_prefix(v_TKE, (layer, "v"), state.capture)
        table = state.table(options.window, k_TKD.device, chunked=has_chunks(layer))
        cache = state.ancestors(layer)
        self.reading: Reading = Reading(table, cache, options, context.config.attention_kernel)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        wants: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k, v and sinks, each empty unless wanted."""
        dq, dk, dv, dsinks = attend_backward(do, q, k, v, o, lse, sinks, self.reading, wants)
        if self.capture is not None and self.capture.cache.gradients:
            # With the boundary gradients of keys and values.
            dk = add_captured(dk, (self.layer, "k"), self.capture) if wants[1] else dk
            dv = add_captured(dv, (self.layer, "v"), self.capture) if wants[2] else dv
        return dq, dk, dv, dsinks


_calls: dict[int, LayerCall] = {}
"""Calls of running steps, by handle."""
_handles = count()
_NUMBERED = "_forkpoint_numbered"
_thread = threading.local()
"""Attribute "block" by thread: the call of the compiled block that the thread runs."""


class BlockCall:
    """One call of a compiled block: a context manager that makes it known to attention."""

    def __init__(
        self, context: CallContext, modules: Sequence[nn.Module], handles: list[int]
    ) -> None:
        """`modules`: modules of the block by index. `handles`: list to which the handles of the
        call's layers are added."""
        self.context: CallContext = context
        self.modules: Sequence[nn.Module] = modules
        self.handles: list[int] = handles
        self._exchanged: list[Any] = []
        self._repeated: Iterator[Any] = iter(())

    def __enter__(self) -> None:
        self._repeated = iter(tuple(self._exchanged))
        _thread.block = self

    def __exit__(self, *_: object) -> None:
        del _thread.block

    def exchanged(self, exchange: Callable[[], T]) -> T:
        """The result of an exchange between ranks. If the context is entered again, the results of
        the first time are returned in their order, because other ranks do not repeat exchanges."""
        found = next(self._repeated, None)
        if found is None:
            found = exchange()
            self._exchanged.append(found)
        return found


def number_modules(blocks: Sequence[Sequence[nn.Module]], places: Places, changes: Changes) -> None:
    """Store in each module its index in the block and the number of context-parallel ranks, until
    the changes are undone.

    They are constants of compiled code, equal in all blocks of one kind.
    """
    changes.later(_forget_numbers, blocks)
    for modules in blocks:
        for index, module in enumerate(modules):
            vars(module)[_NUMBERED] = index, places.size


def _forget_numbers(blocks: Sequence[Sequence[nn.Module]]) -> None:
    for modules in blocks:
        for module in modules:
            vars(module).pop(_NUMBERED, None)


def numbered(layer: nn.Module) -> tuple[int, int]:
    """A module's index in its block, and the number of ranks of context parallelism."""
    return getattr(layer, _NUMBERED)


def forget_calls(handles: list[int], changes: Changes) -> None:
    """Forget the calls of a step when its changes are undone."""

    def forget() -> None:
        while handles:
            _calls.pop(handles.pop(), None)

    changes.later(forget)


def current_call() -> CallContext:
    """The microbatch of the compiled block that this thread runs."""
    block: BlockCall = _thread.block
    return block.context


def exchanged_once(exchange: Callable[[], T]) -> T:
    """The result of an exchange between ranks in a block, compiled or not (`BlockCall`)."""
    block: BlockCall | None = getattr(_thread, "block", None)
    return exchange() if block is None else block.exchanged(exchange)


def begin_call(
    k_TKD: Tensor, v_TKE: Tensor, index: int, scale: float, softcap: float, window: int
) -> tuple[LayerCall, Tensor]:
    """Begin attention of a module of the running block. Returns the call, and its handle for the
    backward."""
    block: BlockCall = _thread.block
    options = Options(scale, softcap, window, torch.are_deterministic_algorithms_enabled())
    call = LayerCall(block.context, block.modules[index], k_TKD, v_TKE, options)
    handle = next(_handles)
    _calls[handle] = call
    block.handles.append(handle)
    return call, torch.scalar_tensor(handle, dtype=torch.int64, device="cpu")


def call_of(handle: Tensor) -> LayerCall:
    return _calls[int(handle)]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    index: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    call, handle = begin_call(k, v, index, scale, softcap, window)
    o_THE, lse_HT = attend(q, k, v, sinks, call.reading)
    return o_THE, lse_HT, handle


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    tokens, heads, _dim = q.shape
    o_THE = q.new_empty(tokens, heads, v.shape[2])
    lse_HT = q.new_empty(heads, tokens, dtype=accumulate_dtype(q.dtype))
    return o_THE, lse_HT, torch.empty((), dtype=torch.int64, device="cpu")


def _run_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return call_of(handle).backward(do, q, k, v, o, lse, sinks, wants)


def _fake_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks, wants = rest[2], rest[-1]
    return tuple(
        x.new_empty(x.shape) if wanted else q.new_empty(0)
        for x, wanted in zip((q, k, v, sinks), wants, strict=True)
    )


layer_attention_forward: Callable[..., Any] = operator("attention_forward", _run, _fake)
layer_attention_backward: Callable[..., Any] = operator(
    "attention_backward", _run_backward, _fake_backward
)


class _LayerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        o_THE, lse_HT, handle = layer_attention_forward(*inputs)
        q, k, v, sinks = inputs[:4]
        ctx.mark_non_differentiable(lse_HT, handle)
        ctx.save_for_backward(q, k, v, o_THE, lse_HT, sinks, handle)
        return o_THE, lse_HT, handle

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wants = [bool(wanted) for wanted in ctx.needs_input_grad[:4]]
        found = layer_attention_backward(grad_outputs[0], *ctx.saved_tensors, wants)
        gradients = (x if wanted else None for x, wanted in zip(found, wants, strict=True))
        return *gradients, *([None] * 4)  # index, scale, softcap, window


layer_attention: Callable[..., Any] = differentiable("attention", _run, _LayerAttention)
"""Attention of a module of the running block. Returns o [T, H, E], lse [H, T], and the handle."""
