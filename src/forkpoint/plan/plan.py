"""A plan: rows, what each reads from outside itself, and the order of forwards and backwards."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.forest import Forest, IntArray
from forkpoint.plan.cost import ModelShape, Work
from forkpoint.plan.layout import Row
from forkpoint.rollouts import RolloutBatch
from forkpoint.schema import SchemaError, parse_json

JSON_VERSION = 2
DEPTH_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Candidate:
    """One combination that the planner looked at."""

    sharing: str
    boundary: str
    cost: float | None
    """Predicted cost of the step, in the plan's cost_unit."""
    refused: str | None = None
    """Why there is no such plan."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What will run for one batch. Made by `forkpoint.plan.make_plan`; needs no torch."""

    sharing: str
    boundary: str
    waves: str
    max_row_tokens: int
    forest: Forest
    rows: tuple[Row, ...]
    """In visiting order."""
    arena_slots: int
    """The most tokens whose boundary state exists at once."""
    state_slots: int
    """The most segments whose final state, in layers that carry one, exists at once."""
    rollouts: int
    logical_tokens: int
    """Tokens as given."""
    unique_tokens: int
    """Distinct (path, token) pairs of the whole batch."""
    labelled: int
    """Distinct edges whose label some rollout trains on."""
    dense: Work
    shared: Work
    fingerprint: str
    shape: ModelShape | None = None
    cost: float = 0.0
    """What the step is predicted to cost; plans are compared by it."""
    cost_unit: str = "tokens"
    """ms where a calibration is at hand, else FLOPs, else (without a model shape) tokens."""
    predicted_ms: float | None = None
    """Time of a step; None without a calibration."""
    predicted_peak_bytes: int | None = None
    """Activations, boundary state and its gradients at the worst moment; not weights."""
    rests_on: str = ""
    """The calibration that the predictions are made from; without one they are counted."""
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""

    @property
    def computed_tokens(self) -> int:
        """Edges run, padding not counted."""
        return sum(row.tokens for row in self.rows)

    @property
    def run_slots(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(row.slots for row in self.rows)

    @property
    def bound(self) -> float:
        """The counted speed-up over dense: FLOPs where the shape is known, else tokens."""
        if not self.shared.tokens:
            return 1.0
        if self.shape is None:
            return self.dense.tokens / self.shared.tokens
        return self.dense.step_flops(self.shape) / self.shared.step_flops(self.shape)

    @cached_property
    def arena_of(self) -> dict[int, int]:
        """First arena slot of every segment whose boundary state other rows read."""
        return {
            segment: begin
            for row in self.rows
            for segment, begin in zip(row.segments, row.arena_begin, strict=True)
            if begin >= 0
        }

    @cached_property
    def state_of(self) -> dict[int, int]:
        """State slot of every segment that a segment of another row starts from."""
        return {
            segment: slot
            for row in self.rows
            for segment, slot in zip(row.segments, row.state_slot, strict=True)
            if slot >= 0
        }

    @cached_property
    def row_names(self) -> tuple[str, ...]:
        """A letter for the row's depth and a number for its turn at that depth: A0, B0, B1."""
        depths: list[int] = []
        turns: dict[int, int] = {}
        names = []
        for row in self.rows:
            depth = depths[row.parent] + 1 if row.parent >= 0 else 0
            depths.append(depth)
            letter = DEPTH_LETTERS[depth] if depth < len(DEPTH_LETTERS) else f"R{depth}."
            names.append(f"{letter}{turns.get(depth, 0)}")
            turns[depth] = turns.get(depth, 0) + 1
        return tuple(names)

    def schedule(self, *, backward: bool = True) -> list[tuple[str, int]]:
        """("F", "R" or "B", row) in the order of work: children run between a row's F and its B.

        R is the second forward of a row whose activations are not kept but computed again.
        """
        steps: list[tuple[str, int]] = []
        todo = [("F", row.index) for row in reversed(self.rows) if row.parent < 0]
        while todo:
            phase, row = todo.pop()
            steps.append((phase, row))
            if phase == "F":
                if backward:
                    todo.append(("B", row))
                    if self.rows[row].residency == "recompute":
                        todo.append(("R", row))
                todo.extend(("F", child) for child in reversed(self.rows[row].children))
        return steps

    def events(self, *, backward: bool = True) -> tuple[str, ...]:
        """The literal order of work: `F A0` is row A0's forward, `B A0` its backward.

        `R A0` is the forward that computes A0's activations again, where the plan says so.
        """
        steps = self.schedule(backward=backward)
        return tuple(f"{phase} {self.row_names[row]}" for phase, row in steps)

    def row_of_rollouts(self, loss_mask: np.ndarray, offsets: IntArray) -> IntArray:
        """[N] the one row that holds all trained tokens of each rollout.

        -1 where there are none, -2 where they lie in several rows.
        """
        row_of_segment = np.full(len(self.forest), -1, np.int64)
        for row in self.rows:
            row_of_segment[list(row.segments)] = row.index
        before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
        found = np.full(self.rollouts, -1, np.int64)
        for rollout, segment in self.forest.levels():
            begin = np.asarray(offsets, np.int64)[rollout] + 1 + self.forest.start[segment]
            trained = before[begin + self.forest.length[segment]] > before[begin]
            rollout, row = rollout[trained], row_of_segment[segment[trained]]
            known = found[rollout]
            found[rollout] = np.where((known == -1) | (known == row), row, -2)
        return found

    def check_batch(self, batch: RolloutBatch) -> None:
        """Refuse a batch that this plan was not made for.

        Raises:
            PlanError: tokens, lengths, masks or temperatures differ from those planned.
        """
        found = fingerprint(batch)
        if found != self.fingerprint:
            raise PlanError(
                f"this plan was made for a batch with fingerprint {self.fingerprint}, and this "
                f"batch has {found}: their tokens, masks, groups or temperatures differ. Make a "
                "plan for this batch."
            )

    def explain(self, *, width: int = 100) -> str:
        """What runs, what is saved, why this was chosen and what was refused, as text."""
        from forkpoint.plan.explain import explain

        return explain(self, width=width)

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it back."""
        values: dict[str, Any] = {"version": JSON_VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "forest":
                value = {f.name: getattr(value, f.name).tolist() for f in fields(value)}
            elif item.name in ("rows", "candidates"):
                value = [asdict(entry) for entry in value]
            elif isinstance(value, Work | ModelShape):
                value = asdict(value)
            values[item.name] = value
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan that `to_json` wrote.

        Raises:
            PlanError: it is not a plan, one of another version, or one whose parts disagree.
        """
        from forkpoint.plan.written import read_plan

        try:
            values = parse_json(text)
        except SchemaError as error:
            raise PlanError(
                f"this is {error}, so it is no plan. Give what Plan.to_json returned."
            ) from error
        return read_plan(values)


# Batches cannot be written to, so each is read once.
_fingerprints: WeakKeyDictionary[RolloutBatch, str] = WeakKeyDictionary()


def fingerprint(batch: RolloutBatch) -> str:
    """A digest of everything that decides which rollouts may share and which edges are trained."""
    if batch not in _fingerprints:
        _fingerprints[batch] = _fingerprint(batch)
    return _fingerprints[batch]


def _fingerprint(batch: RolloutBatch) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in (
        batch.token_ids,
        batch.offsets,
        batch.loss_mask,
        batch.group_index,
        batch.temperatures,
    ):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
