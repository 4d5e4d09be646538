"""Auxiliary losses of a mixture's routers, which even out the load of its experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree.forest import IntArray

RouterScope = Literal["rollout", "batch"] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class RouterLoss:
    """Load-balancing and z losses of routers, over the tokens as rollouts have them.

    A token that N rollouts share counts N times in every statistic, as it does in ordinary
    training. With p a token's softmax over E experts, and each mean over the scope's tokens and all
    layers that have a router:

        load balancing   E * sum over experts of (mean count of the expert) * (mean of p)
        z                mean of logsumexp(router logits)^2

    The first is transformers' load_balancing_loss_func (Fedus et al., arXiv 2101.03961, equations 4
    to 6), the second that of Zoph et al. (arXiv 2202.08906, equation 5).
    """

    load_balancing: float | None = None
    """Coefficient of the load-balancing loss. None: the configuration's router_aux_loss_coef where
    it sets output_router_logits, else 0."""
    z: float | None = None
    """Coefficient of the z loss. None: 0, for transformers adds none."""
    scope: RouterScope = "batch"
    """The tokens of one statistic in the training that is replaced. "batch": all rollouts of the
    call. "rollout": each rollout, then the mean over rollouts. A list of lists of rollout indices:
    each list, then the mean over lists."""
    last_token: bool = True
    """Whether rollouts' last tokens count: False for trainers that run rollouts without them."""

    def __post_init__(self) -> None:
        for name in ("load_balancing", "z"):
            value = getattr(self, name)
            known = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (known and math.isfinite(value)):
                raise ConfigError(
                    f"{name} of RouterLoss is {short(value)}; it takes a finite number, or None."
                )
        if not isinstance(self.last_token, bool):
            raise ConfigError(
                f"last_token of RouterLoss is {short(self.last_token)}; it takes True or False."
            )
        if self.scope not in ("rollout", "batch") and not _are_lists(self.scope):
            raise ConfigError(
                f'scope of RouterLoss is {short(self.scope)}; it takes "rollout", "batch", or a '
                "list of lists of rollout indices."
            )

    def parts(self, batch: RolloutBatch) -> IntArray:
        """int64 [N], the statistic that each rollout is part of, from 0.

        Raises ConfigError where the scope's lists do not have every rollout of the batch once.
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
