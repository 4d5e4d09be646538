"""A plan: microbatches, what each reads from outside itself, and the order of forwards and
backwards."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.forest import Forest, IntArray
from forkpoint.layout import Microbatch
from forkpoint.plan.pricing.cost import ModelShape, Work
from forkpoint.rollouts import RolloutBatch
from forkpoint.schema import SchemaError, parse_json

JSON_VERSION = 3
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
    leaf_layout: str
    max_microbatch_tokens: int
    forest: Forest
    microbatches: tuple[Microbatch, ...]
    """In visiting order."""
    cache_tokens: int
    """The most tokens whose prefix cache exists at once."""
    cache_states: int
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
    """Activations, prefix cache and its gradients at the worst moment; not weights."""
    rests_on: str = ""
    """The calibration that the predictions are made from; without one they are counted."""
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""

    @property
    def computed_tokens(self) -> int:
        """Edges run, padding not counted."""
        return sum(microbatch.tokens for microbatch in self.microbatches)

    @property
    def run_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(microbatch.run_tokens for microbatch in self.microbatches)

    @property
    def bound(self) -> float:
        """The counted speed-up over dense: FLOPs where the shape is known, else tokens."""
        if not self.shared.tokens:
            return 1.0
        if self.shape is None:
            return self.dense.tokens / self.shared.tokens
        return self.dense.step_flops(self.shape) / self.shared.step_flops(self.shape)

    @cached_property
    def cache_of(self) -> dict[int, int]:
        """First cache place of every segment whose prefix cache other microbatches read."""
        return {
            segment: begin
            for microbatch in self.microbatches
            for segment, begin in zip(microbatch.segments, microbatch.cache_begin, strict=True)
            if begin >= 0
        }

    @cached_property
    def state_of(self) -> dict[int, int]:
        """State place of every segment that a segment of another microbatch starts from."""
        return {
            segment: place
            for microbatch in self.microbatches
            for segment, place in zip(microbatch.segments, microbatch.state_index, strict=True)
            if place >= 0
        }

    @cached_property
    def microbatch_names(self) -> tuple[str, ...]:
        """A letter for the microbatch's depth and a number for its turn at that depth: A0, B0,
        B1."""
        depths: list[int] = []
        turns: dict[int, int] = {}
        names = []
        for microbatch in self.microbatches:
            depth = depths[microbatch.parent] + 1 if microbatch.parent >= 0 else 0
            depths.append(depth)
            letter = DEPTH_LETTERS[depth] if depth < len(DEPTH_LETTERS) else f"R{depth}."
            names.append(f"{letter}{turns.get(depth, 0)}")
            turns[depth] = turns.get(depth, 0) + 1
        return tuple(names)

    def schedule(self, *, backward: bool = True) -> list[tuple[str, int]]:
        """("F", "R" or "B", microbatch) in the order of work: children run between a microbatch's F
        and its B.

        R is the second forward of a microbatch whose activations are not kept but computed again.
        """
        steps: list[tuple[str, int]] = []
        todo = [
            ("F", microbatch.index)
            for microbatch in reversed(self.microbatches)
            if microbatch.parent < 0
        ]
        while todo:
            phase, microbatch = todo.pop()
            steps.append((phase, microbatch))
            if phase == "F":
                if backward:
                    todo.append(("B", microbatch))
                    if self.microbatches[microbatch].activations == "recompute":
                        todo.append(("R", microbatch))
                todo.extend(
                    ("F", child) for child in reversed(self.microbatches[microbatch].children)
                )
        return steps

    def events(self, *, backward: bool = True) -> tuple[str, ...]:
        """The literal order of work: `F A0` is microbatch A0's forward, `B A0` its backward.

        `R A0` is the forward that computes A0's activations again, where the plan says so.
        """
        steps = self.schedule(backward=backward)
        return tuple(f"{phase} {self.microbatch_names[microbatch]}" for phase, microbatch in steps)

    def microbatch_of_rollouts(self, loss_mask: np.ndarray, offsets: IntArray) -> IntArray:
        """[N] the one microbatch that holds all trained tokens of each rollout.

        -1 where there are none, -2 where they lie in several microbatches.
        """
        microbatch_of_segment = np.full(len(self.forest), -1, np.int64)
        for microbatch in self.microbatches:
            microbatch_of_segment[list(microbatch.segments)] = microbatch.index
        before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
        found = np.full(self.rollouts, -1, np.int64)
        for rollout, segment in self.forest.levels():
            begin = np.asarray(offsets, np.int64)[rollout] + 1 + self.forest.start[segment]
            trained = before[begin + self.forest.length[segment]] > before[begin]
            rollout, microbatch = rollout[trained], microbatch_of_segment[segment[trained]]
            known = found[rollout]
            found[rollout] = np.where((known == -1) | (known == microbatch), microbatch, -2)
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
            elif item.name in ("microbatches", "candidates"):
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
