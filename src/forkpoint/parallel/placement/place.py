"""Chooses ranks for the rollouts of one step."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forkpoint.config import Config
from forkpoint.errors import ConfigError, RolloutError
from forkpoint.hosts.transformers.model_files import shape_of_model
from forkpoint.parallel.placement.items import Priced, by_tokens, greedy, in_order
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.slots import lockstep_cost, reshaped
from forkpoint.plan.builder import DEFAULT_MICROBATCH_TOKENS
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.runs import run_lengths
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.tree.forest import Forest, IntArray

if TYPE_CHECKING:
    from forkpoint.losses.base import Loss

Model = ModelShape | Mapping[str, Any] | str | Path | None

PARTS = (2, 20)
"""Groups are split if they cost more than 1 / 2 of a rank's equal share, which evens loads, or more
than 1 / 20, whose parts fill the slots of all ranks."""
MOST_RANKS = 1 << 17
"""Largest number of ranks. The time of a placement grows with it, to half a minute."""


def place(
    rollouts: Iterable[Rollout] | RolloutBatch,
    *,
    ranks: int,
    model: Model,
    whole_groups: bool = False,
    max_microbatch_tokens: int | None = None,
    calibration: Calibration | str | Path | None = None,
    loss: "Loss | None" = None,
) -> list[list[int]]:
    """Assign the rollouts of one step to data-parallel ranks.

    Ranks are balanced by predicted time, with shared tokens of a rank counted once. If ranks run in
    lockstep, the prediction includes waiting. Groups stay whole unless splitting a group is
    predicted to be faster with its prompt on each of its ranks. The result depends only on the
    arguments. So each rank can call `place` and use its own entry.

    Args:
        rollouts: all rollouts of the step, in the same order on every rank.
        ranks: number of data-parallel ranks, at least 1.
        model: the model whose costs are counted: a `ModelShape` (`policy.host.shape`), the mapping
            of a config.json, or a name, folder or config.json as for `forkpoint plan --model`. None
            counts tokens.
        whole_groups: whether groups are never split. Losses that couple the rollouts of a group on
            one rank need this. If such a loss is passed as `loss`, groups are not split either.
        max_microbatch_tokens: the value in the `Config` of the ranks; None for its default.
        calibration: a result of `forkpoint calibrate` for this model. Costs are then milliseconds.
        loss: the loss of the step. Rollouts without gradient, and tokens after the last trained
            one, then cost nothing. None counts all tokens, as a router loss and
            Config(all_logprobs=True) need.

    Returns:
        For each rank the positions of its rollouts, ascending. Each rollout is on one rank. A rank
        can have none.

    Raises:
        RolloutError: there are no rollouts, or an item is not a Rollout.
        ConfigError: ranks or max_microbatch_tokens is not a whole number of at least 1; ranks is
            above 131,072; the loss has a value that is not allowed; the model is not known; the
            calibration belongs to another model.
        PlanError: a calibration is given without a model.
    """
    check_ranks(ranks)
    Config(max_microbatch_tokens=max_microbatch_tokens)  # raises ConfigError
    batch = rollouts if isinstance(rollouts, RolloutBatch) else RolloutBatch(rollouts)
    if not len(batch):
        raise RolloutError(
            "there are no rollouts to place; give every rank all rollouts of the step."
        )
    if isinstance(calibration, str | Path):
        calibration = Calibration.load(Path(calibration))
    shape = _shape_of(model)
    if shape is not None and calibration is not None and not isinstance(model, ModelShape):
        # A name does not say the dtype; the calibration does.
        shape = replace(shape, dtype_bytes=calibration.shape.dtype_bytes)
    whole_groups = whole_groups or (loss is not None and _couples_groups(batch, loss))
    paths = Paths.of_batch(batch, None if loss is None else _runs(batch, loss))
    rates = Rates.of(shape, calibration)
    rank = place_paths(
        paths,
        paths.forest(),
        rates,
        ranks,
        whole_groups=whole_groups,
        max_microbatch_tokens=max_microbatch_tokens,
    )
    return [np.flatnonzero(rank == number).tolist() for number in range(ranks)]


def _runs(batch: RolloutBatch, loss: "Loss") -> IntArray:
    """Number of edges of each rollout that a step of the loss runs: int64 [N]. Imports torch."""
    from forkpoint.losses.base import as_loss
    from forkpoint.losses.zeros import zero_rollouts

    known = as_loss(loss)
    # Rollouts of other ranks may be coupled with zero rollouts of a rank.
    zero = None if known.across_ranks else zero_rollouts(known, batch)
    return run_lengths(batch, zero)


def _couples_groups(batch: RolloutBatch, loss: "Loss") -> bool:
    """Whether the rollouts of each group must be on one rank. Imports torch."""
    from forkpoint.losses.base import as_loss
    from forkpoint.parallel.agreement import coupled

    return coupled(as_loss(loss), batch) == "groups"


def check_ranks(ranks: int) -> None:
    """Raises ConfigError if `ranks` is no number of ranks."""
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
        raise ConfigError(
            f"ranks is {short(ranks)}; it takes a whole number of at least 1: how many "
            "data-parallel ranks take part in the step."
        )
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"ranks is {short(ranks)}; at most {MOST_RANKS:,} are placed. Give a smaller number."
        )


def place_paths(
    paths: Paths,
    forest: Forest,
    rates: Rates,
    ranks: int,
    *,
    whole_groups: bool = False,
    max_microbatch_tokens: int | None = None,
) -> IntArray:
    """Assign rollouts to ranks, as `place` does, from a forest. Returns int64 [N], rank by rollout.

    Args:
        paths: the rollouts.
        forest: `paths.forest()`.
        rates: prices of tokens.
        ranks: number of ranks.
        whole_groups: whether groups are never split.
        max_microbatch_tokens: limit in the plans of the ranks; None is the default of `Config`.
    """
    priced, groups = Priced.of(paths, forest, rates), paths.groups
    if ranks == 1 or priced.total == 0:
        return np.zeros(len(groups), np.int64)
    longest = int(paths.order.edges.max(initial=1))
    capacity = max_microbatch_tokens or max(DEFAULT_MICROBATCH_TOKENS, longest)
    share = priced.total // ranks
    parts = [] if whole_groups else [priced.split(share // number) for number in PARTS]
    placed = [greedy(priced.items(item), ranks) for item in (groups, *parts)]
    # The first of equally good placements is used, so whole groups come first.
    found = [way.rank[way.items.item] for way in placed]
    found += [reshaped(priced, way, capacity)[way.items.item] for way in placed]
    # Simple placements, as upper limits of the cost.
    lengths = np.ones(len(groups), np.int64)
    lengths[paths.order.rollouts] += paths.order.edges
    found.append(in_order(groups, ranks, whole_groups=whole_groups))
    found.append(by_tokens(groups, lengths, ranks))
    costs = [lockstep_cost(priced, rank, ranks, capacity) for rank in found]
    return found[costs.index(min(costs))]


def _shape_of(model: Model) -> ModelShape | None:
    if model is None or isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return ModelShape.from_config(model)
    if isinstance(model, str | Path):
        return shape_of_model(Path(model))
    raise ConfigError(
        f"model is {short(model)} of type {type(model).__name__}; it takes a ModelShape such as "
        "policy.host.shape, the mapping of a config.json, a name such as 'Qwen/Qwen3-8B', a path, "
        "or None to count tokens."
    )
