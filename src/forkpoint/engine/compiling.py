"""Whether a model's decoder blocks are compiled, and which errors are the compiler's.

A compiler may be missing (a C++ compiler on the CPU, Triton or ptxas on CUDA) or fail on code that
runs eagerly. All blocks run eagerly from then on.
"""

import torch

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
