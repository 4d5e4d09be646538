"""Loads of a mixture's experts in the steps of a replay, by layer. Imports no torch.

Counts of all experts of all layers would make rows of a replay long, so a row has the least and the
most of each layer, and their sum.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from forkpoint.rollouts.schema import SchemaError, array, object_of, whole

MOST_CHOICES = 2**53
MOST_EXPERTS = 2**31
MOST_LAYERS = 10_000
Choices = Annotated[int, whole(0, MOST_CHOICES)]
ChoicesByLayer = Annotated[tuple[int, ...], array(whole(0, MOST_CHOICES))]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Choices that one layer's router spread over its experts."""

    least: Choices
    """Of the expert that was chosen least often."""
    most: Choices
    total: Choices
    """Of all experts."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Load":
        """counts: how often each expert was chosen."""
        return cls(least=min(counts), most=max(counts), total=sum(counts))


Loads = Annotated[tuple[Load, ...], array(object_of(Load))]


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """Loads of the experts in one step, one entry for each layer that has a router."""

    experts: Annotated[int, whole(1, MOST_EXPERTS)]
    """Among how many each router chooses."""
    logical: Loads
    """A token counts once for every rollout through it, as in ordinary training."""
    computed: Loads
    """A token counts as often as the plan runs it."""

    @classmethod
    def of(
        cls, logical: Sequence[Sequence[int]], computed: Sequence[Sequence[int]]
    ) -> "ExpertLoads":
        """logical, computed: for each layer how often each expert was chosen."""
        return cls(
            experts=len(logical[0]),
            logical=tuple(map(Load.of, logical)),
            computed=tuple(map(Load.of, computed)),
        )

    def over_even(self, name: str) -> Iterator[tuple[float, float]]:
        """By layer, the least and the most over the even share, of "logical" or "computed"."""
        for load in getattr(self, name):
            even = load.total / self.experts
            yield (load.least / even, load.most / even) if even else (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class GivenRoutes:
    """Routes that the rollouts of one step came with, one entry for each layer with a router."""

    decisions: ChoicesByLayer
    """Choices that were given; a token counts once for every rollout through it."""
    elsewhere: ChoicesByLayer
    """Those for which the router itself would have chosen other experts."""


# Read back
# ------------------------------------------------------------


def _check_loads(loads: ExpertLoads, field: str) -> None:
    _check_layers(field, logical=loads.logical, computed=loads.computed)
    for name in ("logical", "computed"):
        for layer, load in enumerate(getattr(loads, name)):
            least, most, experts, total = load.least, load.most, loads.experts, load.total
            if not least <= most or not least * experts <= total <= most * experts:
                raise SchemaError(
                    f"{field}.{name}[{layer}] has a total of {total}, and {experts} experts of "
                    f"{least} to {most} choices each make no such total"
                )


def _check_routes(routes: GivenRoutes, field: str) -> None:
    _check_layers(field, decisions=routes.decisions, elsewhere=routes.elsewhere)
    pairs = zip(routes.decisions, routes.elsewhere, strict=True)
    for layer, (given, other) in enumerate(pairs):
        if other > given:
            raise SchemaError(f"{field}.elsewhere[{layer}] is {other}, of {given} decisions")


def _check_layers(field: str, **lists: Sequence[Any]) -> None:
    (one, first), (other, second) = lists.items()
    if len(first) != len(second) or not 1 <= len(first) <= MOST_LAYERS:
        raise SchemaError(
            f"{field}.{one} has {len(first)} entries and {field}.{other} {len(second)}; both have "
            f"one for each layer with a router, at most {MOST_LAYERS}"
        )


expert_loads: Callable[..., ExpertLoads] = object_of(ExpertLoads, _check_loads)
given_routes: Callable[..., GivenRoutes] = object_of(GivenRoutes, _check_routes)
