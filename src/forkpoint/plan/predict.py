"""What a plan is predicted to cost and to hold, and which rows are not kept to make it fit.

A meter prices rows: by counted FLOPs (here), or by what was measured on this device for this model
(plan/calibration.py). The schedule is then played with them: each forward and backward takes its
time, and copies of offloaded rows run beside, one at a time in each direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from forkpoint.forest import IntArray
from forkpoint.plan.cost import ATTENTION_BACKWARD, LINEAR_BACKWARD, ModelShape, visible_pairs
from forkpoint.plan.layout import Row
from forkpoint.plan.plan import Plan

# Below this many tokens a matrix product is bound by reading its weights, so that fewer tokens take
# no less time: about the FLOPs per byte at which current GPUs turn from memory- to compute-bound.
EFFICIENT_TOKENS = 256

# What a query that attends to ancestors by a further launch costs besides, in keys: reading and
# merging partial outputs, and the backward's passes over its queries. Measured on an H200 with
# FlashAttention-4, heads 32:8 of 128, as what sharing a prefix of 512 tokens adds to replicating it
# (benchmarks/results/attention-h200.jsonl, small/P512-N8-R2048). There it is a hundredth of what a
# layer's matrix products take for the token; of small models, whose products are not bound by their
# FLOPs either, it is at most so much of them.
LAUNCH_KEYS = 240
LAUNCH_MOST = 0.02

# What each row's backward costs besides, in tokens: it adds to all gradients. 12 ms on an H200 in a
# model of 8B (benchmarks/results/profile-h200.jsonl, "additions", and writing what is added).
ROW_TOKENS = 180


class Meter(Protocol):
    """Prices of the rows of one plan, in one unit."""

    unit: str

    def forward(self, row: Row, *, boundary_only: bool = False) -> float: ...

    def backward(self, row: Row) -> float:
        """With what its checkpointing computes again."""
        ...

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        """A copy to the host's memory, or back from there; None where its price is unknown."""
        ...

    def kept_bytes(self, row: Row) -> int:
        """What a row keeps between its forward and its backward."""
        ...

    def working_bytes(self, row: Row) -> int:
        """What its backward needs besides, at most."""
        ...


class CountedMeter:
    """FLOPs of what runs: edges, padding, rows too short to fill a device, and what a row and a
    further launch of attention cost besides. Bytes as counted."""

    unit = "FLOPs"

    def __init__(self, plan: Plan, labelled_of_row: Sequence[int]) -> None:
        assert plan.shape is not None
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        self.labelled_of_row: Sequence[int] = labelled_of_row

    def forward(self, row: Row, *, boundary_only: bool = False) -> float:
        linear, head, attention = self._parts(row)
        return linear + attention + (0.0 if boundary_only else head)

    def backward(self, row: Row) -> float:
        linear, head, attention = self._parts(row)
        again = self.shape.repeated_flops_share(row.checkpointing)
        # What a selective policy runs again are products of MLPs, and no attention.
        repeated = again * linear + (attention if again == 1.0 else 0.0)
        gradients = (1 + LINEAR_BACKWARD) * 2.0 * ROW_TOKENS * self.shape.linear_parameters
        return (
            LINEAR_BACKWARD * (linear + head)
            + ATTENTION_BACKWARD * attention
            + repeated
            + gradients
        )

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        return None

    def kept_bytes(self, row: Row) -> int:
        return row.slots * self.shape.activation_bytes(row.checkpointing)

    def working_bytes(self, row: Row) -> int:
        return 0

    def _parts(self, row: Row) -> tuple[float, float, float]:
        """FLOPs of a forward: blocks without attention, head, attention."""
        shape, segments = self.shape, list(row.segments)
        start, length = self.plan.forest.start[segments], self.plan.forest.length[segments]
        every = {w: visible_pairs(start, length, w) for w in set(shape.windows)}
        pairs = sum(every[window] for window in shape.windows)
        linear = 2.0 * max(row.slots, EFFICIENT_TOKENS) * shape.linear_parameters
        head = 2.0 * self.labelled_of_row[row.index] * shape.hidden * shape.vocab
        key = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
        further = min(
            LAUNCH_KEYS * key * shape.windows.count(0),
            LAUNCH_MOST * 2.0 * shape.linear_parameters,
        )
        return linear, head, key * pairs + further * self._queries_of_rectangles(row)

    def _queries_of_rectangles(self, row: Row) -> int:
        """Tokens that have ancestors outside of their causal sequence (see `layout.full_table`)."""
        forest, segments = self.plan.forest, np.asarray(row.segments)
        heads = np.ones(len(segments), bool)
        if not row.width:
            heads[1:] = forest.parent[segments[1:]] != segments[:-1]
        above = forest.parent[segments[heads]] >= 0
        return int(forest.length[segments][above[np.cumsum(heads) - 1]].sum())


class TokenMeter:
    """Passes of tokens, where nothing is known of the model: a backward counts as two."""

    unit = "tokens"

    def forward(self, row: Row, *, boundary_only: bool = False) -> float:
        return max(row.slots, EFFICIENT_TOKENS)

    def backward(self, row: Row) -> float:
        return 2 * max(row.slots, EFFICIENT_TOKENS)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        return None

    def kept_bytes(self, row: Row) -> int:
        return 0

    def working_bytes(self, row: Row) -> int:
        return 0


@dataclass(frozen=True)
class Played:
    """A schedule played with a meter's prices."""

    cost: float
    phases: dict[str, float]
    """As the engine reports its time: A, B, C."""


def play(plan: Plan, meter: Meter) -> Played:
    """What a step costs: computation in order, and waiting for copies that are not done by then.

    A copy out begins with its row's forward and is over when its bytes are through; a row comes
    back from the beginning of the step before its backward on, and the backward ends no earlier
    than the last layer's share of its work after the last byte.
    """
    layers = plan.shape.layers if plan.shape else 1
    now = out_free = in_free = 0.0
    before = 0.0
    sent: dict[int, float] = {}
    phases = dict.fromkeys("ABC", 0.0)
    for step, index in plan.schedule():
        row, begin = plan.rows[index], now
        if step == "B":
            now += (work := meter.backward(row))
            if index in sent:
                back = meter.copy(meter.kept_bytes(row), out=False) or 0.0
                in_free = max(in_free, sent.pop(index), before) + back
                now = max(now, in_free + work / layers)
        else:
            first = step == "F" and row.residency == "recompute"
            now += meter.forward(row, boundary_only=first)
            if row.residency == "offload":
                out = meter.copy(meter.kept_bytes(row), out=True) or 0.0
                out_free = sent[index] = max(out_free, begin) + out
        phases["B" if not row.children else "A" if step == "F" else "C"] += now - begin
        before = begin
    return Played(now, phases)


def forward_cost(plan: Plan, meter: Meter) -> float:
    """All forwards alone, as for scores."""
    return sum(meter.forward(row) for row in plan.rows)


def peak_bytes(plan: Plan, meter: Meter, shape: ModelShape) -> int:
    """Bytes of activations and boundary state at the worst moment of the schedule.

    That is some row's backward: its own activations, and those of the rows around it that are kept.
    """
    open_bytes: list[int] = []
    worst = 0
    for row in plan.rows:
        above = open_bytes[row.parent] if row.parent >= 0 else 0
        kept = meter.kept_bytes(row)
        open_bytes.append(above + (kept if row.residency == "keep" else 0))
        worst = max(worst, above + kept + meter.working_bytes(row))
    return worst + arena_bytes(plan, shape)


def arena_bytes(plan: Plan, shape: ModelShape) -> int:
    """Boundary state and its gradients, for the whole step."""
    each = shape.boundary_bytes_per_token + shape.boundary_gradient_bytes_per_token
    return plan.arena_slots * each + plan.state_slots * shape.state_bytes


def fit_rows(plan: Plan, meter: Meter, shape: ModelShape, budget: int, residency: str) -> Plan:
    """The plan with as few rows as it takes not kept, so that its peak is within the budget.

    At each row that would be too much, of the rows open around it those go first that are cheapest
    to have back for each byte. Where even that is not enough the plan stays above the budget.
    """
    rows = list(plan.rows)
    room = budget - arena_bytes(plan, shape)
    kept = [meter.kept_bytes(row) for row in rows]
    price = [meter.forward(row, boundary_only=True) / max(1, kept[row.index]) for row in rows]
    for row in rows:
        above = []
        parent = row.parent
        while parent >= 0:
            if rows[parent].residency == "keep":
                above.append(parent)
            parent = rows[parent].parent
        over = sum(kept[r] for r in above) + kept[row.index] + meter.working_bytes(row) - room
        for index in sorted(above, key=lambda r: price[r]):
            if over <= 0:
                break
            rows[index] = replace(rows[index], residency=residency)
            over -= kept[index]
    return replace(plan, rows=tuple(rows))


def labelled_of_rows(plan: Plan, token_edge: IntArray, loss_mask: np.ndarray) -> list[int]:
    """How many edges of each row have a label that some rollout trains on."""
    labelled = np.zeros(plan.forest.edges, bool)
    labelled[token_edge[loss_mask]] = True
    before = np.concatenate([[0], np.cumsum(labelled)])
    begin = plan.forest.edge_offsets
    of_segment = before[begin[1:]] - before[begin[:-1]]
    return [int(of_segment[list(row.segments)].sum()) for row in plan.rows]
