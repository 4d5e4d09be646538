"""Builds one combination of sharing and boundary for a batch, with microbatches that fit the
limits."""

from dataclasses import replace

import numpy as np

from forkpoint.byte_sizes import exactly
from forkpoint.config import Config
from forkpoint.errors import PlanError
from forkpoint.forest import Forest, IntArray, SortedRollouts, build_forest, sort_rollouts
from forkpoint.plan.cache import place_boundaries
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.packing import (
    microbatches_across,
    microbatches_mixed,
    microbatches_of_whole_paths,
    round_up,
)
from forkpoint.plan.plan import Plan, fingerprint
from forkpoint.plan.predict import keep_logits, let_go, microbatches_let_go
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape, Work, dense_work, forest_work
from forkpoint.plan.pricing.meters import EFFICIENT_TOKENS, Meter
from forkpoint.plan.pricing.prices import Prices
from forkpoint.plan.program import Program
from forkpoint.rollouts import RolloutBatch

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
        batch: RolloutBatch,
        shape: ModelShape | None,
        config: Config,
        coupling: IntArray | None,
        calibration: Calibration | None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.batch: RolloutBatch = batch
        self.capabilities: Capabilities = capabilities or Capabilities()
        self.shape: ModelShape | None = shape
        self.config: Config = config
        self.prices: Prices = Prices(batch, shape, coupling, calibration)
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
        self.fingerprint: str = fingerprint(batch)
        self._forests: dict[str, Forest] = {}
        # The hidden states of one path do not depend on the temperature, but its log-probs do.
        classes = np.unique(batch.temperatures, return_inverse=True)[1]
        self.temperature_class: IntArray = classes.astype(np.int64)
        self.windows: tuple[int, ...] = shape.windows if shape else ()
        edges = np.diff(batch.offsets) - 1
        self.dense_work: Work = dense_work(edges, int(batch.loss_mask.sum()), self.windows)
        self.tree_order: SortedRollouts = sort_rollouts(
            batch.token_ids, batch.offsets, self.temperature_class
        )
        tree = build_forest(self.tree_order, len(batch))
        firsts = np.unique(batch.token_ids[batch.offsets[:-1]])
        self.unique_tokens: int = self._unique_tokens(tree, len(firsts))
        self.longest: int = int(self.tree_order.edges.max(initial=1))
        self.orders: dict[str, SortedRollouts] = {"tree": self.tree_order}
        # Then sharing within groups is sharing over the batch.
        self.one_group: bool = len(np.unique(batch.group_index)) == 1
        self._built: dict[tuple[str, str], Plan] = {}

    def _unique_tokens(self, tree: Forest, firsts: int) -> int:
        if len(np.unique(self.temperature_class)) == 1:
            return tree.edges + firsts
        plain = sort_rollouts(
            self.batch.token_ids, self.batch.offsets, np.zeros(len(self.batch), np.int64)
        )
        return int(plain.new_edges.sum()) + firsts

    def order(self, sharing: str) -> SortedRollouts:
        sharing = self._as(sharing)
        if sharing not in self.orders:
            if sharing == "none":
                every = np.ones(len(self.tree_order.rollouts), bool)
                self.orders[sharing] = self.tree_order.cut(every)
            else:
                classes = self.batch.group_index * (self.temperature_class.max(initial=0) + 1)
                self.orders[sharing] = sort_rollouts(
                    self.batch.token_ids, self.batch.offsets, classes + self.temperature_class
                )
        return self.orders[sharing]

    def forest(self, sharing: str) -> Forest:
        """The forest of an order that is cut nowhere: the same whatever the microbatches'
        lengths."""
        sharing = self._as(sharing)
        if sharing not in self._forests:
            self._forests[sharing] = build_forest(self.order(sharing), len(self.batch))
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
        given, multiple = self.config.max_microbatch_tokens, self.capabilities.length_multiple
        longest = round_up(self.longest, multiple)
        tokens = given or max(DEFAULT_MICROBATCH_TOKENS, longest, multiple)
        if tokens < multiple:
            raise PlanError(
                f"max_microbatch_tokens is {tokens}, and the model takes multiples of {multiple} "
                f"tokens; raise it to {multiple} at least."
            )
        tokens -= tokens % multiple
        budget = self.config.memory_budget_bytes
        if budget is None:
            plan = self._build(sharing, boundary, tokens)
            return self._priced(plan, self.prices.meter(plan))
        if not given:
            every = round_up(int(self.tree_order.new_edges.sum()), multiple)
            tokens = max(tokens, min(LARGEST_MICROBATCH_TOKENS // multiple * multiple, every))
        # A microbatch that holds whole paths is no shorter than the longest of them.
        least = longest if boundary == "within" else round_up(LEAST_MICROBATCH_TOKENS, multiple)
        found: list[Plan] = []
        shorter = 0
        while True:
            plan = self._build(sharing, boundary, tokens)
            meter = self.prices.meter(plan)
            plan = self._priced(plan, meter)
            few = len(plan.microbatches) <= FEW_MICROBATCHES
            ways = self._fitted(plan, meter, budget)
            needed = min(_peak(way) for way in ways)
            found += [way for way in ways if _peak(way) <= budget]
            # Microbatches a little shorter than what fits may divide the work more evenly. Where
            # there are many it makes no difference, and where they are too short to fill a device
            # they do not pay for what they let be kept.
            if _peak(plan) <= budget:
                shorter += 1
                if shorter > SHORTER_TRIED or not few:
                    break
            elif found and tokens <= EFFICIENT_TOKENS:
                break
            if given or tokens <= least:
                break
            tokens = tokens * (7 if few else 6) // 8
            tokens = max(least, tokens - tokens % multiple)
        if found:
            # In order of their microbatches' lengths, the longest first.
            most = min(cost_with_preference(plan) for plan in found) * (1 + LONGER_IS_WORTH)
            return next(plan for plan in found if cost_with_preference(plan) <= most)
        raise PlanError(
            f"microbatches of {tokens} tokens are predicted to need {exactly(needed)} and "
            f"memory_budget is {exactly(budget)}; raise the budget, or "
            f"{self._remedy(boundary, tokens)}."
        )

    def _remedy(self, boundary: str, tokens: int) -> str:
        """A remedy that may help where microbatches of so many tokens are too much."""
        config, shape = self.config, self.shape
        whole = boundary == "within" and tokens <= round_up(
            self.longest, self.capabilities.length_multiple
        )
        if (
            config.max_microbatch_tokens is not None
            and tokens > LEAST_MICROBATCH_TOKENS
            and not whole
        ):
            return "lower max_microbatch_tokens"
        if boundary == "within":
            return "use boundary='across', which cuts rollouts into chains of microbatches"
        if config.activations == "keep":
            return "leave activations to the planner (activations='auto')"
        checkpointed = shape is not None and shape.checkpointed
        if config.checkpointing != "full" and not checkpointed:
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
        microbatches = microbatches_let_go(plan, meter, self.shape, budget)
        return [self._priced(let_go(plan, microbatches, way), meter) for way in ways]

    def _priced(self, plan: Plan, meter: Meter) -> Plan:
        """With its price, and with logits kept as the configuration says."""
        budget = self.config.memory_budget_bytes
        if self.config.head_logits == "auto" and budget is not None:
            assert plan.shape is not None
            plan = keep_logits(plan, meter, plan.shape, budget)
        return self.prices.priced(plan, meter, budget)

    def _build(self, sharing: str, boundary: str, tokens: int) -> Plan:
        padded = self.config.leaf_layout == "padded"
        order, multiple = self.order(sharing), self.capabilities.length_multiple
        if boundary == "within" and not (padded and sharing == "none"):
            forest, microbatches = microbatches_of_whole_paths(
                order, len(self.batch), tokens, multiple
            )
        else:
            forest = self.forest(sharing)
            if boundary == "within" and self.longest > tokens:
                # Raises, saying why.
                microbatches_of_whole_paths(order, len(self.batch), tokens, multiple)
            if boundary == "mixed" and not padded:
                forest, microbatches = microbatches_mixed(forest, tokens, multiple)
            else:
                forest, microbatches = microbatches_across(
                    forest,
                    tokens,
                    multiple,
                    padded=padded,
                    max_leaf_tokens=self.config.max_leaf_tokens,
                )
        microbatches, cache_tokens, cache_states = place_boundaries(forest, microbatches)
        labelled_S = self.prices.labelled(forest)
        microbatches = [
            replace(
                microbatch,
                checkpointing=self.config.checkpointing,
                keeps_logits=self.config.head_logits == "keep" and not microbatch.children,
                activations=(
                    self.config.activations
                    if microbatch.children and self.config.activations != "auto"
                    else "keep"
                ),
                labelled=int(labelled_S[list(microbatch.segments)].sum()),
            )
            for microbatch in microbatches
        ]
        labelled = int(labelled_S.sum())
        plan = Plan(
            sharing=sharing,
            boundary=boundary,
            leaf_layout=self.config.leaf_layout,
            max_microbatch_tokens=tokens,
            forest=forest,
            microbatches=tuple(microbatches),
            program=Program(),
            cache_tokens=cache_tokens,
            cache_states=cache_states,
            rollouts=len(self.batch),
            logical_tokens=int(self.batch.offsets[-1]),
            unique_tokens=self.unique_tokens,
            labelled=labelled,
            dense=self.dense_work,
            shared=forest_work(forest, labelled, self.windows),
            fingerprint=self.fingerprint,
            capabilities=self.capabilities,
            shape=self.shape,
        )
        return plan.with_program(scores=self.prices.splits(plan))


def cost_with_preference(plan: Plan) -> float:
    """Its cost, and KEEPING_IS_WORTH besides where some microbatch is not kept."""
    keeps = all(microbatch.activations == "keep" for microbatch in plan.microbatches)
    return plan.cost * (1 if keeps else 1 + KEEPING_IS_WORTH)


def _peak(plan: Plan) -> int:
    assert plan.predicted_peak_bytes is not None
    return plan.predicted_peak_bytes
