"""Whether a model's decoder blocks are compiled, and which errors are the compiler's.

A compiler may be missing (a C++ compiler on the CPU, Triton or ptxas on CUDA) or fail on code that
runs eagerly. `Compiling` keeps what is known of it for one model; `Policy` runs a step again with
eager blocks where the compiler has failed at it.
"""

import functools
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

import torch

from forkpoint.errors import ForkpointError

COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "triton")
"""Packages of torch's compiler: their errors, and errors raised in their code, are the compiler's.
"""
GENERATED = "torch_dynamo_resume_in"
"""Names of functions that the compiler generates for code after a graph break begin so."""
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
        """The compiler's error, in one line, once it has failed: blocks then run eagerly."""
        self.proven: bool = False
        """Whether a step with a backward has run compiled. Until then a failed step restores
        gradients from before it, so that it can run again."""
        self.announced: bool = False
        """Whether the first compilation was announced."""

    def reason_for_eager(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why blocks on this device and of this dtype run eagerly; None where they are compiled."""
        if self.asked is False:
            return "compile_blocks is False"
        if self.failure is not None:
            return f"the compiler failed ({self.failure})"
        if self.asked:
            return None
        if device.type != "cuda":
            return "by default they are compiled on CUDA alone (Config.compile_blocks)"
        if dtype == torch.float64:
            return (
                "the model is float64, and torch's compiler fails at gradients of float64 norms on "
                "CUDA"
            )
        return None

    def give_up(self, error: Exception) -> bool:
        """Run blocks eagerly from now on if `error` is the compiler's; whether it is."""
        if self.failure is not None or self.asked is False or not is_of_compiler(error):
            return False
        self.failure = one_line(error)
        return True


def is_of_compiler(error: BaseException) -> bool:
    """Whether an exception comes from torch's compiler, and not from the code that it compiles.

    Running out of memory does not count, nor do errors of forkpoint. Code of the compiler also
    raises errors of the model, such as shapes that do not fit: run eagerly, the model raises them
    itself.
    """
    if not isinstance(error, Exception) or isinstance(
        error, ForkpointError | torch.OutOfMemoryError
    ):
        return False
    if f"{type(error).__module__}.".startswith(tuple(f"{name}." for name in COMPILERS)):
        return True
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Code that torch 2.11 generates after graph breaks within hooks lacks globals of torch.nn.
    if isinstance(error, NameError) and any(c.co_name.startswith(GENERATED) for c in codes):
        return True
    frames = [code.co_filename for code in codes]
    own = (file for file in reversed(frames) if not _is_of_python(file))
    return next(own, "").startswith(_folders())


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    from torch._dynamo.exc import BackendCompilerFailed

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    return text if len(text) <= MOST_REASON_CHARACTERS else f"{text[:MOST_REASON_CHARACTERS]}..."


def _is_of_python(file: str) -> bool:
    """Whether code is of the standard library, which compilers call (subprocess, importlib)."""
    return file.startswith("<frozen") or (
        file.startswith(_standard()) and "site-packages" not in file
    )


@functools.cache
def _standard() -> str:
    return f"{sysconfig.get_paths()['stdlib']}/"


@functools.cache
def _folders() -> tuple[str, ...]:
    """The folders of the compiler's packages; Triton may be missing."""
    root = Path(torch.__file__).parent
    found = [root.joinpath(*name.split(".")[1:]) for name in COMPILERS if name.startswith("torch.")]
    triton = find_spec("triton")
    found += [Path(place) for place in triton.submodule_search_locations or ()] if triton else []
    return tuple(f"{folder}/" for folder in found)
