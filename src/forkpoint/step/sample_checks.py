"""When a model is compared with its stock forward on a sample: `forkpoint.step.self_check` does so."""

from collections.abc import Callable, Hashable

import torch

from forkpoint.config import Config
from forkpoint.engine.host import Host
from forkpoint.engine.transaction import Transaction
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.self_check import self_check
from forkpoint.step.weight_changes import OptimizerSteps

MOST_STATES = 64
"""States of a model, such as training and evaluation, that are remembered as checked."""


class SampleChecks:
    """The checks of one model: before its first step, before the second, and before the first after
    the model has changed.

    At the second step weights have moved: values that a hook derives from them are then renewed.
    """

    def __init__(self) -> None:
        self._agreed: dict[Hashable, list[tuple[int, int]]] = {}
        """By state of the model: at which versions of its weights its sample has agreed."""
        self._steps: OptimizerSteps | None = None

    def run(
        self,
        transaction: Transaction,
        host: Host,
        config: Config,
        batch: RolloutBatch,
        fingerprint: int,
        *,
        training: bool,
        on_any_rank: Callable[[bool], bool],
    ) -> None:
        """Compare the model on a sample of a batch, and remember that it has agreed.

        Raises as `self_check`, whose arguments are given.
        """
        state, version = self._state(host, config, fingerprint, training=training)
        self_check(transaction, host, config, batch, training=training, on_any_rank=on_any_rank)
        self._agreed[state] = [*self._agreed.get(state, []), version]
        while len(self._agreed) > MOST_STATES:
            self._agreed.pop(next(iter(self._agreed)))

    def is_due(self, host: Host, config: Config, fingerprint: int, *, training: bool) -> bool:
        """Whether the model is to be compared on this rank."""
        if not config.self_check:
            return False
        state, version = self._state(host, config, fingerprint, training=training)
        versions = self._agreed.get(state, [])
        return len(versions) < 2 and version not in versions

    def _state(
        self, host: Host, config: Config, fingerprint: int, *, training: bool
    ) -> tuple[Hashable, tuple[int, int]]:
        """The state of the model, and the version of its weights."""
        kind = host.device.type
        state = (
            fingerprint,
            training,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            config.attention_kernel,
            config.recurrence_kernel,
        )
        weights = [p for _, p in host.named_parameters() if not p.is_inference()]
        if self._steps is None:
            self._steps = OptimizerSteps(weights)
        return state, (sum(p._version for p in weights), self._steps.count)
