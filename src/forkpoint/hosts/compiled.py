"""Decoder blocks compiled one by one, in place while microbatches run.

A compiler may be missing (a C++ compiler on the CPU, Triton or ptxas on CUDA) or fail on code that
runs eagerly. All blocks run eagerly from then on.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.compiled_attention import BlockCall, forget_calls, number_modules
from forkpoint.hosts.modules import HOOKS, every_module
from forkpoint.hosts.wrappers import set_forward
from forkpoint.parallel.topology import ALL_PLACES, Places

_log = logging.getLogger("forkpoint")

LACKS_GLOBALS = TorchVersion(torch.__version__) < "2.13"
ANNOUNCEMENT = (
    "compiling the model's %d decoder blocks (once: forwards now, backwards at the first backward; "
    "seconds on a GPU, a minute on some CPUs). Config(compile_blocks=False) runs them eagerly."
)
COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch.fx.", "triton.")
"""Packages of torch's compiler, whose own errors are the compiler's."""
MOST_REASON_CHARACTERS = 200
WARNING = (
    "torch's compiler failed (%s); the decoder blocks of this model run eagerly from now on, with "
    "the same results. Config(compile_blocks=False) leaves the attempt out."
)


class Compiling:
    """The choice between compiled and eager decoder blocks of one model."""

    def __init__(self, asked: bool | None) -> None:
        """`asked` is Config.compile_blocks: None compiles on CUDA, but not float64 models."""
        self.asked: bool | None = asked
        self.failure: str | None = None
        """The compiler's error, in one line, once it has failed."""
        self.announced: bool = False
        """Whether the first compilation was announced."""

    def reason_for_eager(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why blocks on this device and of this dtype run eagerly; None if they are compiled."""
        if self.asked is False:
            return "compile_blocks is False"
        if self.failure is not None:
            return f"the compiler failed ({self.failure})"
        if self.asked:
            return None
        if device.type != "cuda":
            return "by default they are compiled on CUDA alone (Config.compile_blocks)"
        if dtype == torch.float64:
            return "the model is float64: the compiler fails at gradients of its norms on CUDA"
        return None

    def give_up(self, error: Exception) -> bool:
        """Run blocks eagerly from now on if `error` is the compiler's; returns whether it is."""
        if not f"{type(error).__module__}.".startswith(COMPILERS):
            return False
        self.failure = one_line(error)
        return True


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    from torch._dynamo.exc import BackendCompilerFailed

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    return text if len(text) <= MOST_REASON_CHARACTERS else f"{text[:MOST_REASON_CHARACTERS]}..."


class CompiledBlocks:
    """torch.compile of each block of a decoder, for any length of microbatch.

    Attention is one operator within the compiled code; recurrences are left out of it, for their
    tables change from microbatch to microbatch. All blocks run the same few graphs, compiled for
    lengths that vary. The last block runs eagerly where a microbatch ends in it.

    Blocks that the model checkpoints are compiled within the checkpoint. Newer versions of
    transformers have it in a block's own forward; compiled as a whole, such a block would run
    eagerly, for compilation gives up where it meets a checkpoint around what is left out.
    """

    def __init__(
        self, compiling: Compiling, context_argument: str, places: Places = ALL_PLACES
    ) -> None:
        """`context_argument`: as of `Entry`; `places`: which of a microbatch this rank runs."""
        self.compiling = compiling
        self._compiled: dict[nn.Module, Callable] = {}
        self._context_argument = context_argument
        self._places = places
        self._handles: list[int] = []

    def enter(self, blocks: Sequence[nn.Module], changes: Changes) -> None:
        """Let the blocks' forwards be the compiled ones, until the changes are undone.

        A block at which the compiler fails runs eagerly there and then: a step that ended would
        leave other ranks in its collectives. So backwards are compiled along with forwards.
        """
        if not self.compiling.announced:
            self.compiling.announced = True
            _log.warning(ANNOUNCEMENT, len(blocks))
        config = torch._dynamo.config
        for name, value in _dynamo_options(blocks).items():
            changes.later(setattr, config, name, getattr(config, name))
            setattr(config, name, value)
        lazily = "force_non_lazy_backward_lowering"
        functorch: Any = importlib.import_module("torch._functorch.config")
        changes.later(setattr, functorch, lazily, getattr(functorch, lazily))
        setattr(functorch, lazily, True)
        forget_calls(self._handles, changes)
        inside = [tuple(module for _, module in every_module(block)) for block in blocks]
        number_modules(inside, self._places, changes)
        for block, modules in zip(blocks, inside, strict=True):
            covered = set_forward(block)
            own = covered.own if covered else block.forward
            if block not in self._compiled:
                self._compiled[block] = torch.compile(own, dynamic=True, options=_options())
            forward = partial(self._or_eagerly, self._compiled[block], own, modules)
            if covered:
                forward = covered.around(forward)
            if vars(block).get("gradient_checkpointing", False) and block.training:
                changes.set(vars(block), "gradient_checkpointing", False)
                forward = partial(_checkpointed, block, forward)
            changes.replace_forward(block, forward)

    def _or_eagerly(
        self,
        compiled: Callable[..., Any],
        own: Callable[..., Any],
        modules: tuple[nn.Module, ...],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        context = kwargs.get(self._context_argument)
        if not isinstance(context, CallContext) or modules[0] in context.ends_in:
            return own(*args, **kwargs)
        if self.compiling.failure is None:
            try:
                with BlockCall(context, modules, self._handles):
                    return compiled(*args, **kwargs)
            except Exception as error:
                if not self.compiling.give_up(error):
                    raise
                _log.warning(WARNING, self.compiling.failure)
        return own(*args, **kwargs)


def _dynamo_options(blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """Options of Dynamo: one tracing of a block, half the graphs, and less host work between them.

    A module's floats, such as the epsilon of a norm, are constants. As inputs of the graph they end
    its first tracing, and the block is traced again. Attention is called from a module within the
    block; without nested graph breaks the graph ends there twice, where that module calls it and
    where the block calls the module. Before torch 2.13 code that is generated for a module with
    hooks, such as those by which transformers records routers' logits, lacks globals.
    """
    options: dict[str, Any] = {"specialize_float": True}
    name = "nested_graph_breaks"
    if hasattr(torch._dynamo.config, name) and not (LACKS_GLOBALS and _has_hooks(blocks)):
        options[name] = True
    return options


def _has_hooks(blocks: Sequence[nn.Module]) -> bool:
    inside = (vars(module) for block in blocks for _, module in every_module(block))
    return any(attributes[kind] for attributes in inside for kind in HOOKS)


def _options() -> dict[str, Any] | None:
    """Options of Inductor against one compilation for long microbatches and one for short
    ones.

    Sums over a microbatch's tokens and over their channels share one kernel from 4,096 tokens on,
    or from twice the channels on; without the checks they always do.
    """
    from torch._inductor import config

    name = "mix_order_reduction_non_strict_mode"
    return {f"triton.{name}": True} if hasattr(config.triton, name) else None


def _checkpointed(block: Any, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """As `transformers.modeling_layers.GradientCheckpointingLayer` does it."""
    return block._gradient_checkpointing_func(partial(forward, **kwargs), *args)
