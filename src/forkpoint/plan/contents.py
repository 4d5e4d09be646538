"""A plan: microbatches, what each reads from outside itself, and the order of forwards and
backwards."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.plan.cache import allocate_cache
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.exchanging import exchanging
from forkpoint.plan.pricing.cost import ModelShape, Work
from forkpoint.plan.program import (
    BACKWARD,
    Instruction,
    Program,
    check_order,
    score_program,
    step_program,
    waits_for,
)
from forkpoint.plan.runs import LeftOut
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray

JSON_VERSION = 11
READ_VERSIONS = (9, 10, JSON_VERSION)
"""Versions that are read; 9 has shapes without what mixtures of experts keep, and plans of 9 and 10
run all tokens."""


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
class PlanContents:
    """The fields of a plan, and what follows from them alone."""

    sharing: str
    boundary: str
    leaf_layout: str
    max_microbatch_tokens: int
    forest: Forest
    microbatches: tuple[Microbatch, ...]
    """In visiting order."""
    program: Program
    """The instructions that `forward_backward` runs. A pass of scores comes first where a loss
    couples rollouts of several microbatches."""
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
    """Entries of the head: edges whose label some rollout trains on, each as often as there are
    temperatures at which it is trained. A critic's edges have one each."""
    dense: Work
    """Work of nobody sharing. It leaves out the same as the plan."""
    shared: Work
    fingerprint: str
    capabilities: Capabilities = field(default_factory=Capabilities)
    """Capabilities of the host that the plan was made for."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Rollouts and tails that are not run, because they give no gradient."""
    counts_first: bool = False
    """Whether the program's scores count experts, for a router loss whose statistics span
    microbatches."""
    last_tokens: bool = False
    """Whether rollouts' last tokens run, which no loss of log-probs needs: for routers' statistics
    over whole rollouts."""
    shape: ModelShape | None = None
    cost: float = 0.0
    """Predicted cost of the step; plans are compared by it."""
    cost_unit: str = "tokens"
    """ms where a calibration is at hand, else FLOPs, else (without a model shape) tokens."""
    predicted_ms: float | None = None
    """Time of a step; None without a calibration."""
    predicted_peak_bytes: int | None = None
    """Activations, prefix cache and its gradients at the worst moment; not weights."""
    memory_budget_bytes: int | None = None
    """The most that `predicted_peak_bytes` was to be; None is no limit. Beyond a budget that was
    measured (`Config.memory_budget`) a plan is made all the same where nothing fits."""
    rests_on: str = ""
    """The calibration that the predictions are made from; without one they are counted."""
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""
    gather: Literal["", "microbatch", "step"] = ""
    """How ranks hold sharded weights in the step (`Config.gather`); "" where weights are not
    sharded, and before ranks have agreed on it."""
    gather_reason: str = ""
    split: Literal["", "replicate", "exchange"] = ""
    """Treatment of first tokens that several ranks have: each runs them, or one does and
    sends their prefix cache to the others (`Config.split`); "" where there are none, and before
    ranks have agreed on it."""
    split_reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget, if there is one."""
        budget, peak = self.memory_budget_bytes, self.predicted_peak_bytes
        return budget is None or peak is None or peak <= budget

    @property
    def computed_tokens(self) -> int:
        """Edges run on this rank, padding not counted."""
        return sum(m.tokens for m in self.microbatches if m.trunk != "received")

    @property
    def run_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(m.run_tokens for m in self.microbatches if m.trunk != "received")

    @property
    def bound(self) -> float:
        """The counted speed-up over dense: FLOPs where the shape is known, else tokens.

        Both leave out what gives no gradient, so that this counts sharing alone.
        """
        if not self.shared.tokens:
            return 1.0
        if self.shape is None:
            return self.dense.tokens / self.shared.tokens
        return self.dense.step_flops(self.shape) / self.shared.step_flops(self.shape)

    @cached_property
    def run_lengths(self) -> IntArray:
        """How many edges of each rollout run, from its first: int64 [N]."""
        ends = np.append(self.forest.start + self.forest.length, 0)
        return ends[self.forest.leaf]

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
        """By microbatch: "prefix" where others read its prefix cache, "leaf" where none does,
        "received" where another rank runs it, and its index."""
        return tuple(f"{_kind(microbatch)} {microbatch.index}" for microbatch in self.microbatches)

    @cached_property
    def score_program(self) -> Program:
        """The instructions that `policy.score` runs: a forward of every microbatch."""
        early = self.capabilities.leaves_early
        return score_program(self.microbatches, leaves_early=early)

    def event(self, instruction: Instruction) -> str:
        """An instruction in words, such as "forward prefix 0"."""
        if instruction.exchanges:
            return f"{instruction.operation} trunks"
        name = "idle" if instruction.idle else self.microbatch_names[instruction.microbatch]
        return f"{instruction.operation} {name}"

    def events(self, *, backward: bool = True) -> tuple[str, ...]:
        """Events of the step, in order and in words: "forward prefix 0", "forward leaf 1",
        "backward leaf 1", "backward prefix 0".

        "recompute prefix 0" is the forward that computes activations again which were not kept.
        "score leaf 1" is a forward without a graph. Without `backward`: the events of
        `policy.score`.
        """
        program = self.program if backward else self.score_program
        return tuple(self.event(instruction) for instruction in program.instructions)

    def waits_for(self) -> tuple[tuple[int, ...], ...]:
        """For each unit of the program (`Program.units`), the positions of those that it waits for.

        An order that keeps to them computes the same: see `reordered`.
        """
        forest = self.forest
        of = {segment: m.index for m in self.microbatches for segment in m.segments}
        parents = [
            frozenset(
                of[int(forest.parent[segment])]
                for segment in microbatch.segments
                if forest.parent[segment] >= 0
            )
            - {microbatch.index}
            for microbatch in self.microbatches
        ]
        return waits_for(self.program, self.microbatches, parents)

    def reordered(self, order: Sequence[int]) -> Self:
        """The plan with its program in another order, and cache slots for that order.

        It has no predictions of time and memory: these were those of the present order.

        Args:
            order: positions of units (`Program.units`), in the order in which they are to run.

        Raises:
            PlanError: a unit would run before one that it waits for.
        """
        check_order(self.waits_for(), order)
        chosen = [i for at in order for i in self.program.units[at]]
        backwards = [at for at, i in enumerate(chosen) if i.operation == BACKWARD]
        for at in backwards:
            chosen[at] = chosen[at]._replace(last_backward=at == backwards[-1])
        found = self._in_order(Program(tuple(chosen)))
        return replace(found, predicted_ms=None, predicted_peak_bytes=None)

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
            end = np.minimum(begin + self.forest.length[segment], offsets[rollout + 1])
            trained = before[end] > before[np.minimum(begin, end)]
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

    def check_runs(self, batch: RolloutBatch, needed: IntArray) -> None:
        """Refuse a call that needs tokens that this plan leaves out.

        Args:
            batch: the rollouts that it was made for.
            needed: int64 [N], how many edges of each rollout the call needs, from its first.

        Raises:
            PlanError: the plan runs less of some rollout.
        """
        lacking = np.flatnonzero(self.run_lengths < needed)
        if len(lacking):
            first = int(lacking[0])
            others = f" and more of {len(lacking) - 1} others" * (len(lacking) > 1)
            raise PlanError(
                f"this plan runs {self.run_lengths[first]} tokens of rollout "
                f"{short(batch.rollout_ids[first])}, and this call needs {needed[first]}{others}: "
                "the plan leaves out what had no gradient in the call that it was made for. Leave "
                "plan= out, or make it for this call: policy.plan(batch, loss), and without a loss "
                "for log-probs."
            )

    def check_host(self, capabilities: Capabilities) -> None:
        """Refuse a host that cannot do what this plan asks for.

        Raises:
            PlanError: the plan leaves the last block early and the host does not, or a
                microbatch has a length that the host does not take.
        """
        if self.capabilities.leaves_early and not capabilities.leaves_early:
            raise PlanError(
                "this plan leaves the last block of the model early, and the model cannot be left "
                "early now: it checkpoints itself (gradient_checkpointing). Make the plan again "
                "with policy.plan, in the state in which the model is trained."
            )
        multiple = capabilities.length_multiple
        for microbatch in self.microbatches:
            if microbatch.length % multiple:
                raise PlanError(
                    f"{self.microbatch_names[microbatch.index]} of this plan has "
                    f"{microbatch.length} tokens, and the model takes multiples of {multiple}. "
                    "Make the plan again with policy.plan."
                )

    def check_coupling(self, batch: RolloutBatch, coupling: IntArray) -> None:
        """Refuse a loss that needs a pass of scores, which this plan does not have.

        Args:
            batch: the rollouts.
            coupling: int64 [N], which rollouts the loss couples (same entry).

        Raises:
            PlanError: rollouts that the loss couples have trained tokens in several microbatches,
                and the program begins with no pass of scores.
        """
        if not self.program.has_scores and self.splits(batch, coupling):
            raise PlanError(
                "this plan has one pass, and the loss couples rollouts whose trained tokens lie in "
                "several microbatches, so that it needs a pass of scores first. Make the plan "
                "for this loss: policy.plan(batch, loss)."
            )

    def splits(self, batch: RolloutBatch, coupling: IntArray) -> bool:
        """Whether trained tokens of rollouts that a loss couples lie in several microbatches.

        coupling: int64 [N], which rollouts the loss couples (same entry).
        """
        microbatches = self.microbatch_of_rollouts(batch.loss_mask, batch.offsets)
        if (microbatches == -2).any():
            return True
        trained = microbatches >= 0
        pairs = np.unique(np.stack([coupling[trained], microbatches[trained]]), axis=1)
        return len(np.unique(pairs[0])) < pairs.shape[1]

    def with_microbatches(self, microbatches: Iterable[Microbatch]) -> Self:
        """The plan with other microbatches, and their program in the order of one device."""
        plan = replace(self, microbatches=tuple(microbatches))
        return plan.with_program(scores=self.program.has_scores)

    def with_program(self, *, scores: bool) -> Self:
        """The plan with the program of its microbatches in the order of one device.

        scores: whether it begins with a pass of scores.
        """
        early = self.capabilities.leaves_early
        program = step_program(self.microbatches, scores=scores, leaves_early=early)
        if self.split == "exchange":
            program = exchanging(program, self.microbatches, scores=scores)
        return self._in_order(program)

    def _in_order(self, program: Program) -> Self:
        """The plan with this program, and cache slots for its order."""
        microbatches, tokens, states = allocate_cache(self.forest, self.microbatches, program)
        return replace(
            self,
            program=program,
            microbatches=microbatches,
            cache_tokens=tokens,
            cache_states=states,
        )

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it back."""
        values: dict[str, Any] = {"version": JSON_VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "forest":
                value = {f.name: getattr(value, f.name).tolist() for f in fields(value)}
            elif item.name in ("microbatches", "candidates"):
                value = [asdict(entry) for entry in value]
            elif item.name == "program":
                value = [list(instruction) for instruction in value.instructions]
            elif isinstance(value, Work | ModelShape | Capabilities | LeftOut):
                value = asdict(value)
            values[item.name] = value
        return json.dumps(values)


def _kind(microbatch: Microbatch) -> str:
    if microbatch.trunk == "received":
        return "received"
    return "prefix" if microbatch.children else "leaf"


# Batches cannot be written to, so each is read once.
_fingerprints: WeakKeyDictionary[RolloutBatch, str] = WeakKeyDictionary()


def fingerprint(batch: RolloutBatch) -> str:
    """A digest of everything that decides which rollouts may share and which entries the head
    computes."""
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
    if batch.route_index is not None:
        digest.update(b"routes")
        digest.update(batch.route_index.tobytes())
    return digest.hexdigest()
