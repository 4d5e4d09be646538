"""Reuses one choice of flash-linear-attention's autotuner for microbatches of all lengths.

Triton's autotuner chooses again for each value of a kernel's keys and each list of tensor dtypes.
Microbatches of a tree differ in both without need for another choice: the key `NB` of the norms is
a token count that the kernel does not use, and optional initial and final states change the list.
Each choice compiles and times up to 30 variants, which takes several seconds of a step. So choices
are shared by calls that differ only in these.

With short segments, the device waits for the host, which calls about 17 kernels for each layer and
level. So a kernel with a known choice is called directly, without two tuners that would each look
it up. This halves the host time of a call.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

COUNTS = ("NB",)
"""Keys that are token counts."""
MODULES = (
    "fla.ops.gated_delta_rule",
    "fla.ops.common",
    "fla.ops.utils",
    "fla.modules.norm.l2norm",
    "fla.modules.l2norm",
)


def share_choices() -> None:
    """Make the tuners of imported modules in `MODULES` share their choices."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    for tuner in list(tuners(Autotuner)):
        share(tuner, OutOfResources)


def tuners(kind: type) -> Iterator[Any]:
    """Tuners inside the module-level kernels, each once."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(MODULES) or module is None:
            continue
        for kernel in list(vars(module).values()):
            # Heuristics and tuners have the wrapped kernel as `fn`.
            while type(kernel).__module__.partition(".")[0] in ("triton", "fla"):
                if isinstance(kernel, kind) and id(kernel) not in seen:
                    seen.add(id(kernel))
                    yield kernel
                if "fn" not in vars(kernel):
                    break
                kernel = kernel.fn


def share(tuner: Any, does_not_fit: type[Exception]) -> None:
    """Make calls of `tuner.run` use the choice of the first call of their kind.

    If that choice does not fit the device in a later call (`does_not_fit` is raised), calls of this
    kind go to the original tuner.
    """
    names = tuple(name for name in tuner.keys if name not in COUNTS)
    tuned = tuner.run
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    alone: set[tuple[Any, ...]] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        # Calls with positional arguments go to the original tuner.
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
