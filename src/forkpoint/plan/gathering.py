"""Choices of ranks in a step from predicted costs: when to gather sharded weights, and whether to
replicate or exchange prompts of several ranks (`plan.shared_prompts`).

In lockstep, ranks gather weights for each forward and backward, which all ranks run together. Each
instruction takes as long as on the slowest rank, and at least as long as gathering. If weights are
gathered once, ranks wait for one another only at the end, and whole weights take memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, Literal, NamedTuple, TypeVar

from forkpoint.config import Gather, Split
from forkpoint.plan.media import PlannedMedium
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration, LinkPrices
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import EXCHANGE_FLOPS, NOISE, meter_of
from forkpoint.plan.program import BACKWARD, HEAD, Program
from forkpoint.plan.shared_prompts import SharedPrompt

T = TypeVar("T")


@dataclass(frozen=True)
class RankCosts:
    """Predicted costs of one rank's microbatches, in a unit that all ranks share."""

    forward: tuple[float, ...] = ()
    """Cost of the forward of each microbatch."""
    backward: tuple[float, ...] = ()
    """Cost of the backward of each microbatch."""
    tokens: float = 0.0
    """Tokens of all microbatches. Short microbatches count as the tokens that take the same
    time."""
    once: float | None = 0.0
    """Cost of its whole step if weights are gathered once; None if that is not possible."""
    parts: tuple[float, ...] = ()
    """Parts of `once` before, between and after the exchanges of prompts; empty without
    exchanges."""
    why_not: str = ""
    """Reason why `once` is None."""
    link: LinkPrices | None = None
    """Prices of a measured link, in milliseconds like the costs; None if the link's price is
    nominal."""


class Choice(NamedTuple, Generic[T]):
    """The choice of ranks between two options, and the reason."""

    taken: T
    reason: str


def choose_gathering(
    asked: Literal["auto", "microbatch", "step"],
    aligned: Sequence[Program],
    costs: Sequence[RankCosts],
    names: Sequence[int],
) -> Choice[Gather]:
    """Choose when to gather weights: the faster option, among those that fit on every rank.

    Args:
        aligned: by rank, aligned programs; not read unless `asked` is "auto".
        costs: by rank.
        names: rank numbers, for messages.

    The result depends only on the arguments, so ranks with equal arguments agree.
    """
    if asked != "auto":
        return Choice(asked, "as asked")
    for name, cost in zip(names, costs, strict=True):
        if cost.once is None:
            return Choice("microbatch", f"rank {name}: {cost.why_not}")
    lockstep, once, own = predicted(aligned, costs)
    idle = 1 - own / lockstep if lockstep else 0.0
    # Gathering for each microbatch takes less memory.
    if once < lockstep * (1 - NOISE):
        return Choice(
            "step",
            f"predicted {lockstep / once:.2f}x faster than lockstep, where ranks would idle "
            f"or wait {idle:.0%}",
        )
    gain = once / lockstep if lockstep else 1.0
    return Choice(
        "microbatch",
        f"predicted {gain:.2f}x faster than gathered once a step; ranks idle or wait {idle:.0%}",
    )


def predicted(aligned: Sequence[Program], costs: Sequence[RankCosts]) -> tuple[float, float, float]:
    """Cost of a step in lockstep, cost with weights gathered once, and mean cost of one rank
    without waiting.

    An idle instruction is free, because there is always a rank that does not idle it.
    """
    gathering, own = gathering_cost(costs), [cost.once or 0.0 for cost in costs]
    lockstep = lockstep_cost(aligned, costs, gathering)
    # Weights are gathered before the step and gradients reduced after it. Lockstep overlaps both
    # with computation.
    return lockstep, apart_cost(costs) + 2 * gathering, sum(own) / len(own)


def lockstep_cost(
    aligned: Sequence[Program], costs: Sequence[RankCosts], gathering: float = 0.0
) -> float:
    """Cost of a step whose instructions each wait for the slowest rank, and for `gathering`."""
    slowest = [0.0 if i.exchanges else gathering for i in aligned[0].instructions]
    for program, cost in zip(aligned, costs, strict=True):
        for at, instruction in enumerate(program.instructions):
            if not instruction.idle:
                by = cost.backward if instruction.operation == BACKWARD else cost.forward
                slowest[at] = max(slowest[at], by[instruction.microbatch])
    return sum(slowest)


def apart_cost(costs: Sequence[RankCosts]) -> float:
    """Cost of a step whose ranks wait for each other only at its end and at exchanges of
    prompts."""
    parts = [cost.parts or (cost.once or 0.0,) for cost in costs]
    return sum(map(max, zip_longest(*parts, fillvalue=0.0)))


def gathering_cost(costs: Sequence[RankCosts]) -> float:
    """Cost of gathering all weights once, in the unit of the costs.

    The price is that of the slowest link that ranks have measured, or else the nominal price.
    """
    link = link_prices(costs)
    if link is not None:
        return link.gathering * (len(costs) - 1) / len(costs) + link.calls
    return nominal_gathering_cost(costs)


def link_prices(costs: Sequence[RankCosts]) -> LinkPrices | None:
    """Prices of the slowest link of any rank; None if a rank has not measured its link.

    Ranks that have exchanged their costs agree on it. Ranks without rollouts do not count.
    """
    priced = [cost for cost in costs if cost.forward]
    found = [cost.link for cost in priced if cost.link is not None]
    if not found or len(found) < len(priced):
        return None
    return LinkPrices(*(max(getattr(each, name) for each in found) for name in vars(found[0])))


def nominal_gathering_cost(costs: Sequence[RankCosts]) -> float:
    """Cost of gathering all weights once over a link that was not measured.

    The forward of a token takes 2 FLOPs for each weight, and gathering moves 2 bytes for each
    weight. So gathering takes as long as the forwards of EXCHANGE_FLOPS tokens.
    """
    tokens = sum(cost.tokens for cost in costs)
    forward = sum(sum(cost.forward) for cost in costs)
    return EXCHANGE_FLOPS * forward / tokens if tokens else 0.0


def prices_of(calibration: Calibration | None, shape: ModelShape | None) -> LinkPrices | None:
    """Prices of the link that a calibration has measured, for a model; None if it has measured
    none."""
    if calibration is None or calibration.link is None or shape is None:
        return None
    link = calibration.link
    weights = shape.dtype_bytes * shape.linear_parameters
    return LinkPrices(
        gathering=weights / link.gather_bytes_per_ms,
        calls=(shape.layers + 1) * link.gather_latency_ms,
        byte=1 / link.send_bytes_per_ms,
        transfer=link.send_latency_ms,
    )


def costs_of_rank(
    plan: Plan,
    once: Plan | None,
    calibration: Calibration | None = None,
    *,
    scores: bool = False,
    why_not: str = "",
) -> RankCosts:
    """Costs of a rank's plans, which it sends to the other ranks.

    Args:
        plan: for weights that are gathered for each microbatch.
        once: for weights that are gathered once a step; None if there is no such plan.
        calibration: the calibration that priced the plans, if any.
        scores: whether the step runs only forwards.
        why_not: reason why `once` is None.
    """
    meter = meter_of(plan, calibration)
    parts: list[float] = []
    if once is not None:
        own = meter if once is plan else meter_of(once, calibration)
        program = once.score_program if scores else once.program
        parts = [0.0]
        for instruction in program.instructions:
            if instruction.exchanges:
                parts.append(0.0)
            elif not instruction.idle:
                parts[-1] += own.alone(
                    once.microbatches[instruction.microbatch],
                    backward=instruction.operation == BACKWARD,
                    boundary_only=instruction.ends_at != HEAD,
                )
    return RankCosts(
        forward=tuple(meter.alone(m, backward=False) for m in plan.microbatches),
        backward=() if scores else tuple(meter.alone(m, backward=True) for m in plan.microbatches),
        tokens=sum(map(meter.filled_tokens, plan.microbatches)),
        once=sum(parts) if parts else None,
        parts=tuple(parts) if len(parts) > 1 else (),
        why_not=why_not,
        link=prices_of(calibration, plan.shape),
    )


# Prompts that several ranks have
# ------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """One rank's part of a step, with prompts exchanged or replicated."""

    program: Program = field(default_factory=Program)
    tokens: tuple[float, ...] = ()
    """Number of tokens of each microbatch."""
    held: RankCosts = field(default_factory=RankCosts)
    """Costs for both options of gathering weights."""
    media: tuple[PlannedMedium, ...] = ()


def step_cost(
    gathering: Choice[Gather] | None, aligned: Sequence[Program], costs: Sequence[RankCosts]
) -> float:
    """Predicted cost of a step with this option of gathering weights; None means that nothing is
    gathered."""
    if gathering is None:
        return apart_cost(costs)
    if gathering.taken == "step":
        return apart_cost(costs) + 2 * gathering_cost(costs)
    return predicted(aligned, costs)[0]


def link_cost(
    prompts: Sequence[SharedPrompt], shape: ModelShape | None, costs: Sequence[RankCosts]
) -> float:
    """Predicted cost of sending all shared prompts and returning their gradients.

    The time of the rank that sends or receives most, at the rate that a calibration has measured,
    or else at the rate of gathering weights. 0 without a shape. `costs`: by rank.
    """
    if shape is None:
        return 0.0
    out, back = [0] * len(costs), [0] * len(costs)
    for prompt in prompts:
        nbytes = prompt.edges * shape.exchanged_token_bytes + shape.state_bytes
        for rank in prompt.ranks:
            if rank != prompt.owner:
                out[prompt.owner] += nbytes
                back[rank] += nbytes
    most = max(*out, *back)
    link = link_prices(costs)
    if link is not None:
        # Keys, values and states of each layer take one transfer each, in both directions.
        return most * link.byte + 4 * shape.layers * link.transfer * (most > 0)
    return nominal_gathering_cost(costs) * most / (2 * shape.linear_parameters)


def choose_split(asked: str, replicated: float, exchanged: float) -> Choice[Split]:
    """Choose replication or exchange of prompts by predicted costs, with those of links."""
    if asked == "exchange":
        return Choice("exchange", "as asked")
    if exchanged < replicated * (1 - NOISE):
        ratio = replicated / exchanged if exchanged else 1.0
        return Choice("exchange", f"predicted {ratio:.2f}x faster than replicating prompts")
    ratio = exchanged / replicated if replicated else 1.0
    return Choice("replicate", f"predicted {ratio:.2f}x faster than exchanging prompts")
