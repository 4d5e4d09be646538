"""The choice of ranks for the rollouts of one step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.hosts.transformers.model_files import shape_of_model
from forkpoint.parallel.placement.balance import NOWHERE, Placement, greedy, improved, in_rounds
from forkpoint.parallel.placement.baselines import by_tokens, in_order
from forkpoint.parallel.placement.exchanges import ExchangePrices, Prompts, split_groups
from forkpoint.parallel.placement.items import Items, Priced, SplitPrice, replicated
from forkpoint.parallel.placement.packed import lockstep_cost
from forkpoint.parallel.placement.paths import Paths
from forkpoint.parallel.placement.rates import Rates
from forkpoint.parallel.placement.shapes import reshaped
from forkpoint.plan.builder import DEFAULT_MICROBATCH_TOKENS
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.runs import run_lengths
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.tree.forest import Forest, IntArray

if TYPE_CHECKING:
    from forkpoint.losses.base import Loss

Model = ModelShape | Mapping[str, Any] | str | Path | None

SPLITS = (1.0, 0.5, 0.25)
"""Groups that cost more than these parts of the mean may be split, one after the other."""
EVEN = 1.02
"""No group is split where the fullest rank has no more than this many times the mean."""
UNEVEN = 1.05
"""Smaller parts are tried where a step is predicted to take more than this many times the mean."""
PARTS = 20
"""These cost more than one part of so many of the mean before they are cut once more."""
NEAR = 1.05
"""Exchanges are looked for from placements that cost no more than this many times the cheapest."""
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
    """Place the rollouts of one step on data-parallel ranks.

    Ranks are balanced by predicted cost, with each token that rollouts of one rank share charged
    once, and by how their microbatches meet where ranks run in lockstep. Groups stay whole, unless
    computing what their rollouts share on several ranks costs less than the imbalance, or else
    computing their prompts on one and sending the prefix cache to the others does. The result
    depends on the arguments alone and is the same in every process, so that each rank can compute
    it and take its own entry.

    Args:
        rollouts: all rollouts of the step, the same and in the same order on every caller.
        ranks: how many data-parallel ranks there are, at least 1.
        model: for whose sizes costs are counted: a `ModelShape` (`policy.host.shape`), the mapping
            of a config.json, or what `forkpoint plan --model` takes: a model's name, folder or
            config.json. None counts tokens.
        whole_groups: whether no group is ever split, as losses need that couple the rollouts of a
            group on one rank.
        max_microbatch_tokens: that of the ranks' `Config`; None is its default.
        calibration: what `forkpoint calibrate` measured for this model; costs are then
            milliseconds, and the link's price is the measured one if it has that.
        split: what the ranks' `Config(split=...)` lets a step do about prompts that several of them
            have: "auto" is replicating or exchanging, whichever is cheaper. Split models and
            options that keep ranks from exchanging (docs/ranks.md) take "replicate".
        loss: that of the step, whose rollouts without gradient are not run and cost nothing, nor do
            tokens after the last trained one. None, and what is right with a router loss or
            Config(all_logprobs=True): all tokens are run.

    Returns:
        For each rank the positions of its rollouts, ascending. Each rollout is on one rank. A rank
        has none where there is nothing to gain by giving it some.

    Raises:
        RolloutError: there are no rollouts, or other things among them.
        ConfigError: ranks or max_microbatch_tokens is no whole number of at least 1; split is
            another word; the loss is no Loss; the model is not known; the calibration is of another
            model.
        PlanError: there is a calibration and no model.
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
    price: SplitPrice = replicated,
    exchange: ExchangePrices | None = None,
) -> IntArray:
    """[N] the rank of each rollout; `place` on a forest that is built.

    Args:
        paths: the rollouts.
        forest: `paths.forest()`.
        rates: prices of what they run.
        ranks: how many ranks there are.
        whole_groups: whether no group is split.
        max_microbatch_tokens: of the ranks' plans; None is the default of `Config`.
        price: cost of splitting a group once more. It decides which groups may be split; what the
            parts then cost is counted with what they share computed on each rank.
        exchange: prices of exchanging prompts; None where ranks do not.
    """
    priced = Priced.of(paths, forest, rates)
    longest = int(paths.order.edges.max(initial=1))
    capacity = max_microbatch_tokens or max(DEFAULT_MICROBATCH_TOKENS, longest)
    search = _Search(
        priced, ranks, capacity, whole_groups=whole_groups, price=price, exchange=exchange
    )
    return search.best()


@dataclass(frozen=True)
class _Search:
    """Ways to place, and the cheapest of them."""

    priced: Priced
    ranks: int
    capacity: int
    whole_groups: bool
    price: SplitPrice
    exchange: ExchangePrices | None

    def best(self) -> IntArray:
        """[N] the rank of each rollout: the first of those that are predicted to cost least."""
        if self.ranks == 1 or self.priced.total == 0:
            return np.zeros(len(self.priced.paths), np.int64)
        share = self.priced.total // self.ranks
        groups = self.priced.items(self.priced.groups())
        placed = [improved(greedy(groups, self.ranks))]
        for part in () if self.whole_groups else SPLITS:
            before = placed[-1]
            if before.most <= EVEN * int(before.load.sum()) / self.ranks:
                break
            items = self.priced.items(self.priced.split(int(part * share), self.price))
            if len(items) == len(before.items):
                continue
            split = improved(greedy(items, self.ranks))
            if split.most < before.most:
                placed.append(split)
        known = [in_rounds(groups, self.ranks)[groups.item], *self._naive()]
        others = [self._cost(rank) for rank in known]
        costs = [self._cost(way.rank[way.items.item]) for way in placed]
        if not self.whole_groups and self._is_uneven(costs + others):
            parts = self._in_parts(share)
            if len(parts.items) > len(placed[-1].items):
                placed.append(parts)
                costs.append(self._cost(parts.rank[parts.items.item]))
        # From those of `known` exchanges find less than from where sizes are mixed.
        most = NEAR * min(costs)
        starts = [way for way, cost in zip(placed, costs, strict=True) if cost <= most]
        ranks = [way.rank[way.items.item] for way in placed] + known
        ranks += [reshaped(self.priced, way, self.capacity)[way.items.item] for way in starts]
        costs += others
        costs += [self._cost(rank) for rank in ranks[len(costs) :]]
        few = self.exchange is not None and len(groups) < FEW * self.ranks
        few = few and len(self.priced.paths) <= MOST_ROLLOUTS
        if few and not self.whole_groups and self._is_uneven(costs):
            at_risk = RISK * min(costs)
            apart = ((rank, self._cost(rank)) for rank in self._with_prompts_apart(groups, share))
            for rank, cost in apart:
                if cost <= at_risk:
                    ranks.append(rank)
                    costs.append(cost)
            costs = [
                min(cost, self._exchanged_cost(rank))
                for cost, rank in zip(costs, ranks, strict=True)
            ]
        # Of equally good ones the first.
        return ranks[costs.index(min(costs))]

    def _is_uneven(self, costs: list[int]) -> bool:
        """Whether no placement so far is near an equal share."""
        return min(costs) * self.ranks > UNEVEN * self.priced.total

    def _in_parts(self, share: int) -> Placement:
        """Small parts of groups: what is small fills the slots of all ranks alike."""
        items = self.priced.items(self.priced.split(share // PARTS, self.price))
        return improved(greedy(items, self.ranks))

    def _with_prompts_apart(self, groups: Items, share: int) -> Iterator[IntArray]:
        """Placements [N] that pay little for a prompt on a further rank, of as many groups as there
        are ranks, or twice as many, the costliest."""
        count, costliest = len(groups), np.argsort(-groups.whole, kind="stable")
        for several in sorted({min(count, self.ranks), min(count, 2 * self.ranks)}):
            chosen = costliest[:several]
            priced = Prompts.of(self.priced, chosen, left=1 / LITTLE).priced
            items = priced.items(self.priced.split(share // PARTS, lambda _: 0, chosen))
            placed = improved(greedy(items, self.ranks))
            yield placed.rank[items.item]

    def _exchanged_cost(self, rank: IntArray) -> int:
        """Predicted cost of a step whose ranks exchange the prompts that several of them have."""
        assert self.exchange is not None
        prompts = Prompts.of(self.priced, split_groups(self.priced.paths.groups, rank))
        if not len(prompts.group):
            return NOWHERE
        return prompts.step_cost(rank, self.ranks, self.capacity, self.exchange)

    def _naive(self) -> Iterator[IntArray]:
        """Placements that know less, which a good one is no worse than."""
        groups, order = self.priced.paths.groups, self.priced.paths.order
        lengths = np.ones(len(groups), np.int64)
        lengths[order.rollouts] += order.edges
        yield in_order(groups, self.ranks, whole_groups=self.whole_groups)
        yield by_tokens(groups, lengths, self.ranks)

    def _cost(self, rank: IntArray) -> int:
        return lockstep_cost(self.priced, rank, self.ranks, self.capacity)


def _shape_of(model: Model) -> ModelShape | None:
    """The sizes of a model, however it is given."""
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
