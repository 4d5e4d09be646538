"""Decoder blocks compiled one by one, in place while microbatches run.

A compiler may be missing (a C++ compiler on the CPU, Triton or ptxas on CUDA) or fail on code that
runs eagerly. All blocks run eagerly from then on.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.torch_version import TorchVersion

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
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
"""Packages of torch's compiler. Errors that are raised in them count as compiler errors."""
MOST_REASON_CHARACTERS = 200
WARNING = (
    "torch's compiler failed (%s); the decoder blocks of this model run eagerly from now on, with "
    "the same results. Config(compile_blocks=False) does not attempt it."
)


class Compiling:
    """Chooses between compiled and eager decoder blocks of one model."""

    def __init__(self, asked: bool | None) -> None:
        """`asked` is Config.compile_blocks: None compiles on CUDA, but not float64 models."""
        self.asked: bool | None = asked
        self.failure: str | None = None
        """The compiler's error in one line, if it has failed."""
        self.announced: bool = False
        """Whether the first compilation was announced."""

    def compiles(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether blocks on this device and of this dtype are compiled."""
        if self.failure is not None:
            return False
        if self.asked is not None:
            return self.asked
        # On CUDA, the compiler fails at gradients of norms in float64.
        return device.type == "cuda" and dtype != torch.float64

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

    Attention is one operator of the compiled graph. Recurrences are not compiled, because their
    tables change between microbatches. All blocks share a few graphs with dynamic lengths. If a
    microbatch ends in the last block, that block runs eagerly.

    Blocks that the model checkpoints are compiled inside the checkpoint. In newer versions of
    transformers, a block's forward contains the checkpoint. Compiled as a whole, such a block would
    run eagerly, because torch does not compile a checkpoint around code that is not compiled.
    """

    def __init__(
        self, compiling: Compiling, context_argument: str, places: Places = ALL_PLACES
    ) -> None:
        """`context_argument`: as in `Entry`. `places`: places of a microbatch that this rank
        runs."""
        self.compiling = compiling
        self._compiled: dict[nn.Module, Callable] = {}
        self._context_argument = context_argument
        self._places = places
        self._handles: list[int] = []

    def enter(self, blocks: Sequence[nn.Module], changes: Changes) -> None:
        """Replace the blocks' forwards by compiled ones, until the changes are undone.

        If the compiler fails at a block, the block runs eagerly in the same step, because ending
        the step would leave other ranks in its collectives. So backwards are compiled together with
        forwards. If a part of the block has run already, as in blocks of several graphs, the step
        ends if the part has attention or has captured states. Its exchanges between ranks are not
        repeated.
        """
        if not self.compiling.announced:
            self.compiling.announced = True
            _log.warning(ANNOUNCEMENT, len(blocks))
        for name, value in _dynamo_options(blocks).items():
            changes.set_through(torch._dynamo.config, name, value)
        changes.set_through(functorch_config, "force_non_lazy_backward_lowering", True)
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
            capture = context.state.capture
            before = len(self._handles), capture and capture.count
            call = BlockCall(context, modules, self._handles)
            try:
                with call:
                    return compiled(*args, **kwargs)
            except Exception as error:
                if not self.compiling.give_up(error):
                    raise
                _log.warning(WARNING, self.compiling.failure)
                if before != (len(self._handles), capture and capture.count):
                    raise UnsupportedError(
                        "torch's compiler failed in a part of a decoder block after another part "
                        "had run, so this step cannot continue. Run the step again: blocks run "
                        "eagerly from now on. Or set Config(compile_blocks=False)."
                    ) from error
                with call:
                    return own(*args, **kwargs)
        return own(*args, **kwargs)


def _dynamo_options(blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """Options of Dynamo with which a block is traced once, has half as many graphs, and needs less
    host time between them.

    Floats of modules, such as the epsilon of a norm, become constants. As inputs of the graph they
    would cause a second tracing. With nested graph breaks, a call of attention in a module of the
    block breaks the graph once, not also where the block calls the module. Before torch 2.13,
    nested graph breaks generate code that lacks globals for modules with hooks, such as those with
    which transformers records routers' logits.
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
    """Options of Inductor with which long and short microbatches share one compilation.

    With its checks, Inductor fuses sums over tokens with sums over channels only above 4,096
    tokens, or above twice as many tokens as channels. Without them it always does.
    """
    from torch._inductor import config

    name = "mix_order_reduction_non_strict_mode"
    return {f"triton.{name}": True} if hasattr(config.triton, name) else None


def _checkpointed(block: Any, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """As `transformers.modeling_layers.GradientCheckpointingLayer` does it."""
    return block._gradient_checkpointing_func(partial(forward, **kwargs), *args)
