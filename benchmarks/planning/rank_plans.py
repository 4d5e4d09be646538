"""Plans of ranks from paths alone: batches of hundreds of millions of tokens without the tokens.

`make_plan` reads tokens to sort rollouts, to find the labelled ones and to make a fingerprint. Here
the order is given, loss masks are counted, and there is no fingerprint; microbatches, programs and
prices are made by the same functions. `tests/unit/test_placement_ranks.py` compares both.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from forkpoint.errors import PlanError
from forkpoint.parallel.placement.paths import Paths
from forkpoint.plan import ModelShape, Plan
from forkpoint.plan.builder import DEFAULT_MICROBATCH_TOKENS
from forkpoint.plan.packing import microbatches_mixed, microbatches_of_whole_paths
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing.meters import NOISE, meter_of
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest

Made = tuple[Forest, list[Microbatch]]


def plan_of_rank(paths: Paths, rollouts: IntArray, shape: ModelShape) -> Plan | None:
    """The plan of some of the rollouts; None where there is nothing to run.

    The combinations are those of `make_plan` but for `across`, which shares no more than `mixed`.
    """
    order = paths.order.take(np.flatnonzero(np.isin(paths.order.rollouts, rollouts)))
    if not len(order.rollouts):
        return None
    tokens = max(DEFAULT_MICROBATCH_TOKENS, int(order.edges.max()))
    group = paths.groups[order.rollouts]
    between = np.concatenate([[True], group[1:] != group[:-1]])
    found: list[Plan] = []
    for sharing, tree in {
        "none": order.cut(np.ones(len(group), bool)),
        # In order of the tokens; a group whose rollouts do not lie together shares less.
        "group": order.cut(between),
        "tree": order,
    }.items():
        for boundary, made in (
            ("within", partial(microbatches_of_whole_paths, tree, len(paths), tokens)),
            ("mixed", partial(_mixed, tree, len(paths), tokens)),
        ):
            try:
                forest, microbatches = made()
            except PlanError:
                continue
            found.append(_plan(paths, forest, microbatches, (sharing, boundary, tokens), shape))
    cheapest = min(plan.cost for plan in found)
    return next(plan for plan in found if plan.cost <= cheapest * (1 + NOISE))


def _mixed(order: SortedRollouts, rollouts: int, tokens: int) -> Made:
    return microbatches_mixed(build_forest(order, rollouts), tokens)


def _plan(
    paths: Paths,
    forest: Forest,
    microbatches: list[Microbatch],
    of: tuple[str, str, int],
    shape: ModelShape,
) -> Plan:
    owner = forest.order[forest.owner_begin]
    end = forest.start + forest.length
    labelled_S = paths.labels(owner, end) - paths.labels(owner, forest.start)
    microbatches = [
        replace(microbatch, num_loss_entries=int(labelled_S[list(microbatch.segments)].sum()))
        for microbatch in microbatches
    ]
    plan = Plan(*of, forest, tuple(microbatches), shape=shape).with_program(scores=False)
    meter = meter_of(plan)
    return replace(plan, cost=plan_cost(plan, meter), cost_unit=meter.unit)
