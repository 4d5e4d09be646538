"""The choices of ranks in a step, from predicted costs: how they hold sharded weights, and whether
they replicate or exchange the prompts that several of them have (`plan.shared_prompts`).

In lockstep weights are gathered for each forward and backward, which all ranks run together: each
instruction takes as long as on the slowest rank, and no less than gathering takes. Gathered once,
ranks wait for one another at the end alone, and whole weights take memory.
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
from forkpoint.plan.pricing.meters import NOISE, Meter, meter_of
from forkpoint.plan.program import BACKWARD, HEAD, Instruction, Program
from forkpoint.plan.shared_prompts import SharedPrompt

T = TypeVar("T")
GATHER_TOKENS = 2048
"""How many tokens' forward takes as long as gathering all weights once.

A token's forward takes 2 FLOPs for each weight, and gathering moves 2 bytes for it: so this is the
FLOPs that a rank computes while a byte arrives. At 500 TFLOPS it stands for 244 GB/s, about what
GPUs of one host gather at. It is taken where no calibration has measured the link.
"""


@dataclass(frozen=True)
class RankCosts:
    """Predicted costs of one rank's microbatches, in a unit that all ranks share."""

    forward: tuple[float, ...] = ()
    """By microbatch."""
    backward: tuple[float, ...] = ()
    tokens: float = 0.0
    """Of all microbatches, short ones counted as what they take."""
    once: float | None = 0.0
    """Its whole step where weights are gathered once; None where that is not possible."""
    parts: tuple[float, ...] = ()
    """Of that, before, between and after the exchanges of prompts; empty where there are none."""
    why_not: str = ""
    """Why it is not."""
    link: LinkPrices | None = None
    """Of a measured link, in milliseconds as the costs are; None: the link's price is nominal."""


class Choice(NamedTuple, Generic[T]):
    """The choice of ranks between two ways, and why."""

    taken: T
    reason: str


def choose_gathering(
    asked: Literal["auto", "microbatch", "step"],
    aligned: Sequence[Program],
    costs: Sequence[RankCosts],
    names: Sequence[int],
) -> Choice[Gather]:
    """The way to hold weights that takes less time, of those that fit on every rank.

    Args:
        aligned: by rank, programs of one common shape; not read where `asked` is not "auto".
        costs: by rank.
        names: by rank, its number in messages.

    It depends on the arguments alone, so that ranks that have exchanged them agree.
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
    """Costs of a step in lockstep, gathered once, and the mean of the ranks' own work.

    An idle instruction is free, because there is always a rank that does not idle it.
    """
    gathering, own = gathering_cost(costs), [cost.once or 0.0 for cost in costs]
    lockstep = lockstep_cost(aligned, costs, gathering)
    # Weights before the step and gradients after it: what lockstep hides behind computation.
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
    """Cost of a step whose ranks wait for each other at its end alone, and where they exchange."""
    parts = [cost.parts or (cost.once or 0.0,) for cost in costs]
    return sum(map(max, zip_longest(*parts, fillvalue=0.0)))


def gathering_cost(costs: Sequence[RankCosts]) -> float:
    """Cost of gathering all weights once, in the unit of the costs.

    By the dearest of the links that ranks have measured, or else by the nominal price.
    """
    link = link_prices(costs)
    if link is not None:
        return link.gathering * (len(costs) - 1) / len(costs) + link.calls
    return nominal_gathering_cost(costs)


def link_prices(costs: Sequence[RankCosts]) -> LinkPrices | None:
    """Prices of the link, the dearest of any rank; None where some rank knows none.

    Ranks that have exchanged their costs agree on it. Those without rollouts price nothing.
    """
    priced = [cost for cost in costs if cost.forward]
    found = [cost.link for cost in priced if cost.link is not None]
    if not found or len(found) < len(priced):
        return None
    return LinkPrices(*(max(getattr(each, name) for each in found) for name in vars(found[0])))


def nominal_gathering_cost(costs: Sequence[RankCosts]) -> float:
    """Cost of gathering all weights once over a link that was not measured."""
    tokens = sum(cost.tokens for cost in costs)
    forward = sum(sum(cost.forward) for cost in costs)
    return GATHER_TOKENS * forward / tokens if tokens else 0.0


def prices_of(calibration: Calibration | None, shape: ModelShape | None) -> LinkPrices | None:
    """Prices of the link that a calibration has measured, for a model; None where it has not."""
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
    """Costs of a rank's plans, which it tells the others.

    Args:
        plan: for weights that are gathered for each microbatch.
        once: for weights that are gathered once a step; None where there is none.
        calibration: that the plans were priced with, if any.
        scores: whether forwards alone run.
        why_not: why there is none.
    """
    meter = meter_of(plan, calibration)
    parts: list[float] = []
    if once is not None:
        own = meter if once is plan else meter_of(once, calibration)
        program = once.score_program if scores else once.program
        parts = [0.0]
        for instruction in program.instructions:
            parts[-1] += cost_of(once, own, instruction)
            parts += [0.0] if instruction.exchanges else []
    return RankCosts(
        forward=tuple(meter.alone(m, backward=False) for m in plan.microbatches),
        backward=() if scores else tuple(meter.alone(m, backward=True) for m in plan.microbatches),
        tokens=sum(map(meter.filled_tokens, plan.microbatches)),
        once=sum(parts) if parts else None,
        parts=tuple(parts) if len(parts) > 1 else (),
        why_not=why_not,
        link=prices_of(calibration, plan.shape),
    )


def cost_of(plan: Plan, meter: Meter, instruction: Instruction) -> float:
    """Predicted cost of one instruction, without copies to the host's memory."""
    if instruction.idle:
        return 0.0
    microbatch = plan.microbatches[instruction.microbatch]
    return meter.alone(
        microbatch,
        backward=instruction.operation == BACKWARD,
        boundary_only=instruction.ends_at != HEAD,
    )


# Prompts that several ranks have
# ------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """One rank's part of a step with prompts exchanged, or with each rank computing its own."""

    program: Program = field(default_factory=Program)
    tokens: tuple[float, ...] = ()
    """By microbatch."""
    held: RankCosts = field(default_factory=RankCosts)
    """Costs of both ways to hold weights."""
    media: tuple[PlannedMedium, ...] = ()


def step_cost(
    gathering: Choice[Gather] | None, aligned: Sequence[Program], costs: Sequence[RankCosts]
) -> float:
    """Predicted cost of a step whose weights are held so; None: nothing is gathered."""
    if gathering is None:
        return apart_cost(costs)
    if gathering.taken == "step":
        return apart_cost(costs) + 2 * gathering_cost(costs)
    return predicted(aligned, costs)[0]


def link_cost(
    prompts: Sequence[SharedPrompt], shape: ModelShape | None, costs: Sequence[RankCosts]
) -> float:
    """Predicted cost of sending all shared prompts and getting their gradients back.

    As long as it takes on the rank that sends or receives most: at the rate that a calibration has
    measured, or else at that at which weights are gathered (`GATHER_TOKENS`). Nothing is known
    without a shape. `costs`: by rank.
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
        # Keys, values and states of each layer have a transfer each, there and back.
        return most * link.byte + 4 * shape.layers * link.transfer * (most > 0)
    return nominal_gathering_cost(costs) * most / (2 * shape.linear_parameters)


def choose_split(asked: str, replicated: float, exchanged: float) -> Choice[Split]:
    """Replication or exchange, by their predicted costs, links included."""
    if asked == "exchange":
        return Choice("exchange", "as asked")
    if exchanged < replicated * (1 - NOISE):
        ratio = replicated / exchanged if exchanged else 1.0
        return Choice("exchange", f"predicted {ratio:.2f}x faster than replicating prompts")
    ratio = exchanged / replicated if replicated else 1.0
    return Choice("replicate", f"predicted {ratio:.2f}x faster than exchanging prompts")
