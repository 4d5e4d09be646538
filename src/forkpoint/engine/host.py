"""The interface of a model of any library to the engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.feature import Links
from forkpoint.engine.microbatches import CacheView, MicrobatchInputs
from forkpoint.losses.outputs import Head
from forkpoint.parallel.topology import Topology
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import Instruction
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media
from forkpoint.tree.forest import IntArray


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """Outputs of one microbatch's forward."""

    per_token: Mapping[str, Tensor]
    """[n] float32 (float64 for a float64 model) by name, one value for each entry of the inputs:
    the host's `head`, and "entropies" on request. Empty if the forward ended before the head."""
    roots: tuple[Tensor, ...]
    """Tensors that the backward starts from, with zero gradients, if no token is trained."""


# Routers
# ------------------------------------------------------------

RouterNote = Callable[[int, Tensor, Tensor], None]
"""Called with a router's index among those of the model, its logits [..., E], and the chosen
experts, int64 [..., k]."""


@dataclass(frozen=True, eq=False)
class FoundRouter:
    """A module that chooses experts."""

    name: str
    """Name of the module in the model."""
    module: nn.Module
    dimensions: int = 2
    """The number of dimensions of its scores [..., E]."""


ChooseExperts = Callable[[int, str, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with a router's index among those of the model, its name, its scores [T, E], and the
values and indices [T, k] of its chosen experts. Returns their replacements."""


class RouterSet:
    """The routers of a model in the order of its layers; by default there are none."""

    found: Sequence[FoundRouter] = ()
    """The routers of this rank's layers."""
    layers: int = 0
    """The number of layers with a router, on all stages; 0 for a model without experts."""
    first: int = 0
    """The index of the first of `found` among the routers of all stages."""

    @property
    def experts(self) -> int:
        """The number of experts that each router chooses from."""
        return 0


# The model
# ------------------------------------------------------------


class Host(Protocol):
    """A model that the engine can run microbatches through, forward and backward.

    `hosts.host.ModelHost` is one. A microbatch's instruction, inputs and kernel options are
    immutable. Only the view of the cache changes: the host reads ancestors from it and writes
    prefix cache to it.
    """

    model: nn.Module
    """The outermost module, as it was wrapped."""
    group: Distributed
    """The holders of the model on several ranks; none if only this rank has it."""
    topology: Topology
    """The ranks that hold the model, perhaps only this one."""
    links: Links
    """Links to ranks that have other blocks of the model (stages of a pipeline)."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def head(self) -> Head:
        """Name of the model's output for a token: "logprobs", or "values" of a critic."""
        ...

    @property
    def loss_dtype(self) -> torch.dtype:
        """float64 for a float64 model, else float32."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def empty_outputs(self) -> Tensor:
        """An empty output [1, 0, width] of the model's own forward on one token.

        Its graph reaches the parameters that ordinary training reaches. Called while the model is
        not entered.
        """
        ...

    def enter(self, changes: Changes, *, compiled: bool = True) -> None:
        """Make the changes to the model that `forward` needs. Without `compiled` all of it runs
        eagerly."""
        ...

    def forward(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: CacheView,
        config: Config,
        *,
        entropy: bool = False,
        hidden: Tensor | None = None,
    ) -> HeadOutputs:
        """Run a microbatch as far as `instruction.ends_at` says, with the kernels of `config`.

        `state`: the prefix cache to read and write. `entropy`: whether the head gives entropies.
        `hidden` [1, T, C]: input of the first block, instead of embeddings.
        """
        ...

    def encode(self, media: Sequence[Media]) -> tuple[tuple[Tensor, ...], ...]:
        """Encode media of one kind in one call. For each medium of R tokens, returns features [R,
        C] that replace embeddings, then those that are added after each of the first blocks, if
        any.
        """
        ...

    def encoder_shape(self) -> EncoderShape | None:
        """Sizes of the encoder of images or video, for prices of plans; None without one."""
        ...

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        """Positions of the tokens of a batch with media, int64 [A, T], if the model has several
        axes of positions. The first axis is the position in the rollout. None if there is no
        other."""
        ...

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        """Run the backward of a microbatch from `tensors`, which is empty if nothing is trained.

        `last`: whether it is the step's last backward, the only one that reduces gradients over
        ranks.
        """
        ...

    def watch_routers(
        self, note: RouterNote | None, changes: Changes, choose: ChooseExperts | None = None
    ) -> None:
        """Pass outputs of routers to `note`, and let `choose` replace their choices, until the
        changes are undone.

        With `note`, forwards that count routing (`Instruction.counts_routing`) and end in the last
        block end in that block's router, if it has one.
        """
        ...
