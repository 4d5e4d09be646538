"""The choice of ranks for the rollouts of one step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.hosts.transformers.model_files import shape_of_model
from forkpoint.parallel.placement.exchanges import ExchangePrices, Prompts, split_groups
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

HALVES = 2
"""Groups that cost more than one part of so many of the mean may be split."""
EVEN = 1.02
"""No group is split where the fullest rank has no more than this many times the mean."""
UNEVEN = 1.05
"""Smaller parts are tried where a step is predicted to take more than this many times the mean."""
PARTS = 20
"""These cost more than one part of so many of the mean before they are cut once more."""
NEAR = 1.05
"""Items are exchanged from placements that cost no more than this many times the cheapest."""
MOST_ROLLOUTS = 4096
"""Exchanging prompts is looked at for steps of no more: placing takes less than a second."""
LITTLE = 2
"""Ranks keep to few of the prompts that they could exchange: one more is taken to cost so small a
part of what running it does."""
RISK = 1.25
"""A step exchanges nothing where that does not fit a memory budget, say. No placement is taken that
would then cost so many times what another does."""
FEW = 4
"""Prompts are exchanged among ranks that have fewer groups than so many each: with more of them,
whole groups balance."""


def place(
    rollouts: Iterable[Rollout] | RolloutBatch,
    *,
    ranks: int,
    model: Model,
    whole_groups: bool = False,
    max_microbatch_tokens: int | None = None,
    calibration: Calibration | str | Path | None = None,
    split: Literal["auto", "replicate"] = "auto",
    loss: "Loss | None" = None,
) -> list[list[int]]:
    """Assign the rollouts of one step to data-parallel ranks.

    Ranks are balanced by predicted time, with shared tokens of a rank counted once. If ranks run in
    lockstep, the prediction includes waiting. Groups stay whole unless splitting a group is
    predicted to be faster. The ranks of a split group all run its prompt, or one rank runs it and
    sends its prefix cache to the others. The result depends only on the arguments. So each rank can
    call `place` and use its own entry.

    Args:
        rollouts: all rollouts of the step, in the same order on every rank.
        ranks: number of data-parallel ranks, at least 1.
        model: the model whose costs are counted: a `ModelShape` (`policy.host.shape`), the mapping
            of a config.json, or a name, folder or config.json as for `forkpoint plan --model`. None
            counts tokens.
        whole_groups: whether groups are never split. Losses that couple the rollouts of a group on
            one rank need this.
        max_microbatch_tokens: the value in the `Config` of the ranks; None for its default.
        calibration: a result of `forkpoint calibrate` for this model. Costs are then milliseconds,
            with the measured price of the link if there is one.
        split: "auto" lets ranks replicate or exchange a split prompt, whichever is cheaper. Use
            "replicate" for models and options that cannot exchange prompts (docs/howto/ranks.md).
        loss: the loss of the step. Rollouts without gradient, and tokens after the last trained
            one, then cost nothing. None counts all tokens, as a router loss and
            Config(all_logprobs=True) need.

    Returns:
        For each rank the positions of its rollouts, ascending. Each rollout is on one rank. A rank
        can have none.

    Raises:
        RolloutError: there are no rollouts, or an item is not a Rollout.
        ConfigError: ranks or max_microbatch_tokens is not a whole number of at least 1; split or
            the loss has a value that is not allowed; the model is not known; the calibration
            belongs to another model.
        PlanError: a calibration is given without a model.
    """
    check_ranks(ranks)
    if max_microbatch_tokens is not None and max_microbatch_tokens < 1:
        raise ConfigError(
            f"max_microbatch_tokens is {max_microbatch_tokens}; it takes a whole number of at "
            "least 1, or None."
        )
    if split not in ("auto", "replicate"):
        raise ConfigError(f"split is {short(split)}; it takes 'auto' or 'replicate'.")
    batch = rollouts if isinstance(rollouts, RolloutBatch) else RolloutBatch(rollouts)
    if isinstance(calibration, str | Path):
        calibration = Calibration.load(Path(calibration))
    shape = _shape_of(model)
    if shape is not None and calibration is not None and not isinstance(model, ModelShape):
        # A name does not say the dtype; the calibration does.
        shape = replace(shape, dtype_bytes=calibration.shape.dtype_bytes)
    paths = Paths.of_batch(batch, None if loss is None else _runs(batch, loss))
    rates = Rates.of(shape, calibration)
    rank = place_paths(
        paths,
        paths.forest(),
        rates,
        ranks,
        whole_groups=whole_groups,
        max_microbatch_tokens=max_microbatch_tokens,
        exchange=ExchangePrices.of(shape, rates, calibration) if split == "auto" else None,
    )
    return lists_of(rank, ranks)


def _runs(batch: RolloutBatch, loss: "Loss") -> IntArray:
    """How many edges of each rollout a step of the loss runs: int64 [N]. Imports torch."""
    from forkpoint.losses.base import as_loss
    from forkpoint.losses.zeros import zero_rollouts

    known = as_loss(loss)
    # Rollouts of other ranks may be coupled with those that are zero on theirs.
    zero = None if known.across_ranks else zero_rollouts(known, batch)
    return run_lengths(batch, zero)


def check_ranks(ranks: int) -> None:
    """Raises ConfigError for what is no number of ranks."""
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
        raise ConfigError(
            f"ranks is {short(ranks)}; it takes a whole number of at least 1: how many "
            "data-parallel ranks take part in the step."
        )


def lists_of(rank: IntArray, ranks: int) -> list[list[int]]:
    """Positions of each rank's rollouts, ascending, from int64 [N] ranks by rollout."""
    return [np.flatnonzero(rank == number).tolist() for number in range(ranks)]


def place_paths(
    paths: Paths,
    forest: Forest,
    rates: Rates,
    ranks: int,
    *,
    whole_groups: bool = False,
    max_microbatch_tokens: int | None = None,
    exchange: ExchangePrices | None = None,
) -> IntArray:
    """Assign rollouts to ranks, as `place` does, from a forest. Returns int64 [N], rank by rollout.

    Args:
        paths: the rollouts.
        forest: `paths.forest()`.
        rates: prices of tokens.
        ranks: number of ranks.
        whole_groups: whether groups are never split.
        max_microbatch_tokens: limit in the plans of the ranks; None is the default of `Config`.
        exchange: prices of exchanging prompts; None if ranks exchange none.
    """
    priced = Priced.of(paths, forest, rates)
    longest = int(paths.order.edges.max(initial=1))
    capacity = max_microbatch_tokens or max(DEFAULT_MICROBATCH_TOKENS, longest)
    return _Search(priced, ranks, capacity, whole_groups, exchange).best()


@dataclass(frozen=True)
class _Search:
    """Ways to place, and the cheapest of them."""

    priced: Priced
    ranks: int
    capacity: int
    whole_groups: bool
    exchange: ExchangePrices | None

    def best(self) -> IntArray:
        """[N] the rank of each rollout: the first of those that are predicted to cost least."""
        priced, groups = self.priced, self.priced.paths.groups
        if self.ranks == 1 or priced.total == 0:
            return np.zeros(len(groups), np.int64)
        share = priced.total // self.ranks
        placed = [greedy(priced.items(groups), self.ranks)]
        most, mean = int(placed[0].load.max()), int(placed[0].load.sum()) / self.ranks
        if not self.whole_groups and most > EVEN * mean:
            halves = greedy(priced.items(priced.split(share // HALVES)), self.ranks)
            if int(halves.load.max()) < most:
                placed.append(halves)
        # Placements that know less, which a good one is no worse than.
        lengths = np.ones(len(groups), np.int64)
        lengths[priced.paths.order.rollouts] += priced.paths.order.edges
        ranks = [in_order(groups, self.ranks, whole_groups=self.whole_groups)]
        ranks.append(by_tokens(groups, lengths, self.ranks))
        costs = [self._cost(rank) for rank in ranks]
        own = [self._cost(way.rank_of_rollouts) for way in placed]
        if not self.whole_groups and self._is_uneven(costs + own):
            # Small parts of groups fill the slots of all ranks alike.
            parts = greedy(priced.items(priced.split(share // PARTS)), self.ranks)
            if len(parts.items) > len(placed[-1].items):
                placed.append(parts)
                own.append(self._cost(parts.rank_of_rollouts))
        for way, cost in zip(placed, own, strict=True):
            if cost <= NEAR * min(own):
                rank = reshaped(priced, way, self.capacity)[way.items.item]
                ranks, costs = [*ranks, rank], [*costs, self._cost(rank)]
        # Of equally good ones the first is taken: one that keeps groups whole, if any.
        ranks = [*(way.rank_of_rollouts for way in placed), *ranks]
        costs = own + costs
        exchange = self.exchange if self._may_exchange(costs) else None
        if exchange is not None:
            at_risk = RISK * min(costs)
            for rank in self._with_prompts_apart(share):
                if (cost := self._cost(rank)) <= at_risk:
                    ranks, costs = [*ranks, rank], [*costs, cost]
            pairs = zip(costs, ranks, strict=True)
            costs = [min(cost, self._exchanged_cost(rank, exchange)) for cost, rank in pairs]
        return ranks[costs.index(min(costs))]

    def _is_uneven(self, costs: list[int]) -> bool:
        """Whether no placement so far is near an equal share."""
        return min(costs) * self.ranks > UNEVEN * self.priced.total

    def _may_exchange(self, costs: list[int]) -> bool:
        groups = self.priced.paths.groups
        few = len(groups) <= MOST_ROLLOUTS and int(groups.max()) + 1 < FEW * self.ranks
        return few and not self.whole_groups and self._is_uneven(costs)

    def _with_prompts_apart(self, share: int) -> Iterator[IntArray]:
        """Placements [N] that pay little for a prompt on a further rank, of as many groups as there
        are ranks, or twice as many, the costliest."""
        whole = self.priced.items(self.priced.paths.groups).whole
        costliest = np.argsort(-whole, kind="stable")
        for several in sorted({min(len(whole), self.ranks), min(len(whole), 2 * self.ranks)}):
            chosen = costliest[:several]
            priced = Prompts.of(self.priced, chosen, left=1 / LITTLE).priced
            items = priced.items(self.priced.split(share // PARTS, chosen, shared_price=0))
            yield greedy(items, self.ranks).rank_of_rollouts

    def _exchanged_cost(self, rank: IntArray, prices: ExchangePrices) -> int:
        """Predicted cost of a step whose ranks exchange the prompts that several of them have."""
        prompts = Prompts.of(self.priced, split_groups(self.priced.paths.groups, rank))
        return prompts.step_cost(rank, self.ranks, self.capacity, prices)

    def _cost(self, rank: IntArray) -> int:
        return lockstep_cost(self.priced, rank, self.ranks, self.capacity)


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
