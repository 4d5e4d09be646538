"""State that a trainer's loss writes besides its value, so that it can be computed again."""

from typing import Any

NAMES = (
    "_entropy_window_stats",
    "_last_world_entropy",
    "_total_train_tokens",
    "entropy_coef",
)
"""Attributes of TRL's trainers that their losses assign; `_metrics` they append to."""


class LossState:
    """Metrics and counters of a trainer as they are now."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        attributes = vars(trainer)
        self._values = {name: attributes[name] for name in NAMES if name in attributes}
        self._metrics = {
            mode: {name: list(values) for name, values in metrics.items()}
            for mode, metrics in attributes.get("_metrics", {}).items()
        }

    def restore(self) -> None:
        """Put them back; it may be called several times."""
        for name, value in self._values.items():
            setattr(self._trainer, name, value)
        for mode, metrics in self._metrics.items():
            kept = self._trainer._metrics[mode]
            kept.clear()
            kept.update({name: list(values) for name, values in metrics.items()})
