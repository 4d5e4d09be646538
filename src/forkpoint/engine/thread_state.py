"""State that torch keeps for each thread, and how to return to it after an exception.

Context managers of torch change it: grad mode, autocast, hooks on saved tensors, modes, the CUDA
stream. They are written in Python, so an exception that arrives while one is entered or left may
leave the change in place.
"""

import contextlib
import operator
import traceback

import torch
from torch._C import _autograd
from torch._C._dynamo import eval_frame
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

# Functions of these files hold generators, which an exception may leave suspended.
_HOLDERS = frozenset({contextlib.__file__, checkpoint.__file__})
_BOTH = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


class ThreadState:
    """The state of this thread when it was made."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the one, besides the CPU, on which the step runs."""
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._hooks = _top_hooks()
        self._modes = _get_current_function_mode_stack()
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()
        self._frame_callback = eval_frame.get_eval_frame_callback()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Return to this state; after an interrupt it can be repeated."""
        if eval_frame.get_eval_frame_callback() is not self._frame_callback:
            eval_frame.set_eval_frame(self._frame_callback)
        while torch._C._len_torch_dispatch_stack() > self._dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        while _get_current_function_mode_stack() != self._modes:
            now = _get_current_function_mode_stack()
            if now == self._modes[: len(now)]:
                torch._C._push_on_torch_function_stack(self._modes[len(now)])
            else:
                torch._C._pop_torch_function_stack()
        while (top := _top_hooks()) is not None and top != self._hooks:
            _autograd._pop_saved_tensors_default_hooks()
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if not self._nesting:
            torch.clear_autocast_cache()
        if self._stream is not None and self._stream != torch.cuda.current_stream(
            self._stream.device
        ):
            torch.cuda.set_stream(self._stream)
        torch.set_grad_enabled(self._grad)


def close_generators(error: BaseException, before: BaseException | None) -> None:
    """End the generators of context managers and checkpoints that an exception left suspended.

    Otherwise these end with the traceback, at any later time: until then what they have set up
    (torch's checkpoint: hooks on saved tensors) is in force, and then they change the state of
    whatever runs.

    before: the exception that was being handled when the step began, if any; its frames are not
        the step's.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and found is not before and id(found) not in seen:
        seen.add(id(found))
        for frame, _ in reversed(list(traceback.walk_tb(found.__traceback__))):
            if frame.f_code.co_filename in _HOLDERS:
                # A frame that is running cannot be cleared.
                with contextlib.suppress(RuntimeError):
                    frame.clear()
        found = found.__context__


def _autocast_nesting() -> int:
    """How many autocasts are open."""
    # There is no function that only tells. One call in C runs both, so nothing comes in between.
    return tuple(map(operator.call, _BOTH))[1]


def _top_hooks() -> object:
    """The innermost pair of hooks on saved tensors, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)
