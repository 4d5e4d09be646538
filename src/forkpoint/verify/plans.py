"""The plans that `verify` compares: one that shares within microbatches, one across them.

The kind of a plan follows from its segments, not from its options: whether segments belong to
several rollouts, and whether other microbatches read them.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forkpoint.config import Boundary, Config, Sharing
from forkpoint.errors import PlanError
from forkpoint.losses.base import Loss
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.zeros import zero_rollouts
from forkpoint.plan import Plan, make_plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.request import StepPolicy

WITHIN, ACROSS, CHOSEN = "within", "across", "chosen"
Kind = Literal["within", "across", "chosen"]


@dataclass(frozen=True)
class SharedCounts:
    """Counts of what a plan shares.

    Attributes:
        logical_tokens: tokens as given.
        left_out_tokens: tokens not run because they give no gradient.
        computed_tokens: tokens run, shared ones once.
        saved_tokens: additional tokens that training without sharing would run.
        segments: segments of the plan's forest.
        shared_segments: segments of several rollouts.
        read_across: shared segments that segments of other microbatches continue, by their prefix
            cache.
        microbatches: microbatches of the plan.
        with_children: microbatches whose prefix cache other microbatches read.
        cache_tokens: the most tokens whose prefix cache exists at once.
    """

    logical_tokens: int = 0
    left_out_tokens: int = 0
    computed_tokens: int = 0
    saved_tokens: int = 0
    segments: int = 0
    shared_segments: int = 0
    read_across: int = 0
    microbatches: int = 0
    with_children: int = 0
    cache_tokens: int = 0

    @property
    def shares(self) -> bool:
        return self.saved_tokens > 0 and self.shared_segments > 0

    def is_kind(self, kind: Kind) -> bool:
        """Whether the plan shares within microbatches ("within"), or across them ("across")."""
        fits = self.read_across > 0 if kind == ACROSS else self.with_children == 0
        return self.shares and fits

    def text(self) -> str:
        """One line, such as "60 of 184 tokens run, 9 of 21 segments shared, 3 of 7 microbatches
        with children"."""
        text = (
            f"{self.computed_tokens:,} of {self.logical_tokens:,} tokens run, "
            + f"{self.left_out_tokens:,} left out, " * bool(self.left_out_tokens)
            + f"{self.shared_segments:,} of {self.segments:,} segments shared, "
            f"{self.with_children:,} of {self.microbatches:,} microbatches with children"
        )
        return text + (f", prefix cache of {self.cache_tokens:,} tokens" * bool(self.with_children))


def count_shared(plan: Plan) -> SharedCounts:
    """Count the shared tokens and segments of a plan, from its forest and microbatches."""
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
class LeftOut:
    """A kind of plan that is not compared.

    Attributes:
        kind: the kind, as in PlanFindings.
        reason: why it is not compared.
    """

    kind: Kind
    reason: str

    def text(self) -> str:
        """Text for a line of the report."""
        return f"a plan that shares {self.kind} microbatches, because {self.reason}"


@dataclass(frozen=True)
class Choice:
    """The plans to compare.

    Attributes:
        plans: by kind (see PlanFindings), in the order in which they run.
        left_out: kinds that are not compared.
        reason: reason why there is nothing to compare; else None.
    """

    plans: dict[Kind, Plan]
    left_out: tuple[LeftOut, ...] = ()
    reason: str | None = None


def choose_plans(
    policy: StepPolicy, batch: RolloutBatch, loss: Loss, router: RouterLoss | None = None
) -> Choice:
    """Choose the plans to compare, within the options of the policy.

    They are a plan of each kind, and the plan of the planner if it is of neither kind.

    Args:
        policy: the policy.
        batch: the rollouts.
        loss: the loss of the step.
        router: the router loss of the step, if any.

    Raises:
        PlanError: the plan of the planner does not fit the limits.
    """
    nothing = nothing_shared(policy.config, batch)
    if nothing is not None and not zero_rollouts(loss, batch).any():
        return Choice({}, reason=nothing)
    chosen = policy.plan(batch, loss, router=router)
    # Rollouts that the loss declares to be zero are compared too, also without shared tokens.
    declared = chosen.dense.num_loss_entries < batch.trained_tokens
    if nothing is not None:
        return Choice({CHOSEN: chosen}) if declared else Choice({}, reason=nothing)
    plans: dict[Kind, Plan] = {}
    left_out: list[LeftOut] = []
    counts = count_shared(chosen)
    kinds: tuple[Literal["within", "across"], ...] = (WITHIN, ACROSS)
    for kind in kinds:
        made = chosen if counts.is_kind(kind) else _plan_of(kind, policy, batch, loss, router)
        if isinstance(made, LeftOut):
            left_out.append(made)
        else:
            plans[kind] = made
    if not plans and not declared:
        reasons = "; ".join(f"{entry.kind} microbatches: {entry.reason}" for entry in left_out)
        reason = f"no plan shares the common tokens of the rollouts ({reasons})"
        return Choice({}, tuple(left_out), reason)
    if all(plan is not chosen for plan in plans.values()):
        plans[CHOSEN] = chosen
    return Choice(plans, tuple(left_out))


def nothing_shared(config: Config, batch: RolloutBatch) -> str | None:
    """Reason why no tokens of a batch can be shared, with a remedy; None if some can."""
    if config.sharing == "none":
        return (
            "sharing is 'none', which is ordinary training. Leave sharing to the planner "
            "(sharing='auto'), or ask for 'group' or 'tree'"
        )
    probe = make_plan(batch, config=Config(sharing=_most_shared(config), boundary="across"))
    if count_shared(probe).shares:
        return None
    among = "one group" if config.sharing == "group" else "the batch"
    rollouts = f"{len(batch):,} rollout{'s' * (len(batch) != 1)} in {len(batch.groups()):,}"
    return (
        f"no two rollouts of {among} begin with the same two tokens "
        f"({rollouts} group{'s' * (len(batch.groups()) != 1)}). Give several rollouts of one "
        "prompt, such as a whole group or more groups"
    )


def _most_shared(config: Config) -> Sharing:
    return "tree" if config.sharing == "auto" else config.sharing


def _plan_of(
    kind: Literal["within", "across"],
    policy: StepPolicy,
    batch: RolloutBatch,
    loss: Loss,
    router: RouterLoss | None,
) -> Plan | LeftOut:
    """A plan of this kind within the options of the policy, or the reason why there is none.

    Microbatches become longer until they share tokens within, or shorter until they read prefix
    caches of shared tokens.
    """
    config = policy.config
    if config.boundary not in ("auto", kind) and (kind, config.boundary) != (ACROSS, "mixed"):
        return LeftOut(kind, f"boundary is {config.boundary!r}")
    boundary: Boundary = kind if config.boundary == "auto" else config.boundary
    limit = given = config.max_microbatch_tokens
    while limit is None or limit >= 1:
        asked = policy.with_config(
            sharing=_most_shared(config), boundary=boundary, max_microbatch_tokens=limit
        )
        try:
            plan = asked.plan(batch, loss, router=router)
        except PlanError as error:
            return LeftOut(kind, str(error))
        if count_shared(plan).is_kind(kind):
            return plan
        if kind == ACROSS:
            limit = min(plan.max_microbatch_tokens, plan.computed_tokens) // 2
        # A memory budget may allow less than the limit.
        elif given is None and (limit or 0) <= plan.max_microbatch_tokens < plan.dense.tokens:
            limit = 2 * plan.max_microbatch_tokens
        else:
            tokens = plan.max_microbatch_tokens
            return LeftOut(kind, f"microbatches of {tokens:,} tokens share nothing within")
    return LeftOut(kind, "the shared tokens are too few to split over two microbatches")
