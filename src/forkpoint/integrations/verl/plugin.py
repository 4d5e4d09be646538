"""Registration of the engines, by the entry point `verl.plugins` when verl is imported."""

import os
import sys
import traceback
from importlib import import_module

VENDOR = "forkpoint"
VARIABLE = "VERL_ENGINE_VENDOR"
STRATEGIES = ("fsdp", "fsdp_turbo", "megatron", "torchtitan", "veomni", "automodel")
"""Names of verl's other engines, which are refused."""
MODEL_TYPES = ("language_model", "value_model")
DEVICE = "cuda"


def register() -> None:
    """Register the engines with verl, for the vendor `forkpoint`. It may be called twice."""
    registry = import_module("verl.workers.engine.base").EngineRegistry
    if (DEVICE, VENDOR) in registry._engines.get(MODEL_TYPES[0], {}).get("fsdp2", {}):
        return
    engines = import_module("forkpoint.integrations.verl.engine")
    for model_type in MODEL_TYPES:
        made = {name: engines.refusing(name, model_type) for name in STRATEGIES}
        made["fsdp2"] = engines.engine_class(model_type)
        for strategy, engine in made.items():
            registry.register(
                model_type=model_type, backend=strategy, device=DEVICE, vendor=VENDOR
            )(engine)


def register_or_end() -> None:
    """Register the engines with verl, or end the process with the reason.

    verl ignores exceptions of plugins, and would then run its own engine.
    """
    try:
        register()
    except Exception as error:
        traceback.print_exc()
        sys.exit(
            f"{VARIABLE} is {VENDOR}, and forkpoint's engines for verl could not be loaded "
            f"({type(error).__name__}: {error}). forkpoint takes verl 0.9.1; unset {VARIABLE} to "
            "run verl's own engine."
        )


if os.environ.get(VARIABLE) == VENDOR:
    register_or_end()
