"""Auxiliary losses of the routers of a mixture of experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeGuard

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree.forest import IntArray

RouterScope = Literal["rollout", "batch"] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class RouterLoss:
    """Load-balancing and z losses of routers.

    A token that N rollouts share counts N times in every statistic, as in ordinary training. With
    the softmax p of a token over E experts, and means over the tokens of the scope and all layers
    with a router:

        load balancing   E * sum over experts of (mean count of the expert) * (mean of p)
        z                mean of logsumexp(router logits)^2

    The first is load_balancing_loss_func of transformers (Fedus et al., arXiv 2101.03961, equations
    4 to 6). The second is the z loss of Zoph et al. (arXiv 2202.08906, equation 5).

    Raises ConfigError for a value that is not allowed.
    """

    load_balancing: float | None = None
    """Coefficient of the load-balancing loss. None takes router_aux_loss_coef of the model's
    configuration if it sets output_router_logits, else 0."""
    z: float | None = None
    """Coefficient of the z loss. None means 0."""
    scope: RouterScope = "batch"
    """Tokens of one statistic. "batch": all rollouts of the call. "rollout": one rollout. A list of
    lists of rollout indices: the rollouts of one list. The loss is the mean over statistics."""
    last_token: bool = True
    """Whether the last tokens of rollouts count. Set False to match trainers that do not run
    them."""

    def __post_init__(self) -> None:
        for name in ("load_balancing", "z"):
            value = getattr(self, name)
            known = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (known and math.isfinite(value)):
                raise ConfigError(
                    f"{name} of RouterLoss is {short(value)}; it takes a finite number, or None."
                )
        if not isinstance(self.last_token, bool):
            raise ConfigError(
                f"last_token of RouterLoss is {short(self.last_token)}; it takes True or False."
            )
        named = isinstance(self.scope, str) and self.scope in ("rollout", "batch")
        if not named and not _are_lists(self.scope):
            raise ConfigError(
                f'scope of RouterLoss is {short(self.scope)}; it takes "rollout", "batch", or a '
                "list of lists of rollout indices."
            )

    def parts(self, batch: RolloutBatch) -> IntArray:
        """The index of the statistic of each rollout, from 0: int64 [N].

        Raises ConfigError unless the lists of the scope contain every rollout of the batch once.
        """
        count = len(batch)
        if self.scope == "batch":
            return np.zeros(count, np.int64)
        if self.scope == "rollout":
            return np.arange(count)
        flat = [int(rollout) for part in self.scope for rollout in part]
        if sorted(flat) != list(range(count)) or not all(len(part) for part in self.scope):
            raise ConfigError(
                f"scope of RouterLoss has {len(self.scope)} lists of {len(flat)} rollout indices "
                f"in all, and the batch has rollouts 0 to {count - 1}; give each of them in one "
                "list, and no empty list."
            )
        parts = np.zeros(count, np.int64)
        parts[flat] = np.repeat(np.arange(len(self.scope)), [len(part) for part in self.scope])
        return parts


def _are_lists(scope: object) -> bool:
    return _is_list(scope) and all(
        _is_list(part) and all(isinstance(rollout, int | np.integer) for rollout in part)
        for part in scope
    )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
