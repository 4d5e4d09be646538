"""Whether the code of a trainer's loss is TRL's.

A loss of TRL's own code is computed once all micro-batches of an optimizer step are there, and it
may be computed several times. Other code may do what that would change: draw random numbers, count
its calls, use parameters besides log-probs. So it runs once, when its micro-batch comes.
"""

from types import FunctionType
from typing import Any

LOSS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
"""Methods that make a loss."""
STEP = "training_step"
"""The method that calls the first of them, and a backward of what it gives."""
PACKAGES = ("trl.trainer.", "trl.extras.", "transformers.")


def foreign_method(trainer: Any, ours: type) -> str | None:
    """The name of a method that is not TRL's, with that of its class; None if all are TRL's.

    ours: the class of forkpoint's methods. A `training_step` of a class that comes before it calls
    the one that is meant here, or does not run in a step of ours.
    """
    classes = type(trainer).__mro__
    for name in LOSS:
        if name in vars(trainer):
            return f"trainer.{name}"
    for name in (*LOSS, STEP):
        begin = classes.index(ours) if name == STEP else 0
        owners = (c for c in classes[begin:] if c is not ours and name in vars(c))
        owner = next(owners, None)
        if owner is not None and not _is_known(vars(owner)[name]):
            return f"{owner.__name__}.{name}"
    return None


def _is_known(function: Any) -> bool:
    """Whether TRL or transformers define a function, and all that it wraps."""
    while function is not None:
        if not isinstance(function, FunctionType):
            return False
        # Not __module__, which functools.wraps copies.
        if not function.__globals__["__name__"].startswith(PACKAGES):
            return False
        function = vars(function).get("__wrapped__")
    return True
