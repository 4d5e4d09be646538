"""Forwards of a model's modules that verl replaces, as transformers has them.

verl's forwards of multimodal models take positions of images from their caller alone, and those of
some layers drop the call arguments that tell them which microbatch of a step runs.
"""

from importlib import import_module

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.transformers.families import known_family


def keep_forwards(model_type: str, changes: Changes) -> None:
    """Give modules of a model_type their present forwards back when the changes are undone.

    Raises UnsupportedError where verl has replaced one before, for an engine without forkpoint.
    """
    family = known_family(model_type)
    if family is None:  # wrap refuses it
        return
    package = family.package or model_type
    code = import_module(f"transformers.models.{package}.modeling_{package}")
    for kind in vars(code).values():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and "forward" in vars(kind)):
            continue
        if kind.__module__ != code.__name__:
            continue
        if kind.forward.__module__.split(".")[0] == "verl":
            raise UnsupportedError(
                f"verl has replaced {kind.__name__}.forward in this process for another engine. "
                "forkpoint needs the forward of transformers. Set VERL_ENGINE_VENDOR=forkpoint for "
                "all engines of the process."
            )
        changes.later(setattr, kind, "forward", kind.forward)
