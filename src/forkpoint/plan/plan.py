"""A plan: microbatches, the prefix caches that they read, and the order of instructions."""

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from forkpoint.errors import PlanError
from forkpoint.plan.cache import allocate_cache
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.host_cache import layer_cache_bytes
from forkpoint.plan.media import CommonEncoders, PlannedMedium, with_encoders
from forkpoint.plan.pipeline import StageSchedule
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import (
    BACKWARD,
    BOUNDARY,
    ENCODE,
    ENCODE_BACKWARD,
    FORWARD,
    OF_MEDIA,
    RECOMPUTE,
    SCORE,
    Instruction,
    Program,
    check_order,
    score_program,
    step_program,
    waits_for,
)
from forkpoint.plan.routing import paths, span_microbatches
from forkpoint.plan.runs import LeftOut
from forkpoint.plan.shared_prompts import exchanging
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree import CacheSlots, Microbatch
from forkpoint.tree.forest import Forest, IntArray
from forkpoint.units import format_bytes

CostUnit = Literal["ms", "FLOPs", "tokens"]
"""Unit of costs: ms with a calibration, FLOPs without one, tokens without a model shape."""
MOST_ROWS = 24
"""Largest number of microbatches in a description."""
MOST_SEGMENTS = 40
"""Largest number of segments in a description."""
MOST_LEVELS = 12
"""Segments with as many ancestors are left out of a description."""


@dataclass(frozen=True)
class Candidate:
    """One combination of sharing and boundary that the planner compared."""

    sharing: str
    boundary: str
    cost: float | None
    """Predicted cost of the step, in the plan's cost_unit."""
    refused: str | None = None
    """Reason why the plan is impossible, or was not chosen although it seems faster."""


@dataclass(frozen=True)
class LongestPrompt:
    """Longest prompt of one group for which a plan fits the memory."""

    tokens: int
    """Number of tokens of the prompt; 0 if no plan fits."""
    responses: tuple[int, ...]
    """Lengths of the responses of the group."""
    host_bytes: int
    """Bytes of host memory or files for prefix caches."""
    most: int
    """Largest number of tokens that was tried."""

    def __str__(self) -> str:
        """One line, such as "8,192 prompt tokens fit with 8 responses of 1 to 2,048"."""
        each = " to ".join(f"{n:,}" for n in sorted({min(self.responses), max(self.responses)}))
        count = f"{len(self.responses):,} response{'s' * (len(self.responses) > 1)}"
        least = "at least " * (self.tokens == self.most)
        host = f"; {format_bytes(self.host_bytes)} of host memory for prefix caches"
        host *= self.host_bytes > 0
        return f"{least}{self.tokens:,} prompt tokens fit with {count} of {each}{host}"


@dataclass(frozen=True, eq=False)
class Plan:
    """Program of a step on one batch.

    `Policy.plan` and `forkpoint.plan.make_plan` make it.
    """

    sharing: str
    """Sharing of the plan, as in Config: "none", "group" or "tree"."""
    boundary: str
    """Position of forks, as in Config: "within", "across" or "mixed"."""
    max_microbatch_tokens: int
    """Largest number of tokens in one microbatch."""
    forest: Forest
    """Segments of the rollouts."""
    microbatches: tuple[Microbatch, ...]
    """Microbatches in depth-first order of the forest."""
    program: Program = field(default_factory=Program)
    """Instructions of `forward_backward`. They begin with a pass of scores if the loss couples
    rollouts in several microbatches."""
    cache_of: CacheSlots = field(default_factory=CacheSlots)
    """First cache slot of every segment whose prefix cache other microbatches read. A slot holds
    the data of one token in all layers."""
    cache_tokens: int = 0
    """Largest number of tokens in the prefix cache at a time."""
    state_of: Mapping[int, int] = field(default_factory=dict)
    """Slot of every segment that a segment of another microbatch starts from, among those of
    states."""
    cache_states: int = 0
    """Largest number of states of segments at a time, in layers that carry a state."""
    least_segment: int = 0
    """Fewest tokens of a segment below a root that rollouts share; 0 means no limit."""
    rollouts: int = 0
    logical_tokens: int = 0
    """Number of tokens of all rollouts."""
    unique_tokens: int = 0
    """Number of tokens with each shared token counted once."""
    num_loss_entries: int = 0
    """Number of outputs of the head: one for each trained token and temperature. For a
    critic one for each trained token."""
    dense: Work = field(default_factory=Work)
    """Work without sharing, without the rollouts and tokens that the plan leaves out."""
    shared: Work = field(default_factory=Work)
    """Work of the plan."""
    fingerprint: str = ""
    """Digest of the batch that the plan was made for."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    """Capabilities of the host that the plan was made for."""
    media: tuple[PlannedMedium, ...] = ()
    """Images and videos of the batch, with the microbatches that read them."""
    encodes_again: bool = False
    """Whether backwards of encoders recompute their activations."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Rollouts and ends of rollouts that do not run, because they have no gradient."""
    host_layers: int = 0
    """Number of attention layers with their prefix cache in host memory. Two of them at a time are
    on the device."""
    counts_first: bool = False
    """Whether the pass of scores counts experts, for a router loss whose statistics span
    microbatches."""
    last_tokens: bool = False
    """Whether last tokens of rollouts run, for router statistics over whole rollouts."""
    shape: ModelShape | None = None
    """Sizes of the model; None if the plan counts tokens only."""
    cost: float = 0.0
    """Predicted cost of the step, by which the planner compares plans."""
    cost_unit: CostUnit = "tokens"
    """Unit of `cost`."""
    predicted_ms: float | None = None
    """Predicted time of a step in milliseconds; None without a calibration."""
    predicted_peak_bytes: int | None = None
    """Predicted peak of activations, prefix cache and its gradients, without weights. None without
    a model shape."""
    memory_budget_bytes: int | None = None
    """Limit for `predicted_peak_bytes`; None means no limit. If no plan fits a measured budget
    (`Config.memory_budget`), the plan exceeds it."""
    host_memory_bytes: int | None = None
    """Limit of host memory for activations and prefix caches; None means no limit. Activations
    beyond it stay on the device."""
    rests_on: str = ""
    """Description of the calibration behind the predictions; empty without one."""
    candidates: tuple[Candidate, ...] = ()
    """Combinations that the planner compared."""
    reason: str = ""
    """Reason for the choice of this plan."""
    gather: Literal["", "microbatch", "step"] = ""
    """Time at which ranks gather sharded weights (`Config.gather`); "" if weights are not sharded,
    and before ranks have agreed."""
    gather_reason: str = ""
    split: Literal["", "replicate", "exchange"] = ""
    """Treatment of prompts of several ranks (`Config.split`); "" without such prompts, and before
    ranks have agreed."""
    split_reason: str = ""
    dealing: str = ""
    """Whether context-parallel ranks split leaves by heads or by responses, with the reason; ""
    without such ranks."""
    pipeline: StageSchedule | None = None
    """Orders and predictions of all stages of a pipeline; None without stages."""
    find_longest: Callable[[], LongestPrompt] | None = None
    """Search of `longest_prompt`."""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget; True without a budget."""
        budget, peak = self.memory_budget_bytes, self.predicted_peak_bytes
        return budget is None or peak is None or peak <= budget

    @cached_property
    def longest_prompt(self) -> LongestPrompt | None:
        """Longest prompt of one group for which a plan fits `memory_budget_bytes`.

        The group has responses as long as those in the group of the batch's longest rollout, and no
        images. Multiples of 1,024 tokens up to 2,097,152 are tried, at the first access. None
        without a limit, and for stages of a pipeline.
        """
        if self.find_longest is None or self.pipeline is not None:
            return None
        return self.find_longest()

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that go through the model on this rank."""
        return sum(m.tokens for m in self.microbatches if m.shared_prompt != "received")

    @property
    def bound(self) -> float:
        """Largest possible speed-up: FLOPs without sharing, divided by FLOPs of the plan.

        Without a model shape it is the ratio of tokens. Both sides leave out rollouts and tokens
        without gradient.
        """
        return bound_of(self.dense, self.shared, self.shape)

    @cached_property
    def run_lengths(self) -> IntArray:
        """Number of tokens that run of each rollout, from its first: int64 [N]."""
        ends = np.append(self.forest.start + self.forest.length, 0)
        return ends[self.forest.leaf]

    def captured(self, microbatch: Microbatch) -> list[int]:
        """Segments of a microbatch whose prefix cache other microbatches read."""
        return [segment for segment in microbatch.segments if segment in self.cache_of]

    def captured_tokens(self, microbatch: Microbatch) -> int:
        """Number of tokens of a microbatch whose prefix cache other microbatches read."""
        return int(self.forest.length[self.captured(microbatch)].sum())

    def ancestors_of(self, microbatch: Microbatch) -> set[int]:
        """Ancestors of the segments of a microbatch in other microbatches."""
        inside, found = set(microbatch.segments), set[int]()
        for segment in inside:
            above = self._parents[segment]
            while above >= 0 and above not in found:
                if above not in inside:
                    found.add(above)
                above = self._parents[above]
        return found

    def read_tokens(self, microbatch: Microbatch) -> int:
        """Number of tokens in other microbatches whose prefix cache a microbatch reads."""
        return int(self.forest.length[list(self.ancestors_of(microbatch))].sum())

    @cached_property
    def _parents(self) -> list[int]:
        return self.forest.parent.tolist()

    @property
    def sent_bytes(self) -> int:
        """Bytes that each context-parallel rank sends in a step, without weights.

        These are the all-to-alls of attention (`ModelShape.exchanged_bytes`), and prefix caches
        that are gathered for leaves by responses.
        """
        shape, nbytes = self.shape, 0
        if shape is None or shape.context == 1:
            return 0
        ends_early: set[int] = set()
        for instruction in self.program.instructions:
            if instruction.idle or instruction.exchanges:
                continue
            microbatch = self.microbatches[instruction.microbatch]
            backward = instruction.operation == BACKWARD
            if microbatch.gathered and instruction.operation != RECOMPUTE:
                nbytes += shape.gathered_bytes(self.captured_tokens(microbatch), backward=backward)
            if microbatch.parts:
                continue
            if instruction.ends_at == BOUNDARY and not backward:
                ends_early.add(instruction.slot)
            early = instruction.slot in ends_early
            sent = shape.exchanged_bytes(microbatch.tokens, ends_early=early)
            again = backward and (shape.checkpointed or microbatch.checkpointing == "full")
            nbytes += sent * (2 if again else 1)
        return nbytes

    def copied_bytes(self, instruction: Instruction) -> tuple[int, int]:
        """Bytes of prefix cache that an instruction copies to host memory, and bytes that it copies
        back.

        Sums of gradients count as copied back even if they are still zero.
        """
        if self.shape is None or not self.host_layers:
            return 0, 0
        share = self.host_layers / max(1, self.shape.attention_layers)
        state = share * self.shape.boundary_bytes_per_token
        total = share * self.shape.boundary_gradient_bytes_per_token
        read, own = self._cached_tokens[instruction.microbatch]
        if instruction.operation == BACKWARD:
            return int(read * total), int(read * (state + total) + own * total)
        captures = instruction.operation in (FORWARD, SCORE)
        return int(own * state * captures), int(read * state)

    @cached_property
    def _cached_tokens(self) -> list[tuple[int, int]]:
        """For each microbatch, the numbers of tokens that it reads from others and captures."""
        return [(self.read_tokens(m), self.captured_tokens(m)) for m in self.microbatches]

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of host memory for prefix caches and their gradients."""
        if self.shape is None:
            return 0
        return self.host_layers * layer_cache_bytes(self.cache_tokens, self.shape)

    @cached_property
    def microbatch_names(self) -> tuple[str, ...]:
        """Name and index of each microbatch: "prefix" if others read its prefix cache, "leaf" if
        not, "received" if another rank runs it."""
        return tuple(f"{_kind(microbatch)} {microbatch.index}" for microbatch in self.microbatches)

    @cached_property
    def score_program(self) -> Program:
        """The instructions that `policy.score` runs: a forward of every microbatch."""
        early = self.capabilities.leaves_early
        return score_program(self.microbatches, leaves_early=early)

    def event(self, instruction: Instruction) -> str:
        """An instruction in words, such as "forward prefix 0"."""
        if instruction.exchanges:
            return f"{instruction.operation} prompts"
        if instruction.operation in OF_MEDIA:
            if not instruction.media:
                return f"{instruction.operation} idle"
            kind = self.media[instruction.media[0]].kind + "s" * (len(instruction.media) > 1)
            return f"{instruction.operation} {kind} {', '.join(map(str, instruction.media))}"
        name = "idle" if instruction.idle else self.microbatch_names[instruction.microbatch]
        return f"{instruction.operation} {name}"

    def events(self, *, backward: bool = True) -> tuple[str, ...]:
        """Events of the step, in order and in words: "forward prefix 0", "forward leaf 1",
        "backward leaf 1", "backward prefix 0".

        "recompute prefix 0" computes activations a second time. "score leaf 1" is a forward without
        a graph. "encode images 0, 1" runs the encoder of two images, and "encode backward images 0,
        1" its backward. `backward=False` gives the events of `policy.score`.
        """
        program = self.program if backward else self.score_program
        scores = self.with_encoders(program.scores, training=False)
        training = self.with_encoders(program.training, training=True) if backward else ()
        return tuple(self.event(instruction) for instruction in (*scores, *training))

    def with_encoders(
        self,
        instructions: Sequence[Instruction],
        *,
        training: bool,
        common: CommonEncoders | None = None,
    ) -> tuple[Instruction, ...]:
        """The instructions of one pass over the plan's microbatches, with those of encoders.

        Args:
            instructions: the instructions of the pass.
            training: whether it is the pass of backwards.
            common: encoder runs that all ranks have in lockstep; None without lockstep.
        """
        encoder, trains = self.capabilities.encoder, self.capabilities.trains_encoder
        again, counts = self.encodes_again, ()
        if common is not None:
            # An idle rank has no activations to keep, so no rank keeps any.
            trains, again = common.trains, True
            counts = common.training if training else common.scores
        elif not self.media:
            return tuple(instructions)
        return with_encoders(
            instructions,
            self.media,
            training=training,
            trains=trains,
            again=again,
            # If activations do not fit, only those of one medium are held at a time.
            together=encoder is not None and encoder.together and not again,
            counts=counts,
        )

    @property
    def encoder_runs(self) -> tuple[int, int]:
        """Numbers of forwards and of backwards of encoders in a step, counted by media. A backward
        that recomputes its forward counts as both."""
        passes = (self.program.scores, False), (self.program.training, True)
        runs = [
            instruction.operation
            for instructions, training in passes
            for instruction in self.with_encoders(instructions, training=training)
            for _ in instruction.media
        ]
        backwards = runs.count(ENCODE_BACKWARD)
        return runs.count(ENCODE) + backwards * self.encodes_again, backwards

    def with_encoder(self, encoder: EncoderShape | None) -> Self:
        """The plan for a host with this encoder."""
        return replace(self, capabilities=replace(self.capabilities, encoder=encoder))

    def waits_for(self) -> tuple[tuple[int, ...], ...]:
        """For each unit of the program (`Program.units`), positions of units that must run before.

        Every order that respects them gives the same results: see `reordered`.
        """
        microbatch_of = {segment: m.index for m in self.microbatches for segment in m.segments}
        above = [
            {int(self.forest.parent[s]) for s in m.segments} - {-1, *m.segments}
            for m in self.microbatches
        ]
        parents = [frozenset(microbatch_of[s] for s in segments) for segments in above]
        return waits_for(self.program, self.microbatches, parents)

    def reordered(self, order: Sequence[int]) -> Self:
        """The plan with its program in another order, and cache slots for that order.

        Scores come first, in their previous order. The new plan has no predictions of time and
        memory.

        Args:
            order: positions of units (`Program.units`) in the new order.

        Raises:
            PlanError: a unit would run before one that it waits for.
        """
        check_order(self.waits_for(), order)
        chosen = [i for at in order for i in self.program.units[at]]
        found = self._in_order(Program((*self.program.scores, *chosen)))
        return replace(found, predicted_ms=None, predicted_peak_bytes=None)

    def check_batch(self, batch: RolloutBatch) -> None:
        """Raise PlanError if tokens, lengths, masks or temperatures differ from those planned."""
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
            needed: int64 [N], number of edges of each rollout that the call needs, from its first.

        Raises:
            PlanError: the plan runs less of some rollout.
        """
        lacking = np.flatnonzero(self.run_lengths < needed)
        if len(lacking):
            first = int(lacking[0])
            others = f" and more of {len(lacking) - 1} others" * (len(lacking) > 1)
            name = short(batch.rollout_ids[first])
            raise PlanError(
                f"this plan runs {self.run_lengths[first]} tokens of rollout {name}, and this call "
                f"needs {needed[first]}{others}: the plan leaves out tokens without gradient. "
                "Leave plan= out, or make a plan for this call: policy.plan(batch, loss)."
            )

    def check_host(self, capabilities: Capabilities, context: int) -> None:
        """Refuse a host that differs in what this plan uses: ending forwards inside the last block,
        running whole segments, training the encoder, and context-parallel ranks.

        Args:
            capabilities: capabilities of the host.
            context: number of context-parallel ranks, 1 without context parallelism.

        Raises:
            PlanError: the plan is not for this host.
        """
        trains = capabilities.trains_encoder
        if self.media and self.capabilities.trains_encoder != trains:
            states = {True: "has trained parameters", False: "is frozen"}
            raise PlanError(
                f"this plan was made for a model whose encoder {states[not trains]}, and the "
                f"model's {states[trains]} now. Make the plan again with policy.plan."
            )
        if any(m.parts for m in self.microbatches) and not capabilities.deals_segments:
            raise PlanError(
                "this plan splits leaves by responses over context-parallel ranks, and some layers "
                "of the model carry a state, which allows only a split by heads. Make the plan "
                "again with policy.plan."
            )
        if self.capabilities.leaves_early and not capabilities.leaves_early:
            raise PlanError(
                "this plan ends forwards inside the last block, which the model cannot do now, "
                "because it checkpoints its blocks itself (gradient_checkpointing). Make the plan "
                "again with policy.plan, in the state in which the model is trained."
            )
        dealt = {len(microbatch.parts) for microbatch in self.microbatches if microbatch.parts}
        if dealt - {context}:
            raise PlanError(
                f"this plan splits leaves by responses over {max(dealt)} context-parallel ranks, "
                f"and the model has {context}. Make a plan with policy.plan(batch)."
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
                "this plan has no pass of scores. The loss needs one, because it couples rollouts "
                "with trained tokens in several microbatches. Make the plan for this loss: "
                "policy.plan(batch, loss)."
            )

    def splits(self, batch: RolloutBatch, coupling: IntArray) -> bool:
        """Whether trained tokens of rollouts that a loss couples lie in several microbatches.

        coupling: int64 [N], which rollouts the loss couples (same entry).
        """
        forest, offsets = self.forest, batch.offsets
        rollouts, segments = paths(forest)
        begin = offsets[rollouts] + 1 + forest.start[segments]
        end = np.minimum(begin + forest.length[segments], offsets[rollouts + 1])
        before = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
        trained = before[end] > before[np.minimum(begin, end)]
        return span_microbatches(
            coupling[rollouts[trained]], segments[trained], forest, self.microbatches
        )

    def with_microbatches(self, microbatches: Iterable[Microbatch]) -> Self:
        """The plan with other microbatches, and their program in the order of one device."""
        plan = replace(self, microbatches=tuple(microbatches))
        return plan.with_program(scores=self.program.has_scores)

    def with_activations(self, microbatches: Iterable[Microbatch]) -> Self:
        """The plan with other storage of activations, and the program in the order of one device.

        Cache slots stay, because they depend only on the order of forwards and backwards.
        """
        plan = replace(self, microbatches=tuple(microbatches))
        return replace(plan, program=plan._program(scores=self.program.has_scores))

    def with_program(self, *, scores: bool) -> Self:
        """The plan with the program of its microbatches in the order of one device.

        scores: whether it begins with a pass of scores.
        """
        return self._in_order(self._program(scores=scores))

    def _program(self, *, scores: bool) -> Program:
        early = self.capabilities.leaves_early
        program = step_program(self.microbatches, scores=scores, leaves_early=early)
        if self.split == "exchange":
            program = exchanging(program, self.microbatches, scores=scores)
        return program

    def _in_order(self, program: Program) -> Self:
        slots, tokens, state_of, states = allocate_cache(self.forest, self.microbatches, program)
        return replace(
            self,
            program=program,
            cache_of=CacheSlots(slots),
            cache_tokens=tokens,
            state_of=state_of,
            cache_states=states,
        )

    def explain(self, *, width: int = 100) -> str:
        """Describe the plan as text: counts, the reason for the choice, and the compared plans.

        `width` is the width in characters.
        """
        output = io.StringIO()
        console = Console(file=output, width=width, color_system=None, highlight=False)
        for part in (_title, _summary, _candidates, _microbatches, _tree):
            console.print(part(self))
        if self.longest_prompt is not None:
            console.print(f"within the budget, {self.longest_prompt}")
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _kind(microbatch: Microbatch) -> str:
    if microbatch.shared_prompt == "received":
        return "received"
    return "prefix" if microbatch.children else "leaf"


# Batches are read-only, so the digest of each is computed once.
_fingerprints: WeakKeyDictionary[RolloutBatch, str] = WeakKeyDictionary()


def fingerprint(batch: RolloutBatch) -> str:
    """Digest of all values that determine which rollouts may share and which entries the head
    computes."""
    if batch not in _fingerprints:
        digest = hashlib.blake2b(digest_size=8)
        for name in ("token_ids", "offsets", "loss_mask", "group_index", "temperatures"):
            digest.update(np.ascontiguousarray(getattr(batch, name)).tobytes())
        if batch.share_index is not None:
            digest.update(b"share" + batch.share_index.tobytes())
        _fingerprints[batch] = digest.hexdigest()
    return _fingerprints[batch]


# A description as text
# ------------------------------------------------------------


def _title(plan: Plan) -> Text:
    """Text above the tables. As a title of a table it would be wrapped at the table's width."""
    title = Text(f"plan: {plan.sharing} + {plan.boundary}, {plan.reason}")
    if plan.split:
        how = "on each rank that has them" if plan.split == "replicate" else "on one rank, and sent"
        title.append(f"\nprompts of several ranks run {how}: {plan.split_reason}")
    if plan.gather:
        how = "once a step" if plan.gather == "step" else "for each microbatch, in lockstep"
        title.append(f"\nweights gathered {how}: {plan.gather_reason}")
    if plan.least_segment:
        title.append(f"\nforks fewer than {plan.least_segment} tokens below another are left out")
    if plan.dealing:
        title.append(f"\n{plan.dealing}")
    return title


def flops_text(flops: float) -> str:
    """A number of FLOPs as people read it: 14.3 TFLOP."""
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= unit:
            return f"{flops / unit:,.1f} {name}"
    return f"{flops / 1e6:,.1f} MFLOP"


def _summary(plan: Plan) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    add = table.add_row
    add("rollouts", f"{plan.rollouts:,}")
    add("tokens of the rollouts", f"{plan.logical_tokens:,}")
    add("tokens, each shared one counted once", f"{plan.unique_tokens:,}")
    away = plan.left_out
    if away.tokens:
        found = f"{away.rollouts:,} ({away.groups:,})"
        add("rollouts (whole groups) without gradient, not run", found)
        add("tokens of these rollouts, not run", f"{away.rollout_tokens:,}")
        add("tokens after the last trained one of a rollout, not run", f"{away.tail_tokens:,}")
    if plan.last_tokens:
        ends = int(np.unique(plan.forest.leaf[plan.forest.leaf >= 0]).size)
        add("last tokens among them, for routers", f"{ends:,}")
    add("tokens that run", f"{plan.computed_tokens:,}")
    add("outputs of the head", f"{plan.num_loss_entries:,}")
    if plan.media:
        places = sum(medium.rollouts for medium in plan.media)
        runs = ", ".join(f"{count:,}" for count in (places, *plan.encoder_runs))
        add("images and videos of rollouts, encoder forwards, backwards", runs)
    add("microbatches, segments", f"{len(plan.microbatches):,}, {len(plan.forest):,}")
    add("largest prefix cache, tokens", f"{plan.cache_tokens:,}")
    if plan.shape is not None and plan.host_layers:
        of = f"{plan.host_layers:,} of {plan.shape.attention_layers:,}"
        add("layers with their prefix cache in host memory", of)
        add("host memory for prefix caches", format_bytes(plan.host_cache_bytes))
        moved = [plan.copied_bytes(i) for i in plan.program.instructions if i.microbatch >= 0]
        ways = (format_bytes(sum(way)) for way in zip(*moved, strict=True))
        add("bytes copied to the host and back in a step", ", ".join(ways))
    if plan.shape is not None and plan.shape.context > 1:
        add("ranks that run parts of each microbatch", f"{plan.shape.context:,}")
        whole = any(microbatch.gathered for microbatch in plan.microbatches)
        also = ", and for gathered prefix caches" * whole
        add(f"bytes that each sends for attention{also}", format_bytes(plan.sent_bytes))
    if plan.shape is not None:
        dense, shared = plan.dense.step_flops(plan.shape), plan.shared.step_flops(plan.shape)
        same = ", without the tokens left out" * bool(away.tokens)
        add(f"FLOPs without sharing{same}", flops_text(dense))
        add("FLOPs of this step", flops_text(shared))
        again = shared + plan.shared.forward_flops(plan.shape)
        if not away.rollouts:  # the pass of scores computes log-probs of these too
            add("FLOPs including policy.logprobs", flops_text(again))
        if plan.counts_first:
            add("FLOPs with the pass that counts experts", flops_text(again))
            add("bound with that pass", f"{dense / again:.2f}x")
    elif plan.counts_first:
        add("a pass of scores counts experts first", "yes")
    if plan.predicted_peak_bytes is not None:
        add("peak of activations and prefix cache", format_bytes(plan.predicted_peak_bytes))
    if plan.pipeline is not None:
        add("stages of the pipeline", f"{len(plan.pipeline.orders):,}")
        add("idle part of the stages' time", f"{plan.pipeline.bubble:.1%}")
        peaks = ", ".join(format_bytes(round(peak)) for peak in plan.pipeline.peak_bytes)
        add("predicted peaks of the stages", peaks)
    if plan.memory_budget_bytes is not None:
        name = "memory budget" if plan.fits else "memory budget, DOES NOT FIT"
        add(name, format_bytes(plan.memory_budget_bytes))
    if plan.predicted_ms is not None:
        add("predicted time of a step, ms", f"{plan.predicted_ms:,.1f}")
    if plan.shape is not None:
        add("source of predictions", plan.rests_on or "counted FLOPs and bytes")
    unit = "FLOPs" if plan.shape is not None else "tokens"
    add(f"bound of this plan ({unit})", f"{plan.bound:.2f}x")
    return table


def _candidates(plan: Plan) -> Table:
    """Table of the compared plans, sorted by predicted speed-up, or by cost if there is no dense
    plan."""
    costs = {(c.sharing, c.boundary): c.cost for c in plan.candidates}
    chosen = plan.sharing, plan.boundary
    dense = min((c for (sharing, _), c in costs.items() if sharing == "none" and c), default=None)
    figure = "cost relative to the plan" if dense is None else "predicted speed-up"
    table = Table(title="plans compared")
    for name in ("sharing", "boundary", figure, "remark"):
        table.add_column(name, justify="right" if name == figure else "left")
    for candidate in plan.candidates:
        combination, cost = (candidate.sharing, candidate.boundary), candidate.cost
        value = "-"
        if cost and dense is not None:
            value = f"{dense / cost:.3f}x"
        elif cost and (of := costs.get(chosen)):
            value = f"{cost / of:.3f}"
        remark = "chosen" if combination == chosen else candidate.refused or ""
        table.add_row(*combination, value, remark)
    return table


def _microbatches(plan: Plan) -> Table:
    title = "microbatches, parents before children"
    if policies := {m.checkpointing for m in plan.microbatches} - {"none"}:
        title += f", checkpointing: {', '.join(policies)}"
    if keeping := sum(m.keeps_logits for m in plan.microbatches):
        title += f", logits kept in {keeping:,}"
    table = Table(title=title)
    moved = any(m.activations != "keep" for m in plan.microbatches)
    text = ("microbatch", "reads", "activations")
    names = ["microbatch", "reads", "segments", "tokens", "prefix cache"]
    for name in (*names, *(["activations"] if moved else [])):
        table.add_column(name, justify="left" if name in text else "right")
    for microbatch in plan.microbatches[:MOST_ROWS]:
        table.add_row(
            plan.microbatch_names[microbatch.index],
            plan.microbatch_names[microbatch.parent] if microbatch.parent >= 0 else "-",
            f"{len(microbatch.segments):,}",
            f"{microbatch.tokens:,}",
            f"{plan.captured_tokens(microbatch):,}",
            *([microbatch.activations if microbatch.children else "-"] if moved else []),
        )
    if len(plan.microbatches) > MOST_ROWS:
        table.caption = f"and {len(plan.microbatches) - MOST_ROWS:,} more microbatches"
    return table


def _tree(plan: Plan) -> Tree | Text:
    forest = plan.forest
    if len(forest) == 0:
        why = "no rollout gives a gradient" if plan.left_out.rollouts else "rollouts are one token"
        return Text(f"no edges: {why}")
    microbatch_of = {s: m.index for m in plan.microbatches for s in m.segments}
    top = Tree("segments: tokens x rollouts, and their microbatch")
    nodes, depth, multiplicity = {-1: top}, {-1: -1}, forest.multiplicity
    for segment, parent in enumerate(forest.parent.tolist()[:MOST_SEGMENTS]):
        depth[segment] = depth[parent] + 1
        if depth[segment] < MOST_LEVELS:
            name = plan.microbatch_names[microbatch_of[segment]]
            label = f"{int(forest.length[segment]):,} x {int(multiplicity[segment])}  {name}"
            nodes[segment] = nodes[parent].add(label)
    if hidden := len(forest) - (len(nodes) - 1):
        top.add(f"and {hidden:,} more segments")
    return top
