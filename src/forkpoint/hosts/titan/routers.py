"""Routers of torchtitan's mixtures of experts."""

from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter, RouteHolder, RouterNote


class Routers:
    """The routers of a model: none of those that are supported."""

    layers: int = 0
    defines_loss: bool = False
    coefficient: float = 0.0
    experts: int = 0
    chosen: int | None = None

    def __init__(self) -> None:
        self.found: list[FoundRouter] = []
        self.biases: list[Tensor] = []

    def enter(
        self, note: RouterNote | None, changes: Changes, holder: RouteHolder | None = None
    ) -> None:
        assert note is None and holder is None, "there are no routers"

    def end_within(self, block: nn.Module, changes: Changes) -> bool:
        return False
