"""Protection of the forwards of transformers modules against verl's replacements.

verl's forwards of multimodal models require positions of images from the caller, and those of some
layers drop arguments that identify the running microbatch.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.transformers.families import known_family


def keep_forwards(model_type: str, changes: Changes) -> None:
    """Restore the present forwards of modules of a model_type when the changes are undone.

    Raises the error of `check_forwards`.
    """
    check_forwards(model_type)
    for kind in _modules_of(model_type):
        changes.later(setattr, kind, "forward", kind.forward)


def check_forwards(model_type: str) -> None:
    """Raise UnsupportedError if verl has replaced forwards of modules of a model_type for another
    engine.

    verl does not keep forwards that it replaces, so they cannot be restored.

    Raises UnsupportedError.
    """
    for kind in _modules_of(model_type):
        if kind.forward.__module__.split(".")[0] == "verl":
            raise UnsupportedError(
                f"verl has replaced {kind.__name__}.forward in this process for another engine. "
                "forkpoint needs the forward of transformers. Set VERL_ENGINE_VENDOR=forkpoint "
                "before the first engine of the process is made, or run the other engine in a "
                "process of its own."
            )


def _modules_of(model_type: str) -> Iterator[Any]:
    """Classes of modules with a forward that transformers has for a model_type."""
    family = known_family(model_type)
    if family is None:  # wrap refuses it
        return
    package = family.package or model_type
    code = import_module(f"transformers.models.{package}.modeling_{package}")
    for kind in vars(code).values():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and "forward" in vars(kind)):
            continue
        if kind.__module__ == code.__name__:
            yield kind
