"""TRL's trainers, with every shared token computed once.

    from forkpoint.integrations.trl import GRPOTrainer

    trainer = GRPOTrainer(model, reward_funcs, args=GRPOConfig(...), forkpoint=Config(...))

`shared_trainer` makes such a class of other subclasses of TRL's trainers.
"""

from typing import TYPE_CHECKING, Any

from forkpoint.integrations.trl.trainers import found_trainer
from forkpoint.integrations.trl.trainers import shared_trainer as shared_trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "RLOOTrainer", "shared_trainer"]


if TYPE_CHECKING:
    GRPOTrainer: Any
    RLOOTrainer: Any
    DPOTrainer: Any


def __getattr__(name: str) -> Any:
    return found_trainer(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
