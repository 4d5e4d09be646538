"""Forwards of layers that verl replaces, as transformers has them.

verl's forward of Qwen3.5's layers passes no call arguments on to linear attention, and these tell a
layer of a step which microbatch runs.
"""

from importlib import import_module

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError

LAYERS = {
    "qwen3_5": ("Qwen3_5DecoderLayer", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeGatedDeltaNet"),
}


def keep_layers(model_type: str, changes: Changes) -> None:
    """Give layers of a model_type their present forwards back when the changes are undone.

    Raises UnsupportedError where verl has replaced them before, for an engine without forkpoint.
    """
    for name in LAYERS.get(model_type, ()):
        code = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        layer = getattr(code, name)
        if layer.forward.__module__.split(".")[0] == "verl":
            raise UnsupportedError(
                f"verl has replaced {name}.forward in this process, for an engine that is not "
                "forkpoint's, and that forward drops the arguments of a step. Set "
                "VERL_ENGINE_VENDOR=forkpoint for all engines of the process."
            )
        changes.later(setattr, layer, "forward", layer.forward)
