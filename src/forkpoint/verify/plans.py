"""The plans that `verify` compares: one that shares within microbatches, one across them.

A plan is of one kind or the other by what it does and not by what it is called: by segments of
several rollouts, and by whether other microbatches read them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from forkpoint.config import Boundary, Config, Sharing
from forkpoint.errors import PlanError
from forkpoint.losses.base import Loss
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.zeros import zero_rollouts
from forkpoint.plan import Plan, make_plan
from forkpoint.rollouts.batch import RolloutBatch

WITHIN, ACROSS, CHOSEN = "within", "across", "chosen"
Kind = Literal["within", "across", "chosen"]


class Planning(Protocol):
    """A policy that plans: see `forkpoint.Policy`."""

    @property
    def config(self) -> Config: ...
    def plan(
        self, batch: RolloutBatch, loss: Loss | None = None, *, router: RouterLoss | None = None
    ) -> Plan: ...
    def with_config(self, **changes: object) -> "Planning": ...


@dataclass(frozen=True)
class SharedCounts:
    """Counts of what a plan shares.

    Attributes:
        logical_tokens: tokens as given.
        left_out_tokens: tokens not run because they give no gradient.
        computed_tokens: tokens run, shared ones once.
        saved_tokens: tokens that training without sharing runs besides; it leaves out the same.
        segments: segments of the plan's forest.
        shared_segments: segments of several rollouts.
        read_across: shared segments that segments of other microbatches continue, by their prefix
            cache.
        microbatches: microbatches of the plan.
        with_children: microbatches whose prefix cache other microbatches read.
        cache_tokens: the most tokens whose prefix cache exists at once.
    """

    logical_tokens: int
    left_out_tokens: int
    computed_tokens: int
    saved_tokens: int
    segments: int
    shared_segments: int
    read_across: int
    microbatches: int
    with_children: int
    cache_tokens: int

    @property
    def shares(self) -> bool:
        return self.saved_tokens > 0 and self.shared_segments > 0

    @property
    def crosses(self) -> bool:
        """Whether what is shared is read from another microbatch."""
        return self.shares and self.read_across > 0

    def text(self) -> str:
        """Such as "60 of 184 tokens run, 9 of 21 segments shared, 3 of 7 microbatches with
        children"."""
        text = (
            f"{self.computed_tokens:,} of {self.logical_tokens:,} tokens run, "
            + f"{self.left_out_tokens:,} left out, " * bool(self.left_out_tokens)
            + f"{self.shared_segments:,} of {self.segments:,} segments shared, "
            f"{self.with_children:,} of {self.microbatches:,} microbatches with children"
        )
        return text + (f", prefix cache of {self.cache_tokens:,} tokens" * bool(self.with_children))


def count_shared(plan: Plan) -> SharedCounts:
    """Count what a plan shares: from its forest and microbatches, whatever it is called."""
    forest = plan.forest
    shared_S = forest.multiplicity > 1
    microbatch_S = np.full(len(forest), -1, np.int64)
    for microbatch in plan.microbatches:
        microbatch_S[list(microbatch.segments)] = microbatch.index
    below = np.flatnonzero(forest.parent >= 0)
    above = forest.parent[below]
    read = above[(microbatch_S[below] != microbatch_S[above]) & shared_S[above]]
    return SharedCounts(
        logical_tokens=plan.logical_tokens,
        left_out_tokens=plan.left_out.tokens,
        computed_tokens=plan.computed_tokens,
        saved_tokens=plan.dense.tokens - plan.computed_tokens,
        segments=len(forest),
        shared_segments=int(shared_S.sum()),
        read_across=len(np.unique(read)),
        microbatches=len(plan.microbatches),
        with_children=sum(bool(microbatch.children) for microbatch in plan.microbatches),
        cache_tokens=plan.cache_tokens,
    )


@dataclass(frozen=True)
class Compared:
    """A plan to compare.

    Attributes:
        kind: within: it shares, and no microbatch reads another. across: microbatches read what
            others have shared. chosen: the planner's own, where it is neither.
        plan: the plan.
        counts: what it shares.
    """

    kind: Kind
    plan: Plan
    counts: SharedCounts


@dataclass(frozen=True)
class LeftOut:
    """A kind of plan that is not compared.

    Attributes:
        kind: the kind, as in PlanFindings.
        reason: why it is not compared.
        asked: whether options leave it out; else no such plan could be made.
    """

    kind: Kind
    reason: str
    asked: bool

    def text(self) -> str:
        """As a line of a report has it."""
        return f"a plan that shares {self.kind} microbatches, because {self.reason}"


@dataclass(frozen=True)
class Choice:
    """The plans to compare, and those left out.

    Attributes:
        compared: plans to compare, in the order in which they run.
        left_out: kinds that are not compared.
        reason: why there is nothing to verify; then nothing is compared.
    """

    compared: tuple[Compared, ...]
    left_out: tuple[LeftOut, ...]
    reason: str | None

    @property
    def unfit(self) -> bool:
        """Whether a plan that options allow could not be made."""
        return any(not entry.asked for entry in self.left_out)

    @property
    def peak_bytes(self) -> int:
        """The largest predicted peak; 0 where none is predicted."""
        return max((c.plan.predicted_peak_bytes or 0 for c in self.compared), default=0)


def choose_plans(
    policy: Planning, batch: RolloutBatch, loss: Loss, router: RouterLoss | None = None
) -> Choice:
    """Plans of both kinds within the policy's options, and the planner's own if it is neither.

    router: the loss of routers that they are for as well.

    Raises PlanError where the planner's own does not fit.
    """
    config = policy.config
    nothing = nothing_shared(config, batch)
    if nothing is not None and not zero_rollouts(loss, batch).any():
        return Choice((), (), nothing)
    chosen = policy.plan(batch, loss, router=router)
    counts = count_shared(chosen)
    # What the loss declares to be zero is compared as well, also where nothing is shared.
    declared = chosen.dense.num_loss_entries < batch.trained_tokens
    if nothing is not None:
        compared = (Compared(CHOSEN, chosen, counts),) if declared else ()
        return Choice(compared, (), None if declared else nothing)
    found: list[Compared] = []
    left_out: list[LeftOut] = []
    kinds: tuple[tuple[Kind, _Make], ...] = ((WITHIN, _within), (ACROSS, _across))
    for kind, make in kinds:
        if counts.shares and counts.crosses == (kind == ACROSS) and _is_kind(counts, kind):
            found.append(Compared(kind, chosen, counts))
            continue
        made = make(policy, batch, loss, router)
        if isinstance(made, LeftOut):
            left_out.append(made)
        else:
            found.append(Compared(kind, made, count_shared(made)))
    if not found and not declared:
        reasons = "; ".join(f"{entry.kind} microbatches: {entry.reason}" for entry in left_out)
        return Choice((), tuple(left_out), f"no plan shares what could be shared ({reasons})")
    if all(entry.plan is not chosen for entry in found):
        found.append(Compared(CHOSEN, chosen, counts))
    return Choice(tuple(found), tuple(left_out), None)


def nothing_shared(config: Config, batch: RolloutBatch) -> str | None:
    """Why nothing of a batch can be shared, and a remedy; None where something can."""
    if config.sharing == "none":
        return (
            "sharing is 'none', which is ordinary training. Leave sharing to the planner "
            "(sharing='auto'), or ask for 'group' or 'tree'"
        )
    probe = make_plan(batch, config=Config(sharing=_sharing(config), boundary="across"))
    if count_shared(probe).shares:
        return None
    among = "one group" if config.sharing == "group" else "the batch"
    rollouts = f"{len(batch):,} rollout{'s' * (len(batch) != 1)} in {len(batch.groups()):,}"
    return (
        f"no two rollouts of {among} begin with the same two tokens "
        f"({rollouts} group{'s' * (len(batch.groups()) != 1)}). Give several rollouts of one "
        "prompt, such as a whole group or more groups"
    )


_Make = Callable[[Planning, RolloutBatch, Loss, RouterLoss | None], Plan | LeftOut]


def _is_kind(counts: SharedCounts, kind: Kind) -> bool:
    return counts.crosses if kind == ACROSS else counts.with_children == 0


def _sharing(config: Config) -> Sharing:
    """The most that may be shared."""
    return "tree" if config.sharing == "auto" else config.sharing


def _within(
    policy: Planning, batch: RolloutBatch, loss: Loss, router: RouterLoss | None
) -> Plan | LeftOut:
    """Plan with whole trees, or as much of them as a microbatch holds."""
    config = policy.config
    if config.boundary not in ("auto", "within"):
        return LeftOut(WITHIN, f"boundary is {config.boundary!r}", asked=True)
    if config.max_leaf_tokens is not None:
        return LeftOut(WITHIN, f"max_leaf_tokens is {config.max_leaf_tokens}", asked=True)
    limit = config.max_microbatch_tokens
    while True:
        asked = policy.with_config(
            sharing=_sharing(config), boundary=WITHIN, max_microbatch_tokens=limit
        )
        try:
            plan = asked.plan(batch, loss, router=router)
        except PlanError as error:
            return LeftOut(WITHIN, str(error), asked=config.max_microbatch_tokens is not None)
        counts = count_shared(plan)
        if counts.shares and _is_kind(counts, WITHIN):
            return plan
        # Microbatches may be too short to hold two rollouts.
        given = config.max_microbatch_tokens
        if given is not None or plan.max_microbatch_tokens >= plan.dense.tokens:
            return LeftOut(
                WITHIN,
                f"microbatches of {plan.max_microbatch_tokens:,} tokens share nothing within",
                asked=given is not None,
            )
        limit = 2 * plan.max_microbatch_tokens


def _across(
    policy: Planning, batch: RolloutBatch, loss: Loss, router: RouterLoss | None
) -> Plan | LeftOut:
    """Plan in which prefix cache of what is shared is written and read.

    Where one microbatch would hold everything, microbatches are made shorter until it is.
    """
    config = policy.config
    if config.boundary == "within":
        return LeftOut(ACROSS, "boundary is 'within'", asked=True)
    boundary: Boundary = "across" if config.boundary == "auto" else config.boundary
    sharing = _sharing(config)
    limit = config.max_microbatch_tokens
    while limit is None or limit >= 1:
        asked = policy.with_config(sharing=sharing, boundary=boundary, max_microbatch_tokens=limit)
        try:
            plan = asked.plan(batch, loss, router=router)
        except PlanError as error:
            return LeftOut(ACROSS, str(error), asked=False)
        if count_shared(plan).crosses:
            return plan
        limit = min(plan.max_microbatch_tokens, plan.computed_tokens) // 2
    reason = "what is shared is too short to lie in two microbatches"
    return LeftOut(ACROSS, reason, asked=False)
