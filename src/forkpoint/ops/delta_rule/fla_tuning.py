"""One choice of flash-linear-attention's tuned kernels for rows of all lengths.

Triton's autotuner chooses anew for each value of a kernel's keys and for each list of dtypes of the
tensors it is given. Rows of a tree differ in both without a reason to choose anew: `NB` of the
norms is a count of tokens, of which the kernel makes no use, and whether there are states to start
from, or states wanted, changes the list. Each such choice compiles and times up to 30 variants,
several seconds of a step. Here a choice serves whatever differs from it in these alone.
"""

import sys
from collections.abc import Iterator
from typing import Any

COUNTS = ("NB",)
"""Keys that count tokens."""
MODULES = (
    "fla.ops.gated_delta_rule",
    "fla.ops.common",
    "fla.ops.utils",
    "fla.modules.norm.l2norm",
    "fla.modules.l2norm",
)


class SharedChoices(dict[tuple[Any, ...], Any]):
    """What an autotuner keeps as its cache: choices by key, found by similar keys as well."""

    def __init__(self, names: list[str], chosen: dict[tuple[Any, ...], Any]) -> None:
        """`names` are the keys' names, which a key's values come first in; dtypes follow."""
        super().__init__()
        self._names = names
        self._like: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._refused: set[tuple[Any, ...]] = set()
        self.lent: tuple[Any, ...] | None = None
        """The last key that another's choice was given for."""
        for key, choice in chosen.items():
            self[key] = choice

    def _class_of(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        count = len(self._names)
        named = zip(self._names, key[:count], strict=False)
        values = tuple(value for name, value in named if name not in COUNTS)
        return (*values, frozenset(key[count:]))

    def _lender(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if key in self._refused else self._like.get(self._class_of(key))

    def refuse(self, key: tuple[Any, ...]) -> None:
        """Have a choice made for this key by itself."""
        self._refused.add(key)

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, tuple)
        return super().__contains__(key) or self._lender(key) is not None

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        lender = self._lender(key)
        if lender is None:
            raise KeyError(key)
        self.lent = key
        return self[lender]

    def __setitem__(self, key: tuple[Any, ...], choice: Any) -> None:
        super().__setitem__(key, choice)
        self._like.setdefault(self._class_of(key), key)


def share_choices() -> None:
    """Have every tuner of the modules in `MODULES` that are imported share its choices."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    for tuner in tuners(Autotuner):
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


def share(tuner: Any, out_of_resources: type[Exception]) -> None:
    """Where a choice that was made for another key does not fit the device, one is made for it."""
    choices = SharedChoices(tuner.keys, tuner.cache)
    tuner.cache = choices
    run = tuner.run

    def run_with_shared(*args: Any, **kwargs: Any) -> Any:
        choices.lent = None
        try:
            return run(*args, **kwargs)
        except out_of_resources:
            if choices.lent is None:
                raise
            choices.refuse(choices.lent)
            return run(*args, **kwargs)

    tuner.run = run_with_shared
