"""Builds one combination of sharing and boundary for a batch, with microbatches that fit the
limits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.packing import (
    microbatches_across,
    microbatches_mixed,
    microbatches_of_whole_paths,
)
from forkpoint.plan.plan import Plan, fingerprint
from forkpoint.plan.predict import drop_activations, keep_logits, microbatches_to_drop
from forkpoint.plan.pricing.cost import ModelShape, Work, dense_work, forest_work
from forkpoint.plan.pricing.meters import EFFICIENT_TOKENS, Meter
from forkpoint.plan.pricing.prices import Prices
from forkpoint.plan.program import Program
from forkpoint.plan.runs import LeftOut, labels_run, run_lengths, sort_running
from forkpoint.plan.shared_prompts import PlannedPrompt, classes_of, cut_below
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest
from forkpoint.units import exactly

DEFAULT_MICROBATCH_TOKENS = 16_384
# Where a budget limits memory, microbatches as long as it allows, up to this: each microbatch costs
# reading and writing all gradients, and a group that is in one microbatch costs no boundary.
LARGEST_MICROBATCH_TOKENS = 65_536
# A plan that keeps all activations is preferred to one that does not and costs so little less: on
# an H200 microbatches 1.1 to 1.8 times as long, with the prompt offloaded, are 0.3% faster to 1.5%
# slower (benchmarks/results/plan-variants-h200.jsonl), and the first step pins memory for 25 s
# (step-grid-h200.jsonl, 10240/2048 N=8 at 3a2bc99).
KEEPING_IS_WORTH = 0.1
# Sizes of microbatches are tried in steps of a quarter; for plans of few microbatches, where one
# microbatch more or less shows, in steps of an eighth, and so many below the first that fits.
FEW_MICROBATCHES = 16
SHORTER_TRIED = 4
# Backwards are repeated in part rather than microbatches cut much shorter than this: adding to the
# gradients takes a microbatch as long as some hundred tokens do (8 bytes a parameter, two FLOPs a
# parameter and token, on a device of 200 FLOPs a byte).
FILLING_TOKENS = 4096
NEAR_THE_LEAST = 1.25
GRADIENT_TOKENS = 800
# Longer microbatches are preferred to shorter ones that are predicted to cost so little less: a
# microbatch costs something besides that no meter sees (benchmarks/results/step-grid-h200.jsonl,
# 6144/6144 N=4: 2.61 s of two microbatches were 2.75 s of four).
LONGER_IS_WORTH = 0.01
# Microbatches are cut no shorter than this to fit a budget.
LEAST_MICROBATCH_TOKENS = 64


class Builder:
    """Builds plans of one batch; what they have in common is done once."""

    def __init__(
        self,
        prices: Prices,
        config: Config,
        capabilities: Capabilities | None = None,
        measured_budget: int | None = None,
        prompts: tuple[PlannedPrompt, ...] | None = None,
        runs: IntArray | None = None,
    ) -> None:
        """`measured_budget`: the bytes that a memory_budget of "auto" stands for, if any.
        `prompts`: of a step whose ranks exchange them; None where ranks do not, or there is one.
        `runs`: as `make_plan` takes it."""
        batch, shape, calibration = prices.batch, prices.shape, prices.calibration
        self.batch: RolloutBatch = batch
        self.capabilities: Capabilities = capabilities or Capabilities()
        self.shape: ModelShape | None = shape
        self.config: Config = config
        self.prices: Prices = prices
        if calibration is not None:
            if shape is None:
                raise PlanError(
                    f"a calibration is given ({calibration.describe()}), but without a model shape "
                    "plans are priced in tokens; name the model, or give no calibration."
                )
            calibration.check_shape(shape)
        if config.memory_budget_bytes is not None and shape is None:
            raise PlanError(
                f"memory_budget is {exactly(config.memory_budget_bytes)}, but without a model "
                "shape bytes cannot be predicted; name the model, or limit max_microbatch_tokens "
                "instead."
            )
        self.soft: bool = config.memory_budget == AUTO
        """Whether plans beyond the budget are made where nothing fits."""
        self.budget: int | None = config.memory_budget_bytes
        if self.soft and shape is not None:
            self.budget = measured_budget
        self.fingerprint: str = fingerprint(batch)
        self._forests: dict[str, Forest] = {}
        self.windows: tuple[int, ...] = shape.windows if shape else ()
        self.last_tokens: bool = prices.routers is not None and prices.routers.last_tokens
        if runs is None:
            runs = run_lengths(batch, whole=True, last_tokens=self.last_tokens)
        self.runs: IntArray = runs
        self.left_out: LeftOut = LeftOut.of(batch, runs)
        trained = int((batch.loss_mask & labels_run(batch.offsets, runs)).sum())
        self.dense_work: Work = dense_work(runs, trained, self.windows)
        self.prompts: tuple[PlannedPrompt, ...] = prompts or ()
        self.exchanges: bool = prompts is not None
        every = sort_running(batch, run_lengths(batch, whole=True))
        firsts = np.unique(batch.token_ids[batch.offsets[:-1]])
        self.unique_tokens: int = int(every.new_edges.sum()) + len(firsts)
        running = every
        if self.last_tokens or self.left_out.tokens:
            running = sort_running(batch, runs, last_tokens=self.last_tokens)
        one_class = np.zeros(len(batch), np.int64)
        self.tree_order: SortedRollouts = running.grouped(classes_of(self.prompts, one_class))
        self.longest: int = int(self.tree_order.edges.max(initial=1))
        self.orders: dict[str, SortedRollouts] = {"tree": self.tree_order}
        # Then sharing within groups is sharing over the batch.
        self.one_group: bool = len(np.unique(batch.group_index)) == 1
        self._built: dict[tuple[str, str], Plan] = {}

    def order(self, sharing: str) -> SortedRollouts:
        sharing = self._as(sharing)
        if sharing not in self.orders:
            if sharing == "none":
                every = np.ones(len(self.tree_order.rollouts), bool)
                self.orders[sharing] = self.tree_order.cut(every)
            else:
                classes = classes_of(self.prompts, self.batch.group_index)
                self.orders[sharing] = self.tree_order.grouped(classes)
        return self.orders[sharing]

    def forest(self, sharing: str) -> Forest:
        """The forest of an order that is cut nowhere: the same whatever the microbatches'
        lengths."""
        sharing = self._as(sharing)
        if sharing not in self._forests:
            forest = build_forest(self.order(sharing), len(self.batch))
            self._forests[sharing] = cut_below(forest, self.prompts)
        return self._forests[sharing]

    def _as(self, sharing: str) -> str:
        """The sharing that comes to the same for this batch."""
        return "tree" if sharing == "group" and self.one_group else sharing

    def build(self, sharing: str, boundary: str) -> Plan:
        """One combination within the limits of the configuration, with its price."""
        combination = self._as(sharing), boundary
        if combination not in self._built:
            self._built[combination] = self._fitting(sharing, boundary)
        return replace(self._built[combination], sharing=sharing)

    def _fitting(self, sharing: str, boundary: str) -> Plan:
        if self.config.max_leaf_tokens is not None and boundary != "across":
            raise PlanError(
                f"max_leaf_tokens is {self.config.max_leaf_tokens}, which is about "
                f"microbatches below "
                f"others, and boundary is {boundary!r}; use boundary='across', or limit all "
                "microbatches by max_microbatch_tokens."
            )
        given = self.config.max_microbatch_tokens
        tokens = given or max(DEFAULT_MICROBATCH_TOKENS, self.longest)
        if self.budget is None:
            plan = self._build(sharing, boundary, tokens, self._policies()[0])
            return self._priced(plan, self.prices.meter(plan))
        # A budget that was given is to be used, one that was measured to be kept to.
        if not given and not self.soft:
            every = int(self.tree_order.new_edges.sum())
            tokens = max(tokens, min(LARGEST_MICROBATCH_TOKENS, every))
        # A microbatch that holds whole paths is no shorter than the longest of them.
        least = self.longest if boundary == "within" else LEAST_MICROBATCH_TOKENS
        found: list[Plan] = []
        tried: list[Plan] = []
        search = self._soft_ways if self.soft else self._ways
        policies = self._policies()
        for policy in policies:
            # Shorter microbatches than fill a device are for the policy that keeps least.
            shortest = least if policy == policies[-1] else max(least, min(tokens, FILLING_TOKENS))
            ways = list(search(sharing, boundary, policy, tokens, shortest))
            tried += ways
            fitting = [way for way in ways if _peak(way) <= self.budget]
            if not fitting:
                continue
            # In order of their microbatches' lengths, the longest first.
            most = min(map(cost_with_preference, fitting)) * (1 + LONGER_IS_WORTH)
            found.append(next(way for way in fitting if cost_with_preference(way) <= most))
            # Repeating forwards buys nothing where as much fits as fills a device.
            if any(_keeps_all(way) and _fills(way) for way in fitting):
                break
        if found:
            return min(found, key=_cost_of_many)
        if self.soft:
            unlimited = [self.prices.priced(p, self.prices.meter(p)) for p in _least(tried)]
            return min(unlimited, key=_cost_of_many)
        plan = min(tried, key=_size)
        raise PlanError(
            f"microbatches of {plan.max_microbatch_tokens} tokens are predicted to need "
            f"{exactly(_peak(plan))} and memory_budget is {exactly(self.budget)}; raise the "
            f"budget, or {self._remedy(boundary, plan.max_microbatch_tokens)}."
        )

    def _policies(self) -> tuple[str, ...]:
        """The policies of checkpointing to try, the one that repeats least first."""
        if self.config.checkpointing != AUTO:
            return (self.config.checkpointing,)
        if self.shape is not None and self.shape.checkpointed:
            return ("none",)
        able = self.capabilities.checkpoints
        return tuple(policy for policy in ("none", "selective", "full") if policy in able)

    def _ways(
        self, sharing: str, boundary: str, policy: str, tokens: int, least: int
    ) -> Iterator[Plan]:
        """Plans of shorter and shorter microbatches, until shorter ones pay for nothing; what is
        beyond the budget among them."""
        assert self.budget is not None
        found = False
        shorter = 0
        while True:
            plan = self._build(sharing, boundary, tokens, policy)
            meter = self.prices.meter(plan)
            plan = self._priced(plan, meter)
            few = len(plan.microbatches) <= FEW_MICROBATCHES
            for way in self._fitted(plan, meter, self.budget):
                found |= _peak(way) <= self.budget
                yield way
            # Microbatches a little shorter than what fits may divide the work more evenly. Where
            # there are many it makes no difference, and where they are too short to fill a device
            # they do not pay for what they let be kept.
            if _peak(plan) <= self.budget:
                shorter += 1
                if shorter > SHORTER_TRIED or not few:
                    return
            elif found and tokens <= EFFICIENT_TOKENS:
                return
            if self.config.max_microbatch_tokens or tokens <= least:
                return
            # No shorter plan fits before its longest microbatch alone does.
            longest = max(plan.microbatches, key=meter.kept_bytes, default=None)
            kept = 0 if longest is None else meter.kept_bytes(longest)
            next_tokens = tokens * (7 if few else 6) // 8
            if longest is not None and not found and kept > self.budget:
                next_tokens = min(next_tokens, int(longest.tokens * self.budget / kept) + 1)
            tokens = max(least, next_tokens)

    def _soft_ways(
        self, sharing: str, boundary: str, policy: str, tokens: int, least: int
    ) -> Iterator[Plan]:
        """Plans of shorter and shorter microbatches until one fits, in few steps: every step of a
        training run is planned so."""
        assert self.budget is not None
        while True:
            plan = self._build(sharing, boundary, tokens, policy)
            meter = self.prices.meter(plan)
            ways = self._fitted(self._priced(plan, meter), meter, self.budget)
            yield from ways
            needed = min(_peak(way) for way in ways)
            if needed <= self.budget or tokens <= least or self.config.max_microbatch_tokens:
                return
            longest = max(microbatch.tokens for microbatch in plan.microbatches)
            # Were all of it activations of the longest microbatch, this would fit.
            tokens = max(least, min(tokens * 3 // 4, longest * self.budget // needed))

    def _remedy(self, boundary: str, tokens: int) -> str:
        """A remedy that may help where microbatches of so many tokens are too much."""
        config, shape = self.config, self.shape
        least = self.longest if boundary == "within" else LEAST_MICROBATCH_TOKENS
        if config.max_microbatch_tokens is not None and tokens > max(
            least, LEAST_MICROBATCH_TOKENS
        ):
            return "lower max_microbatch_tokens"
        if boundary == "within":
            return "use boundary='across', which cuts rollouts into chains of microbatches"
        if config.activations == "keep":
            return "leave activations to the planner (activations='auto')"
        checkpointed = shape is not None and shape.checkpointed
        if config.checkpointing not in ("full", AUTO) and not checkpointed:
            return "checkpoint activations"
        return "take fewer rollouts at a time"

    def _fitted(self, plan: Plan, meter: Meter, budget: int) -> list[Plan]:
        """The plan as it is and, where activations is auto, with microbatches not kept so that it
        fits."""
        if self.config.activations != "auto" or _peak(plan) <= budget:
            return [plan]
        ways = ["recompute"]
        # Without a measured bandwidth a copy has no price.
        if meter.copy(1, out=True) is not None:
            ways.append("offload")
        assert self.shape is not None
        microbatches = microbatches_to_drop(plan, meter, self.shape, budget)
        return [self._priced(drop_activations(plan, microbatches, way), meter) for way in ways]

    def _priced(self, plan: Plan, meter: Meter) -> Plan:
        """With its price, and with logits kept as the configuration says."""
        if self.config.head_logits == "auto" and self.budget is not None and not self.soft:
            assert plan.shape is not None
            plan = keep_logits(plan, meter, plan.shape, self.budget)
        return self.prices.priced(plan, meter, self.budget)

    def _build(self, sharing: str, boundary: str, tokens: int, policy: str) -> Plan:
        order, limit = self.order(sharing), self.config.max_leaf_tokens
        if boundary == "within":
            forest, microbatches = microbatches_of_whole_paths(order, len(self.batch), tokens)
        elif boundary == "mixed":
            forest, microbatches = microbatches_mixed(self.forest(sharing), tokens, self.prompts)
        else:
            forest, microbatches = microbatches_across(self.forest(sharing), tokens, limit)
        labelled_S = self.prices.num_loss_entries(forest)
        microbatches = [
            replace(
                microbatch,
                checkpointing=policy,
                keeps_logits=self.config.head_logits == "keep" and not microbatch.children,
                activations=(
                    self.config.activations
                    if microbatch.children and self.config.activations != "auto"
                    else "keep"
                ),
                num_loss_entries=int(labelled_S[list(microbatch.segments)].sum()),
            )
            for microbatch in microbatches
        ]
        num_loss_entries = int(labelled_S.sum())
        plan = Plan(
            sharing=sharing,
            boundary=boundary,
            max_microbatch_tokens=tokens,
            forest=forest,
            microbatches=tuple(microbatches),
            program=Program(),
            cache_tokens=0,
            cache_states=0,
            rollouts=len(self.batch),
            logical_tokens=int(self.batch.offsets[-1]),
            unique_tokens=self.unique_tokens,
            left_out=self.left_out,
            counts_first=False,
            last_tokens=self.last_tokens,
            num_loss_entries=num_loss_entries,
            dense=self.dense_work,
            shared=forest_work(
                forest,
                num_loss_entries,
                self.windows,
                [s for m in microbatches if m.shared_prompt == "received" for s in m.segments],
            ),
            split="exchange" if self.exchanges else "",
            fingerprint=self.fingerprint,
            capabilities=self.capabilities,
            memory_budget_bytes=self.budget,
            shape=self.shape,
        )
        counts_first = self.prices.counts_first(plan)
        return replace(plan, counts_first=counts_first).with_program(
            scores=counts_first or self.prices.splits(plan)
        )


def cost_with_preference(plan: Plan) -> float:
    """Its cost, and KEEPING_IS_WORTH besides where some microbatch is not kept."""
    return plan.cost * (1 if _keeps_all(plan) else 1 + KEEPING_IS_WORTH)


def _keeps_all(plan: Plan) -> bool:
    return all(microbatch.activations == "keep" for microbatch in plan.microbatches)


def _fills(plan: Plan) -> bool:
    """Whether microbatches are as long as asked for, or long enough to keep a device busy."""
    return plan.max_microbatch_tokens >= min(FILLING_TOKENS, plan.computed_tokens)


def _cost_of_many(plan: Plan) -> float:
    """Its cost, with what counted FLOPs leave out of many microbatches: each reads and writes all
    gradients."""
    cost = cost_with_preference(plan)
    if plan.cost_unit == "ms":
        return cost
    return cost * (1 + GRADIENT_TOKENS * len(plan.microbatches) / max(1, 3 * plan.computed_tokens))


def _least(plans: Sequence[Plan]) -> list[Plan]:
    """Those that need least, or little more: the very least may take many times as long."""
    most = min(map(_peak, plans)) * NEAR_THE_LEAST
    return [plan for plan in plans if _peak(plan) <= most]


def least_memory(plans: Sequence[Plan]) -> Plan:
    """Of plans that do not fit the budget, the cheapest of those that need least."""
    return min(_least(plans), key=_cost_of_many)


def _size(plan: Plan) -> tuple[int, int]:
    return _peak(plan), plan.max_microbatch_tokens


def _peak(plan: Plan) -> int:
    assert plan.predicted_peak_bytes is not None
    return plan.predicted_peak_bytes
