"""Modules and parameters of a model, in the order and by the names of torch."""

from torch import nn

from forkpoint.hosts.modules import every_module, every_parameter


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
