"""A plan: microbatches, what each reads from outside itself, and the order of instructions."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from forkpoint.errors import PlanError
from forkpoint.plan.cache import allocate_cache
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.context import context_bytes
from forkpoint.plan.host_cache import CacheCopies, layer_cache_bytes, outer_ancestors
from forkpoint.plan.media import CommonEncoders, PlannedMedium, with_encoders
from forkpoint.plan.pipeline import StageSchedule
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import (
    ENCODE,
    ENCODE_BACKWARD,
    IDLE,
    OF_MEDIA,
    Instruction,
    Program,
    check_order,
    mark_last_backward,
    score_program,
    step_program,
    waits_for,
)
from forkpoint.plan.routing import paths, span_microbatches
from forkpoint.plan.runs import LeftOut
from forkpoint.plan.shared_prompts import exchanging
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray
from forkpoint.units import format_bytes

MOST_ROWS = 24
MOST_SEGMENTS = 40
MOST_LEVELS = 12
"""The most that a description shows."""


@dataclass(frozen=True)
class Candidate:
    """One combination that the planner looked at."""

    sharing: str
    boundary: str
    cost: float | None
    """Predicted cost of the step, in the plan's cost_unit."""
    refused: str | None = None
    """Why there is no such plan, or why it was not chosen although it is predicted cheaper."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The complete program of a step on one batch.

    Made by `forkpoint.plan.make_plan`; needs no torch.
    """

    sharing: str
    boundary: str
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
    num_loss_entries: int
    """Entries of the head: edges whose label some rollout trains on, each as often as there are
    temperatures at which it is trained. A critic's edges have one each."""
    dense: Work
    """Work of nobody sharing. It leaves out the same as the plan."""
    shared: Work
    fingerprint: str
    capabilities: Capabilities = field(default_factory=Capabilities)
    """Capabilities of the host that the plan was made for."""
    media: tuple[PlannedMedium, ...] = ()
    """Images and videos of the batch, with the microbatches that read them."""
    encodes_again: bool = False
    """Whether an encoder's backward runs it once more, so that its activations are not kept."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Rollouts and tails that are not run, because they give no gradient."""
    host_layers: int = 0
    """How many layers that attend have their prefix cache in the host's memory, spread evenly; two
    of them at a time are on the device."""
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
    dealing: str = ""
    """How ranks of context parallelism run leaves, by heads or each some of them whole, and why
    (`plan.dealing`); "" without such ranks."""
    pipeline: StageSchedule | None = None
    """On stages of a pipeline: the orders of all stages, and what is predicted of them."""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget, if there is one."""
        budget, peak = self.memory_budget_bytes, self.predicted_peak_bytes
        return budget is None or peak is None or peak <= budget

    @property
    def computed_tokens(self) -> int:
        """Edges run on this rank: tokens that go through the model."""
        return sum(m.tokens for m in self.microbatches if m.shared_prompt != "received")

    @property
    def bound(self) -> float:
        """The counted speed-up over dense: FLOPs where the shape is known, else tokens.

        Both leave out what gives no gradient, so that this counts sharing alone.
        """
        return bound_of(self.dense, self.shared, self.shape)

    @cached_property
    def run_lengths(self) -> IntArray:
        """How many edges of each rollout run, from its first: int64 [N]."""
        ends = np.append(self.forest.start + self.forest.length, 0)
        return ends[self.forest.leaf]

    @cached_property
    def cache_of(self) -> dict[int, int]:
        """First cache slot of every segment whose prefix cache other microbatches read."""
        return {
            segment: begin
            for microbatch in self.microbatches
            for segment, begin in zip(microbatch.segments, microbatch.cache_begin, strict=True)
            if begin >= 0
        }

    @cached_property
    def state_of(self) -> dict[int, int]:
        """State slot of every segment that a segment of another microbatch starts from."""
        return {
            segment: place
            for microbatch in self.microbatches
            for segment, place in zip(microbatch.segments, microbatch.state_index, strict=True)
            if place >= 0
        }

    def ancestors_of(self, microbatch: Microbatch) -> set[int]:
        """Segments above those of a microbatch that lie in other microbatches."""
        return outer_ancestors(self._parents, microbatch.segments)

    @cached_property
    def _parents(self) -> list[int]:
        return self.forest.parent.tolist()

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank of context parallelism sends in a step, without those of weights."""
        if self.shape is None or self.shape.context == 1:
            return 0
        return context_bytes(self.shape, self.microbatches, self.program)

    @property
    def cache_copies(self) -> CacheCopies | None:
        """Copies of prefix caches to the host's memory and back; None where there are none."""
        if self.shape is None or not self.host_layers:
            return None
        return CacheCopies(self.shape, self.host_layers, self.forest, self.microbatches)

    @property
    def host_cache_bytes(self) -> int:
        """Memory of the host that prefix caches and their gradients take."""
        if self.shape is None:
            return 0
        return self.host_layers * layer_cache_bytes(self.cache_tokens, self.shape)

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
            return f"{instruction.operation} prompts"
        if instruction.operation in OF_MEDIA:
            if instruction.medium == IDLE:
                return f"{instruction.operation} idle"
            kind = self.media[instruction.medium].kind
            return f"{instruction.operation} {kind} {instruction.medium}"
        name = "idle" if instruction.idle else self.microbatch_names[instruction.microbatch]
        return f"{instruction.operation} {name}"

    def events(self, *, backward: bool = True) -> tuple[str, ...]:
        """Events of the step, in order and in words: "forward prefix 0", "forward leaf 1",
        "backward leaf 1", "backward prefix 0".

        "recompute prefix 0" is the forward that computes activations again which were not kept.
        "score leaf 1" is a forward without a graph. "encode image 0" runs the encoder of an image,
        "encode backward image 0" its backward. Without `backward`: the events of `policy.score`.
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

        `training`: whether it is the pass of backwards. `common`: where ranks run in lockstep.
        """
        if common is not None:
            # A rank that idles has no activations of another's; so no rank keeps any.
            return with_encoders(
                instructions,
                self.media,
                training=training,
                trains=common.trains,
                again=True,
                counts=common.training if training else common.scores,
            )
        if not self.media:
            return tuple(instructions)
        trains, again = self.capabilities.trains_encoder, self.encodes_again
        return with_encoders(
            instructions, self.media, training=training, trains=trains, again=again
        )

    @property
    def encoder_runs(self) -> tuple[int, int]:
        """How many forwards and backwards of encoders a step has; a backward that runs its forward
        again counts as both."""
        passes = (self.program.scores, False), (self.program.training, True)
        runs = [
            instruction.operation
            for instructions, training in passes
            for instruction in self.with_encoders(instructions, training=training)
        ]
        backwards = runs.count(ENCODE_BACKWARD)
        return runs.count(ENCODE) + backwards * self.encodes_again, backwards

    def with_encoder(self, encoder: EncoderShape | None) -> Self:
        """The plan for a host with this encoder."""
        return replace(self, capabilities=replace(self.capabilities, encoder=encoder))

    def waits_for(self) -> tuple[tuple[int, ...], ...]:
        """For each unit of the program (`Program.units`), the positions of those that it waits for.

        An order that keeps to them computes the same: see `reordered`.
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

        Scores come first, in the order that they had. The plan has no predictions of time and
        memory: these were those of the present order.

        Args:
            order: positions of units (`Program.units`), in the order in which they are to run.

        Raises:
            PlanError: a unit would run before one that it waits for.
        """
        check_order(self.waits_for(), order)
        chosen = [i for at in order for i in self.program.units[at]]
        found = self._in_order(mark_last_backward((*self.program.scores, *chosen)))
        return replace(found, predicted_ms=None, predicted_peak_bytes=None)

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
        """Refuse a host that cannot leave the last block early or run whole segments, where this
        plan does, and one whose encoder is trained, where this plan has it frozen, or the other way
        around.

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
                "this plan deals leaves out to ranks of context parallelism, and some of the "
                "model's layers carry a state, which run by heads alone. Make the plan again with "
                "policy.plan."
            )
        if self.capabilities.leaves_early and not capabilities.leaves_early:
            raise PlanError(
                "this plan leaves the last block of the model early, and the model cannot be left "
                "early now: it checkpoints itself (gradient_checkpointing). Make the plan again "
                "with policy.plan, in the state in which the model is trained."
            )

    def check_ranks(self, context: int) -> None:
        """Refuse to deal segments out to other ranks than the plan was made for.

        Args:
            context: ranks of context parallelism, 1 without any.

        Raises:
            PlanError: there are more or fewer.
        """
        dealt = {len(microbatch.parts) for microbatch in self.microbatches if microbatch.parts}
        if dealt - {context}:
            raise PlanError(
                f"this plan deals leaves out to {max(dealt)} ranks of context parallelism, and the "
                f"model has {context}. Make a plan with this policy's plan(batch)."
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
        microbatches, tokens, states = allocate_cache(self.forest, self.microbatches, program)
        return replace(
            self,
            program=program,
            microbatches=microbatches,
            cache_tokens=tokens,
            cache_states=states,
        )

    def explain(self, *, width: int = 100) -> str:
        """A description as text: what runs, what is saved, why it was chosen, what was refused."""
        return _explained(self, width)


def _kind(microbatch: Microbatch) -> str:
    if microbatch.shared_prompt == "received":
        return "received"
    return "prefix" if microbatch.children else "leaf"


# Batches cannot be written to, so each is read once.
_fingerprints: WeakKeyDictionary[RolloutBatch, str] = WeakKeyDictionary()


def fingerprint(batch: RolloutBatch) -> str:
    """A digest of everything that decides which rollouts may share and which entries the head
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


def _explained(plan: Plan, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    # No title of the table, which would be broken where the table ends.
    title = Text(f"plan: {plan.sharing} + {plan.boundary}, {plan.reason}")
    if plan.split:
        how = "on each rank that has them" if plan.split == "replicate" else "on one rank, and sent"
        title.append(f"\nprompts of several ranks run {how}: {plan.split_reason}")
    if plan.gather:
        how = "once a step" if plan.gather == "step" else "for each microbatch, in lockstep"
        title.append(f"\nweights gathered {how}: {plan.gather_reason}")
    if plan.dealing:
        title.append(f"\n{plan.dealing}")
    console.print(Group(title, _summary(plan), _candidates(plan), _microbatches(plan), _tree(plan)))
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


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
    add("logical tokens (as given)", f"{plan.logical_tokens:,}")
    add("unique tokens (once in the whole batch)", f"{plan.unique_tokens:,}")
    away = plan.left_out
    if away.tokens:
        found = f"{away.rollouts:,} ({away.groups:,})"
        add("rollouts (whole groups) without gradient, not run", found)
        add("their tokens, not run", f"{away.rollout_tokens:,}")
        add("tokens after rollouts' last trained ones, not run", f"{away.tail_tokens:,}")
    if plan.last_tokens:
        ends = int(np.unique(plan.forest.leaf[plan.forest.leaf >= 0]).size)
        add("last tokens run for routers, among those computed", f"{ends:,}")
    add("computed tokens (edges run)", f"{plan.computed_tokens:,}")
    add("labelled edges (head), for each temperature", f"{plan.num_loss_entries:,}")
    if plan.media:
        places = sum(medium.rollouts for medium in plan.media)
        runs = ", ".join(f"{count:,}" for count in (places, *plan.encoder_runs))
        add("images and videos of rollouts, encoder forwards, backwards", runs)
    add("microbatches, segments", f"{len(plan.microbatches):,}, {len(plan.forest):,}")
    add("prefix cache held at once, tokens", f"{plan.cache_tokens:,}")
    if plan.shape is not None and (copies := plan.cache_copies) is not None:
        of = f"{plan.host_layers:,} of {plan.shape.attention_layers:,}"
        add("layers whose prefix cache is in the host's memory", of)
        add("memory of the host that it takes", format_bytes(plan.host_cache_bytes))
        moved = [copies.of(i) for i in plan.program.instructions if i.microbatch >= 0]
        ways = (format_bytes(sum(way)) for way in zip(*moved, strict=True))
        add("copied there and back in a step", ", ".join(ways))
    if plan.shape is not None and plan.shape.context > 1:
        add("ranks that run parts of each microbatch", f"{plan.shape.context:,}")
        whole = any(microbatch.gathered for microbatch in plan.microbatches)
        also = ", and of gathered prefix cache" * whole
        add(f"bytes that each sends around attention{also}", format_bytes(plan.sent_bytes))
    if plan.shape is not None:
        dense, shared = plan.dense.step_flops(plan.shape), plan.shared.step_flops(plan.shape)
        same = ", which leaves out the same" * bool(away.tokens)
        add(f"FLOPs of a dense step{same}", flops_text(dense))
        add("FLOPs of this step", flops_text(shared))
        again = shared + plan.shared.forward_flops(plan.shape)
        if not away.rollouts:  # a pass of scores gives log-probs of these too
            add("FLOPs with policy.logprobs besides", flops_text(again))
        if plan.counts_first:
            add("FLOPs with the pass that counts experts", flops_text(again))
            add("bound with that pass", f"{dense / again:.2f}x")
    elif plan.counts_first:
        add("a pass of scores counts experts first", "yes")
    if plan.predicted_peak_bytes is not None:
        add("activations and prefix cache at the peak", format_bytes(plan.predicted_peak_bytes))
    if plan.pipeline is not None:
        add("stages of the pipeline", f"{len(plan.pipeline.orders):,}")
        add("part of their time in which they run nothing", f"{plan.pipeline.bubble:.1%}")
        peaks = ", ".join(format_bytes(round(peak)) for peak in plan.pipeline.peak_bytes)
        add("predicted peaks of the stages", peaks)
    if plan.memory_budget_bytes is not None:
        name = "budget for them" if plan.fits else "budget for them, which DOES NOT FIT"
        add(name, format_bytes(plan.memory_budget_bytes))
    if plan.predicted_ms is not None:
        add("predicted time of a step, ms", f"{plan.predicted_ms:,.1f}")
    if plan.shape is not None:
        add("predictions rest on", plan.rests_on or "counted FLOPs and bytes")
    unit = "FLOPs" if plan.shape is not None else "tokens"
    add(f"dense over this plan ({unit})", f"{plan.bound:.2f}x")
    return table


def _candidates(plan: Plan) -> Table:
    """Plans that were looked at, by predicted speed-up; without a dense one, by cost."""
    costs = {(c.sharing, c.boundary): c.cost for c in plan.candidates}
    chosen = plan.sharing, plan.boundary
    dense = min((c for (sharing, _), c in costs.items() if sharing == "none" and c), default=None)
    figure = "cost against the plan" if dense is None else "predicted speed-up"
    table = Table(title="looked at")
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
    title = "microbatches in visiting order"
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
        kept = plan.forest.length[[s for s in microbatch.segments if s in plan.cache_of]]
        table.add_row(
            plan.microbatch_names[microbatch.index],
            plan.microbatch_names[microbatch.parent] if microbatch.parent >= 0 else "-",
            f"{len(microbatch.segments):,}",
            f"{microbatch.tokens:,}",
            f"{kept.sum():,}",
            *([microbatch.activations if microbatch.children else "-"] if moved else []),
        )
    if len(plan.microbatches) > MOST_ROWS:
        table.caption = f"and {len(plan.microbatches) - MOST_ROWS:,} microbatches more"
    return table


def _tree(plan: Plan) -> Tree | Text:
    forest = plan.forest
    if len(forest) == 0:
        why = "no rollout gives a gradient" if plan.left_out.rollouts else "rollouts are one token"
        return Text(f"no edges: {why}")
    microbatch_of = {s: m.index for m in plan.microbatches for s in m.segments}
    top = Tree("segments: tokens x rollouts through them, and their microbatch")
    nodes: dict[int, Tree] = {-1: top}
    depth, multiplicity = forest.depth, forest.multiplicity
    for segment, parent in enumerate(forest.parent.tolist()[:MOST_SEGMENTS]):
        if depth[segment] < MOST_LEVELS:
            name = plan.microbatch_names[microbatch_of[segment]]
            label = f"{int(forest.length[segment]):,} x {int(multiplicity[segment])}  {name}"
            nodes[segment] = nodes[parent].add(label)
    if hidden := len(forest) - (len(nodes) - 1):
        top.add(f"and {hidden:,} segments more")
    return top
