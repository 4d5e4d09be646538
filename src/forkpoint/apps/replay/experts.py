"""Loads of a mixture's experts in the steps of a replay, by layer. Imports no torch.

Counts of all experts of all layers would make rows of a replay long, so a row has the least and the
most of each layer, and their sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.rollouts.schema import SchemaError, array, record, whole

MOST_CHOICES = 2**53
MOST_EXPERTS = 2**31
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """Choices that one layer's router spread over its experts."""

    least: int
    """Of the expert that was chosen least often."""
    most: int
    total: int
    """Of all experts."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Load":
        """counts: how often each expert was chosen."""
        return cls(least=min(counts), most=max(counts), total=sum(counts))


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """Loads of the experts in one step, one entry for each layer that has a router."""

    experts: int
    """Among how many each router chooses."""
    logical: tuple[Load, ...]
    """A token counts once for every rollout through it, as in ordinary training."""
    computed: tuple[Load, ...]
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

    decisions: tuple[int, ...]
    """Choices that were given; a token counts once for every rollout through it."""
    elsewhere: tuple[int, ...]
    """Those for which the router itself would have chosen other experts."""


# Read back ----------------------------------------------------------------------------------------

CHOICES = whole(0, MOST_CHOICES)
_LOADS = record(
    {
        "experts": whole(1, MOST_EXPERTS),
        **dict.fromkeys(
            ("logical", "computed"),
            array(record(dict.fromkeys(("least", "most", "total"), CHOICES))),
        ),
    }
)
_ROUTES = record(dict.fromkeys(("decisions", "elsewhere"), array(CHOICES)))


def expert_loads(value: Any, field: str) -> ExpertLoads:
    """The check of a field that holds loads."""
    found = _LOADS(value, field)
    _check_layers(found, field, ("logical", "computed"))
    for name in ("logical", "computed"):
        for layer, load in enumerate(found[name]):
            least, most, total = load["least"], load["most"], load["total"]
            experts = found["experts"]
            if not least <= most or not least * experts <= total <= most * experts:
                raise SchemaError(
                    f"{field}.{name}[{layer}] has a total of {total}, and {experts} experts of "
                    f"{least} to {most} choices each make no such total"
                )
        found[name] = tuple(Load(**load) for load in found[name])
    return ExpertLoads(**found)


def given_routes(value: Any, field: str) -> GivenRoutes:
    """The check of a field that holds counts of given routes."""
    found = _ROUTES(value, field)
    _check_layers(found, field, ("decisions", "elsewhere"))
    for layer, (given, other) in enumerate(
        zip(found["decisions"], found["elsewhere"], strict=True)
    ):
        if other > given:
            raise SchemaError(f"{field}.elsewhere[{layer}] is {other}, of {given} decisions")
    return GivenRoutes(**found)


def _check_layers(found: dict[str, Any], field: str, names: tuple[str, str]) -> None:
    one, other = (len(found[name]) for name in names)
    if one != other or not 1 <= one <= MOST_LAYERS:
        raise SchemaError(
            f"{field}.{names[0]} has {one} entries and {field}.{names[1]} {other}; both have one "
            f"for each layer with a router, at most {MOST_LAYERS}"
        )
