"""Wrappers that hold a model on several ranks, as the engine sees them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.config import Gather
from forkpoint.engine.changes import Changes
from forkpoint.parallel.ranks import DataRanks, SingleProcess


class Distributed(Protocol):
    """A wrapper that keeps shards or replicas of a model on ranks with rollouts of their own.

    The wrapper is a library's. A step tells it when to reduce gradients, which is once.
    """

    ranks: DataRanks
    lockstep: bool
    """Whether it issues collectives in forwards and backwards, so that all ranks run the same,
    unless weights are gathered for the step."""
    gathers: bool
    """Whether weights can be gathered for a whole step."""
    reduces: bool
    """Whether backwards reduce gradients; otherwise `reduce` does so after them."""
    listens: bool
    """Whether it takes any backward that reaches the model's parameters for that of its last stock
    forward, so that a step's backwards must reach others (`gradient_sums.twins`)."""

    param_dtypes: frozenset[torch.dtype]
    """Dtypes that parameters are cast to for forwards; empty where they are used as they are."""

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        """The device meshes that it is known to hold the model over."""
        ...

    def check(self, model: nn.Module, *, training: bool) -> None:
        """The wrapper's settings of this moment have been shown exact.

        Raises UnsupportedError.
        """
        ...

    def apart(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the parameters whose gradients `reduce` sums, once all backwards are done."""
        ...

    def factor(self, *, mean: bool) -> float:
        """A factor for this rank's loss, with which gradients become the sum over ranks of those
        of their losses; or with `mean` what the wrapper makes of any other loss."""
        ...

    @property
    def gathered(self) -> bool:
        """Whether weights are whole until the step ends: no collective is issued within it, and
        gradients stay on this rank until `reduce_held`."""
        ...

    def use(self, gather: Gather, changes: Changes) -> None:
        """Hold weights so, from the next `enter` until the changes are undone."""
        ...

    def held_bytes(self, gather: Gather) -> int:
        """Bytes of weights on this rank, besides its own part, that a step holds at most."""
        ...

    def missing_bytes(self) -> int:
        """Bytes of gradients of a step, besides those in `.grad`, that do not exist yet."""
        ...

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that forwards use in the place of those that optimizers have."""
        ...

    def enter(self, changes: Changes, blocks: Sequence[nn.Module]) -> None:
        """Reduce nothing until `last`, until the changes are undone. Collective where weights are
        gathered for the step. `blocks`: of the decoder, in their order. Gradients that stock
        backwards have left on the ranks are out of reach meanwhile."""
        ...

    def reduce_held(self) -> None:
        """Reduce what a step's backwards have left on the ranks. Collective."""
        ...

    def reduce_earlier(self) -> None:
        """Once a step has succeeded, reduce what stock backwards before it have left on the ranks,
        if the wrapper's settings let it. Collective where there is any."""
        ...

    def end_forward(self) -> None:
        """A forward of the step is over, perhaps within a backward of the user's (`logprobs`)."""
        ...

    def last(self) -> None:
        """The next backward is the step's last one."""
        ...

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        """Sums (means) of gradients over all ranks, one for each parameter; None where no rank has
        one. Collective."""
        ...

    def add_up(self, tensor: Tensor) -> None:
        """Replace a whole tensor by the sum of all ranks' tensors. Collective."""
        ...

    def settle(self) -> None:
        """Give every parameter the form in which the optimizer has it."""
        ...

    def reset(self, *, lost: bool) -> None:
        """A step has failed: drop what is left of it, and with `lost` what was there before it."""
        ...


class LocalModel:
    """A model that this process alone holds: nothing is gathered, and nothing reduced."""

    ranks: SingleProcess = SingleProcess()
    lockstep: bool = False
    gathers: bool = False
    reduces: bool = False
    listens: bool = False
    gathered: bool = False
    param_dtypes: frozenset[torch.dtype] = frozenset()

    def apart(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return []

    def factor(self, *, mean: bool) -> float:
        return 1.0

    def use(self, gather: Gather, changes: Changes) -> None:
        pass

    def held_bytes(self, gather: Gather) -> int:
        return 0

    def missing_bytes(self) -> int:
        return 0

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        return ()

    def reduce_held(self) -> None:
        pass

    def reduce_earlier(self) -> None:
        pass

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        return list(gradients)

    def settle(self) -> None:
        pass

    def reset(self, *, lost: bool) -> None:
        pass


Holder = Distributed | LocalModel


def holder_of(group: Distributed | None) -> Holder:
    """The holder of a model: the wrapper on several ranks, or this process alone."""
    return LocalModel() if group is None else group
