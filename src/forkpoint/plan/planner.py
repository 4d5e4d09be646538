"""From a batch to a plan: build the combinations asked for, price them, take the cheapest."""

from dataclasses import replace

import numpy as np

from forkpoint.config import Config
from forkpoint.errors import PlanError
from forkpoint.forest import Forest, IntArray, SortedRollouts, build_forest, sort_rollouts
from forkpoint.plan.arena import place_boundaries
from forkpoint.plan.cost import (
    LINEAR_BACKWARD,
    ModelShape,
    Work,
    dense_work,
    forest_work,
    visible_pairs,
)
from forkpoint.plan.layout import Row
from forkpoint.plan.packing import rows_across, rows_mixed, rows_of_whole_paths
from forkpoint.plan.plan import Candidate, Plan, fingerprint
from forkpoint.rollouts import RolloutBatch

DEFAULT_ROW_TOKENS = 16_384
# Below this many tokens a matrix product is bound by reading its weights, so that fewer tokens take
# no less time: about the FLOPs per byte at which current GPUs turn from memory- to compute-bound.
EFFICIENT_TOKENS = 256
# Auto prefers the simpler of two plans whose costs differ by less than this.
NOISE = 0.005
SHARINGS = ("none", "group", "tree")
BOUNDARIES = ("in_row", "mixed", "across_rows")


def make_plan(
    batch: RolloutBatch,
    shape: ModelShape | None = None,
    config: Config | None = None,
    *,
    coupling: IntArray | None = None,
) -> Plan:
    """Plan a batch.

    Args:
        batch: the rollouts.
        shape: sizes of the model, for FLOPs and bytes; without it plans are priced in tokens.
        config: what may be chosen; `auto` looks at every combination, dense among them.
        coupling: int64 [N], which rollouts a loss couples (same entry): where their trained tokens
            lie in several rows the loss costs one more forward. None couples nothing.

    Raises:
        PlanError: no combination fits the limits; every reason is named.
    """
    config = config or Config()
    builder = _Builder(batch, shape, config)
    sharings = SHARINGS if config.sharing == "auto" else (config.sharing,)
    boundaries = BOUNDARIES if config.boundary == "auto" else (config.boundary,)
    plans: list[tuple[float, Plan]] = []
    candidates: list[Candidate] = []
    for sharing in sharings:
        for boundary in boundaries:
            try:
                plan = builder.build(sharing, boundary)
            except PlanError as error:
                candidates.append(Candidate(sharing, boundary, None, str(error)))
                continue
            cost = plan_cost(plan, batch, coupling)
            candidates.append(Candidate(sharing, boundary, cost))
            plans.append((cost, plan))
    if not plans:
        reasons = "\n".join(f"  {c.sharing} + {c.boundary}: {c.refused}" for c in candidates)
        raise PlanError(f"no plan fits this batch:\n{reasons}")
    cheapest = min(cost for cost, _ in plans)
    cost, plan = next(p for p in plans if p[0] <= cheapest * (1 + NOISE))
    dense = next((c.cost for c in candidates if c.sharing == "none" and c.cost is not None), None)
    return replace(plan, candidates=tuple(candidates), reason=_reason(plan, cost, dense, config))


def plan_cost(plan: Plan, batch: RolloutBatch, coupling: IntArray | None = None) -> float:
    """Predicted cost of a step in FLOPs (in tokens without a shape): smaller is faster.

    Unlike the bound this counts what runs: padding, and rows too small to keep the chip busy.
    """
    slots = sum(max(row.slots, EFFICIENT_TOKENS) for row in plan.rows)
    extra = coupling is not None and splits(plan, batch, coupling)
    if plan.shape is None:
        return slots * (4 / 3 if extra else 1)
    waste = 2.0 * (slots - plan.shared.tokens) * plan.shape.linear_parameters
    cost = plan.shared.step_flops(plan.shape) + (1 + LINEAR_BACKWARD) * waste
    if extra:
        cost += plan.shared.forward_flops(plan.shape) + waste
    return cost


def splits(plan: Plan, batch: RolloutBatch, coupling: IntArray) -> bool:
    """Whether trained tokens of rollouts that a loss couples lie in more than one row."""
    rows = plan.row_of_rollouts(batch.loss_mask, batch.offsets)
    if (rows == -2).any():
        return True
    trained = rows >= 0
    pairs = np.unique(np.stack([coupling[trained], rows[trained]]), axis=1)
    return len(np.unique(pairs[0])) < pairs.shape[1]


def _reason(plan: Plan, cost: float, dense: float | None, config: Config) -> str:
    if "auto" not in (config.sharing, config.boundary):
        return "as asked"
    if dense is None:
        return "the cheapest of those looked at"
    if plan.sharing == "none":
        return "nothing that shares costs less than dense"
    return f"predicted to cost {cost / dense:.3f} of dense"


class _Builder:
    """Builds plans of one batch; what they have in common is done once."""

    def __init__(self, batch: RolloutBatch, shape: ModelShape | None, config: Config) -> None:
        self.batch, self.shape, self.config = batch, shape, config
        self.fingerprint = fingerprint(batch)
        # The hidden states of one path do not depend on the temperature, but its log-probs do.
        self.temperature_class = np.unique(batch.temperatures, return_inverse=True)[1].astype(
            np.int64
        )
        self.tree_order = sort_rollouts(batch.token_ids, batch.offsets, self.temperature_class)
        tree = build_forest(self.tree_order, len(batch))
        firsts = np.unique(batch.token_ids[batch.offsets[:-1]])
        self.unique_tokens = self._unique_tokens(tree, len(firsts))
        self.longest = int(self.tree_order.edges.max(initial=1))
        self.orders: dict[str, SortedRollouts] = {"tree": self.tree_order}

    def _unique_tokens(self, tree: Forest, firsts: int) -> int:
        if len(np.unique(self.temperature_class)) == 1:
            return tree.edges + firsts
        plain = sort_rollouts(
            self.batch.token_ids, self.batch.offsets, np.zeros(len(self.batch), np.int64)
        )
        return int(plain.new_edges.sum()) + firsts

    def order(self, sharing: str) -> SortedRollouts:
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

    def build(self, sharing: str, boundary: str) -> Plan:
        """One combination within the limits of the configuration."""
        given = self.config.max_row_tokens
        tokens = given or max(DEFAULT_ROW_TOKENS, self.longest)
        budget = self.config.memory_budget_bytes
        if budget is None:
            return self._build(sharing, boundary, tokens)
        if self.shape is None:
            raise PlanError(
                f"memory_budget_bytes is {budget}, but without a model shape bytes cannot be "
                "predicted; name the model, or limit max_row_tokens instead."
            )
        # A row that holds whole paths is no shorter than the longest of them.
        least = self.longest if boundary == "in_row" else 64
        while True:
            plan = self._build(sharing, boundary, tokens)
            assert plan.predicted_peak_bytes is not None
            if plan.predicted_peak_bytes <= budget:
                return plan
            if given or tokens <= least:
                remedy = "lower max_row_tokens" if given else "checkpoint activations"
                if not given and boundary == "in_row":
                    remedy = "use boundary='across_rows', which cuts rollouts into chains of rows"
                raise PlanError(
                    f"rows of {tokens} tokens are predicted to need {plan.predicted_peak_bytes} "
                    f"bytes and memory_budget_bytes is {budget}; raise the budget, or {remedy}."
                )
            tokens = max(least, tokens * 3 // 4)

    def _build(self, sharing: str, boundary: str, tokens: int) -> Plan:
        padded = self.config.waves == "padded"
        order = self.order(sharing)
        if boundary == "in_row" and not (padded and sharing == "none"):
            forest, rows = rows_of_whole_paths(order, len(self.batch), tokens)
        else:
            forest = build_forest(order, len(self.batch))
            if boundary == "in_row" and self.longest > tokens:
                rows_of_whole_paths(order, len(self.batch), tokens)  # raises, saying why
            if boundary == "mixed" and not padded:
                forest, rows = rows_mixed(forest, tokens)
            else:
                forest, rows = rows_across(forest, tokens, padded=padded)
        rows, arena_slots, state_slots = place_boundaries(forest, rows)
        edges = np.diff(self.batch.offsets) - 1
        windows = self.shape.windows if self.shape else ()
        labelled = self._labelled(forest)
        plan = Plan(
            sharing=sharing,
            boundary=boundary,
            waves=self.config.waves,
            max_row_tokens=tokens,
            forest=forest,
            rows=tuple(rows),
            arena_slots=arena_slots,
            state_slots=state_slots,
            rollouts=len(self.batch),
            logical_tokens=int(self.batch.offsets[-1]),
            unique_tokens=self.unique_tokens,
            labelled=labelled,
            dense=dense_work(edges, int(self.batch.loss_mask.sum()), windows),
            shared=forest_work(forest, labelled, windows),
            fingerprint=self.fingerprint,
            shape=self.shape,
        )
        if self.shape is None:
            return plan
        return replace(plan, predicted_peak_bytes=peak_bytes(plan, self.shape))

    def _labelled(self, forest: Forest) -> int:
        labelled = np.zeros(forest.edges, bool)
        labelled[forest.token_edges(self.batch.offsets)[self.batch.loss_mask]] = True
        return int(labelled.sum())


def peak_bytes(plan: Plan, shape: ModelShape) -> int:
    """Predicted bytes of activations and boundary state at the worst moment of the schedule."""
    open_slots: list[int] = []
    worst = 0
    for row in plan.rows:
        above = open_slots[row.parent] if row.parent >= 0 else 0
        open_slots.append(above + row.slots)
        worst = max(worst, open_slots[-1])
    boundary = shape.boundary_bytes_per_token + shape.boundary_gradient_bytes_per_token
    held = plan.arena_slots * boundary + plan.state_slots * shape.state_bytes
    return worst * shape.activation_bytes_per_token + held


def row_work(plan: Plan, row: Row, labelled: int) -> Work:
    """Work of one row's own edges."""
    segments = list(row.segments)
    windows = plan.shape.windows if plan.shape else ()
    start, length = plan.forest.start[segments], plan.forest.length[segments]
    pairs = {w: visible_pairs(start, length, w) for w in {0, *windows}}
    return Work(tokens=row.tokens, pairs=pairs, labelled=labelled)
