"""Ranks that hold a model: topology, and the composite of holders."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from forkpoint.engine.distributed import Distributed, Holder
from forkpoint.parallel.topology import PaddedPlaces, Relation, Topology, connected, partition

Groups = Mapping[int, Mapping[Relation, tuple[int, ...]]]
DATA: Groups = {n: {"data": (0, 1)} if n < 2 else {"data": (2, 3)} for n in range(4)}
TENSOR: Groups = {n: {"tensor": (0, 1) if n < 2 else (2, 3)} for n in range(4)}
BOTH: Groups = {
    n: {"tensor": (0, 1) if n < 2 else (2, 3), "data": (0, 2) if n % 2 == 0 else (1, 3)}
    for n in range(4)
}
EXPERTS: Groups = {
    n: {"tensor": (0, 1) if n < 2 else (2, 3), "expert": (0, 1, 2, 3)} for n in range(4)
}


@pytest.mark.parametrize(
    ("groups", "rank", "members", "batches", "contributors"),
    [
        (DATA, 1, (0, 1), (0, 1), (0, 1)),
        (DATA, 2, (2, 3), (0, 1), (0, 1)),
        (TENSOR, 3, (2, 3), (0, 0), (0,)),
        (BOTH, 0, (0, 1, 2, 3), (0, 0, 1, 1), (0, 2)),
        (EXPERTS, 3, (0, 1, 2, 3), (0, 0, 1, 1), (0, 2)),
    ],
    ids=["data", "other data", "tensor", "tensor and data", "tensor and expert"],
)
def test_ranks_that_relations_connect(
    groups: Groups,
    rank: int,
    members: tuple[int, ...],
    batches: tuple[int, ...],
    contributors: tuple[int, ...],
) -> None:
    assert connected(groups, rank) == (members, batches)
    topology = Topology(groups[rank], members, batches)
    assert topology.contributors == contributors
    assert topology.shares_batches == (len(contributors) < len(members))


def test_partition_of_all_ranks() -> None:
    assert partition(DATA) == partition(TENSOR) == [(0, 1), (2, 3)]
    assert partition(BOTH) == [(0, 1, 2, 3)]


def test_a_rank_alone() -> None:
    alone = Topology()
    assert alone.contributors == (0,) and not alone.shares_batches


class Part(Holder):
    """Holds one parameter, and doubles gradients of it."""

    def __init__(self, parameter: nn.Parameter, whole: nn.Parameter) -> None:
        self.relations = {"data": (0,)}
        self.parameter = parameter
        self._whole = whole
        self.seen: list[Any] = []

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return [self.parameter]

    def factor(self, *, mean: bool) -> float:
        return 1.0 if mean else 3.0

    def missing_bytes(self) -> int:
        return 5

    def whole_parameters(self) -> Sequence[nn.Parameter]:
        return [self._whole]

    def enter(self, changes: Any, blocks: Any, whole: Any) -> None:
        self.seen = list(whole)

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        pairs = zip(gradients, parameters, strict=True)
        return [g if g is None or p is not self.parameter else 2 * g for g, p in pairs]


def test_holders_compose() -> None:
    """Each call reaches every holder, and each of them its own parameters."""
    made: list[nn.Parameter] = [cast(nn.Parameter, nn.Linear(1, 1).weight) for _ in range(5)]
    first, second, other, *whole = made
    parts = [Part(second, whole[0]), Part(first, whole[1])]
    group = Distributed(parts, Topology(), cast(Any, "ranks"))
    assert all(cast(Any, part.ranks) == "ranks" for part in parts)
    found = group.deferred_params([first, other, second])
    assert [id(p) for p in found] == [id(first), id(second)]
    assert group.factor(mean=False) == 9.0 and group.factor(mean=True) == 1.0
    assert group.missing_bytes() == 10 and not group.gathered
    group.enter(cast(Any, None), [], ())
    assert [[id(p) for p in part.seen] for part in parts] == [[id(p) for p in whole]] * 2
    ones = [p.detach() * 0 + 1 for p in (first, second)]
    reduced = group.reduce([ones[0], ones[1], None], [first, second, other], mean=False)
    assert [None if g is None else float(g) for g in reduced] == [2.0, 2.0, None]


def test_padding_repeats_the_last_place_and_attention_sees_none_of_it() -> None:
    places = PaddedPlaces(4)
    assert places.own(5).tolist() == [0, 1, 2, 3, 4, 4, 4, 4] and places.padding(5) == 3
    assert places.own(8).tolist() == list(range(8)) and places.padding(8) == 0
    x_THD = torch.arange(16.0).reshape(8, 2, 1)
    (seen,) = places.to_heads((x_THD,), 5)
    assert torch.equal(seen, x_THD[:5])
    back = places.to_places(seen, 5)
    assert torch.equal(back[:5], seen) and back.shape == x_THD.shape and not back[5:].any()
