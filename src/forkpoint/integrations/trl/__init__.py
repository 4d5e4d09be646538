"""TRL's trainers with forkpoint's steps, which compute every shared token once.

    from forkpoint.integrations.trl import GRPOTrainer

    trainer = GRPOTrainer(model, reward_funcs, args=GRPOConfig(...), forkpoint=Config(...))

For your subclass of a TRL trainer, use `shared_trainer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forkpoint.integrations.trl.trainers import NAMES
from forkpoint.integrations.trl.trainers import shared_trainer as shared_trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "RLOOTrainer", "shared_trainer"]


if TYPE_CHECKING:
    GRPOTrainer: Any
    RLOOTrainer: Any
    DPOTrainer: Any


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return shared_trainer(getattr(import_module("trl"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
