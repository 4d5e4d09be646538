"""The choice of what ranks do about trunks that several of them have: replicate or exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.config import AUTO, Config, Split
from forkpoint.plan.gathering import (
    Gathering,
    RankCosts,
    apart_cost,
    gathering_cost,
    link_prices,
    nominal_gathering_cost,
    predicted,
)
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import NOISE
from forkpoint.plan.program import Program


@dataclass(frozen=True)
class Splitting:
    """Treatment of trunks in one step, and why."""

    split: Split
    reason: str


@dataclass(frozen=True)
class Exchanged:
    """One rank's part of a step in which trunks are exchanged."""

    program: Program
    costs: tuple[float, ...]
    """By microbatch: predicted."""
    held: RankCosts
    link: "LinkSizes"


@dataclass(frozen=True)
class LinkSizes:
    """Bytes of one model that trunks take on the link, and weights that its price is read from."""

    token: int = 0
    """Prefix cache of one token."""
    gradient: int = 0
    """Gradients of it."""
    state: int = 0
    """Recurrent states, and the inputs of convolutions before them, with their gradients."""
    weights: int = 1
    """Of the blocks' matrix products, in 16 bits."""
    tensors: int = 0
    """How many transfers prefix caches take: keys, values and states of each layer have their own.
    """

    @classmethod
    def of(cls, shape: ModelShape | None) -> "LinkSizes":
        """Those of a shape; nothing is known without."""
        if shape is None:
            return cls()
        return cls(
            shape.boundary_bytes_per_token,
            shape.boundary_gradient_bytes_per_token,
            shape.state_bytes,
            2 * shape.linear_parameters,
            2 * shape.layers,
        )


def cannot_exchange(config: Config) -> str:
    """The option that keeps a rank from exchanging trunks; empty where none does."""
    if config.sharing == "none":
        return "sharing is 'none'"
    if config.boundary not in (AUTO, "mixed"):
        return f"boundary is {config.boundary!r}"
    return "leaf_layout is 'padded'" if config.leaf_layout == "padded" else ""


def step_cost(
    gathering: Gathering | None, aligned: Sequence[Program], costs: Sequence[RankCosts]
) -> float:
    """Predicted cost of a step whose weights are held so; None: nothing is gathered."""
    if gathering is None:
        return apart_cost(costs)
    if gathering.gather == "step":
        return apart_cost(costs) + 2 * gathering_cost(costs)
    return predicted(aligned, costs)[0]


def link_cost(
    trunks: Sequence[tuple[int, int, Sequence[int]]],
    sizes: LinkSizes,
    costs: Sequence[RankCosts],
) -> float:
    """Predicted cost of sending all trunks and getting their gradients back.

    Args:
        trunks: edges, owner and ranks of each.
        sizes: of the model.
        costs: by rank.

    As long as it takes on the rank that sends or receives most: at the rate that a calibration has
    measured, or else at that at which weights are gathered (`plan.gathering.GATHER_TOKENS`).
    """
    out, back = [0] * len(costs), [0] * len(costs)
    for edges, owner, ranks in trunks:
        nbytes = edges * (sizes.token + sizes.gradient) + sizes.state
        for rank in ranks:
            if rank != owner:
                out[owner] += nbytes
                back[rank] += nbytes
    most = max(*out, *back)
    link = link_prices(costs)
    if link is not None:
        return most * link.byte + 2 * sizes.tensors * link.transfer * (most > 0)
    return nominal_gathering_cost(costs) * most / sizes.weights


def choose_split(asked: str, replicated: float, exchanged: float) -> Splitting:
    """Replication or exchange, of which the predicted costs are given, links included."""
    if asked == "exchange":
        return Splitting("exchange", "as asked")
    # Replication needs nothing of the link.
    if exchanged < replicated * (1 - NOISE):
        ratio = replicated / exchanged if exchanged else 1.0
        return Splitting("exchange", f"predicted {ratio:.2f}x faster than replicating prompts")
    ratio = exchanged / replicated if replicated else 1.0
    return Splitting("replicate", f"predicted {ratio:.2f}x faster than exchanging prompts")
