"""Call arguments of a model's layers: those that are passed on, and those that are refused."""

from collections.abc import Hashable
from typing import Any, NoReturn

from torch import nn

from forkpoint.engine.microbatches import KernelOptions, MicrobatchInputs, MicrobatchState
from forkpoint.errors import UnsupportedError
from forkpoint.plan.program import Instruction

CONTEXT_ARGUMENT = "forkpoint_context"

# Arguments that layers pass besides those that are read, and that change nothing in what is
# computed. Any other with a value is refused, for it may be a mask or a bias.
HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
)


class CallContext:
    """The microbatch that runs, as layers of a model find it in their call arguments.

    A plain object: FSDP copies dataclasses that it meets in call arguments.
    """

    def __init__(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: MicrobatchState,
        kernels: KernelOptions,
        *,
        entropy: bool,
        ends_in: frozenset[Hashable],
    ) -> None:
        """`ends_in`: the modules of the block in which the forward ends; none where it goes on."""
        self.instruction: Instruction = instruction
        self.inputs: MicrobatchInputs = inputs
        self.state: MicrobatchState = state
        self.kernels: KernelOptions = kernels
        self.entropy: bool = entropy
        self.ends_in: frozenset[Hashable] = ends_in


def refuse_call(*_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError, for a call of the model that is not a step's."""
    raise UnsupportedError(
        "the model, or a part of it, was called while a step of forkpoint runs it (from a loss, a "
        "hook or another thread), or its attn_implementation was set to 'forkpoint'. Call it when "
        "no step runs. What a loss needs is computed before the step, by policy.score or by a copy "
        "of the model (copy.deepcopy)."
    )


def taken_context(module: nn.Module, what: str, kwargs: dict[str, Any]) -> CallContext:
    """The microbatch that a layer is called for, out of its other call arguments.

    Raises UnsupportedError where there is none, and for arguments that are not known.
    """
    context = kwargs.pop(CONTEXT_ARGUMENT, None)
    if context is None:
        refuse_call()
    strange = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS_ARGUMENTS)
    if strange:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(strange)} to {what}, and what that changes "
            "is not known, so that forkpoint cannot be exact. Leave it out."
        )
    return context
