"""Counts that are logged with TRL's metrics, and a warning if nothing is shared."""

import logging

from forkpoint.config import Config
from forkpoint.plan import Plan

_log = logging.getLogger("forkpoint")

PATIENCE_STEPS = 10
PREFIX = "forkpoint/"


class Counts:
    """Tokens and times of the steps since the last log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._values: dict[str, list[float]] = {}
        self._alone = 0
        """Number of consecutive steps without shared tokens."""

    def add(self, plan: Plan, step_ms: float) -> None:
        """Count a finished step."""
        found = {
            "computed_tokens": float(plan.computed_tokens),
            "given_tokens": float(plan.logical_tokens),
            "bound": plan.bound,
            "step_ms": step_ms,
        }
        if plan.predicted_ms is not None:
            found["planned_ms"] = plan.predicted_ms
        for name, value in found.items():
            self._values.setdefault(name, []).append(value)
        alone = plan.computed_tokens >= plan.dense.tokens
        self._alone = self._alone + 1 if alone else 0
        if self._alone == PATIENCE_STEPS:
            _log.warning("%s", warning(plan, self._config))

    def taken(self) -> dict[str, float]:
        """Return means over the steps since the last call, by their names in the log."""
        found = {PREFIX + name: sum(x) / len(x) for name, x in self._values.items()}
        self._values = {}
        return found


def warning(plan: Plan, config: Config) -> str:
    """Text of the warning, with the likely cause."""
    begin = f"No step of the last {PATIENCE_STEPS} has shared a token: "
    if config.sharing == "none":
        return begin + "Config(sharing='none') asks for that."
    if plan.unique_tokens < plan.logical_tokens:
        return (
            f"{begin}{plan.unique_tokens:,} of {plan.logical_tokens:,} tokens are unique, but the "
            "planner found that sharing them would take longer than it saves. "
            "trainer.sharing.last_plan.explain() has the prices."
        )
    return (
        begin + "the rows of an optimizer step begin with different tokens. Where a generation "
        "batch feeds several optimizer steps, keep_groups=True keeps the completions of a prompt "
        "in one; otherwise let per_device_train_batch_size * gradient_accumulation_steps be a "
        "multiple of num_generations, and look for what differs at the start of equal prompts."
    )
