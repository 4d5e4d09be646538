"""One choice of flash-linear-attention's tuned kernels for microbatches of all lengths, and calls
by it.

Triton's autotuner chooses anew for each value of a kernel's keys and for each list of dtypes of the
tensors it is given. Microbatches of a tree differ in both without a reason to choose anew: `NB` of
the norms is a count of tokens that the kernel does not use, and whether there are states to
start from, or states wanted, changes the list. Each such choice compiles and times up to 30
variants, several seconds of a step. Here a choice serves whatever differs from it in these alone.

A tree of short segments waits for the host, which calls some 17 kernels for each layer and level
forward and backward. So a kernel whose choice is known is called at once, past two tuners that
each look it up again: half of what a call costs.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

COUNTS = ("NB",)
"""Keys that count tokens."""
MODULES = (
    "fla.ops.gated_delta_rule",
    "fla.ops.common",
    "fla.ops.utils",
    "fla.modules.norm.l2norm",
    "fla.modules.l2norm",
)


def share_choices() -> None:
    """Have every tuner of the modules in `MODULES` that are imported share its choices."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    for tuner in list(tuners(Autotuner)):
        share(tuner, OutOfResources)


def tuners(kind: type) -> Iterator[Any]:
    """Tuners below the module-level kernels, each once."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(MODULES) or module is None:
            continue
        for kernel in list(vars(module).values()):
            # Heuristics and tuners hold what they wrap as `fn`.
            while type(kernel).__module__.partition(".")[0] in ("triton", "fla"):
                if isinstance(kernel, kind) and id(kernel) not in seen:
                    seen.add(id(kernel))
                    yield kernel
                if "fn" not in vars(kernel):
                    break
                kernel = kernel.fn


def share(tuner: Any, does_not_fit: type[Exception]) -> None:
    """Calls of `tuner.run` take the choice made for the first call of their kind.

    Where it does not fit the device for another (`does_not_fit` is raised), each of that kind is
    left to the tuner, which then knows it by all it is given.
    """
    names = tuple(name for name in tuner.keys if name not in COUNTS)
    tuned = tuner.run
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    alone: set[tuple[Any, ...]] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        # What is given by position is not looked at.
        if args or any(name not in kwargs for name in names):
            return tuned(*args, **kwargs)
        dtypes = frozenset(x.dtype for x in kwargs.values() if isinstance(x, Tensor))
        kind = (*(kwargs[name] for name in names), dtypes)
        if (choice := chosen.get(kind)) is not None:
            try:
                return tuner.fn.run(**kwargs, **choice)
            except does_not_fit:
                del chosen[kind]
                alone.add(kind)
        found = tuned(**kwargs)
        if kind not in alone and tuner.best_config.pre_hook is None:
            chosen[kind] = tuner.best_config.all_kwargs()
        return found

    tuner.run = run
