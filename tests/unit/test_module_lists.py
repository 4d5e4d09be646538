"""Modules and parameters of a model, by the names of torch, listed once a step."""

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.modules import cache_module_walks, every_module, every_parameter, forget_lists


def test_lists_are_those_of_torch() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.Linear(2, 3), nn.Sequential(shared, nn.LayerNorm(2)), nn.ReLU())
    model = nn.ModuleDict({"first": inner, "again": shared, "last": nn.Linear(2, 3, bias=False)})
    model.register_module("nothing", None)
    model.register_parameter("own", nn.Parameter(shared.weight[0].detach()))
    model["last"].weight = inner[0].weight  # tied
    assert every_module(model) == list(model.named_modules())
    found, expected = every_parameter(model), list(model.named_parameters())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))


def test_lists_are_made_once_a_step_until_they_are_forgotten() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(2))
    model = nn.Sequential(inner, nn.ReLU())
    with Changes() as changes:
        cache_module_walks(changes)
        for module in (model, inner):
            assert every_module(module) is every_module(module)
            assert every_parameter(module) is every_parameter(module)
        inner.append(nn.Linear(2, 2))
        assert len(every_module(inner)) == 3
        forget_lists()
        assert len(every_module(inner)) == 4
        assert len(every_parameter(inner)) == 6
        # A module in two places is in the list of the first alone.
        model.append(nn.Sequential(inner[0]))
        forget_lists()
        for module in (model, *model.modules()):
            assert every_module(module) == list(module.named_modules())
    assert every_module(model) is not every_module(model)


def test_lists_of_parts_are_cut_from_the_first_list_of_a_step() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    model = nn.Sequential(inner, nn.ReLU())
    other = nn.Sequential(nn.ReLU())
    with Changes() as changes:
        cache_module_walks(changes)
        for module in (model, *model.modules(), other):
            assert every_module(module) == list(module.named_modules())
