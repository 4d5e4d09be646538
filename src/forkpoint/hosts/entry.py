"""The interface of one library's models to `ModelHost`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Holder
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.heads import ModelHead
from forkpoint.hosts.routers import ModelRouters
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.stages import Stage
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media, ShownMedia
from forkpoint.tree.forest import IntArray


class Stock(Protocol):
    """The forward that users call, of a model or of a copy of one, for references."""

    model: nn.Module

    @property
    def is_critic(self) -> bool:
        """Whether it gives a value of each token instead of logits."""
        return False

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        """Logits [N, L, V], or a critic's values [N, L, 1].

        Args:
            ids_NL: int64.
            keep: int64 [n], the places whose logits are wanted: [N, n, V]. By default all.
            shown: the media of the rows; None: there are none.
        """
        ...

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        """Run the decoder now; until the changes are undone it gives the same outputs again.

        So `logits` can give those of some places at a time, by the model's own head.
        """
        ...

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        """Compute in `dtype` throughout, by code that takes any dtype, until the changes are
        undone. By default nothing changes: the code does so by itself."""

    def allow(self, dtype: torch.dtype, changes: Changes) -> None:
        """Let `logits` work, until the changes are undone, where the model is set to the attention
        of steps, and let no kernel round to fewer bits than `dtype` has."""


class HeldStage:
    """The stage of a pipeline that this rank holds of a model. By default no model is cut."""

    def __init__(self, layers: int) -> None:
        """`layers`: of the model."""
        self._count = layers

    @property
    def first_layers(self) -> int:
        """How many layers the first stage of a pipeline holds at least: those that read features
        of images, which lie there."""
        return 1

    @property
    def layers(self) -> tuple[range, int]:
        """The numbers of the layers that this rank holds, and how many the model has."""
        return range(self._count), self._count

    @property
    def tied(self) -> frozenset[nn.Parameter]:
        """Parameters that the first and the last stage both have."""
        return frozenset()

    def check(self) -> None:
        """Refuse a model that something else has cut, or not as a stage is cut."""

    def hold(self, stage: Stage) -> None:
        """Drop what other stages hold, unless that has been done.

        Raises UnsupportedError for models whose stages have not been shown exact, or that hold
        another stage.
        """
        raise UnsupportedError(
            "stages of a pipeline have not been shown exact with this library's models. Use a mesh "
            "without the dimension 'pp'."
        )

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Give a copy of a stage the modules of all stages. Collective over these.

        exchange: gives the values of all stages, from this one's.
        """
        raise NotImplementedError

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        """Let the stage run, until the changes are undone, and its first block read these; None if
        that reads embeddings."""
        raise NotImplementedError


class Encoder:
    """Modules of a model that run for images and video alone. By default there are none."""

    @property
    def modules(self) -> Collection[nn.Module]:
        """Modules that text does not run."""
        return ()

    def check(self) -> None:
        """Refuse modules that have not been shown exact."""

    def check_batch(self, batch: RolloutBatch) -> None:
        """Refuse media of a batch that have not been shown exact, one by one."""
        if batch.media:
            raise UnsupportedError(
                "the rollouts have media, and the library's models have been shown exact for text "
                "alone. Leave these rollouts out, or train them by ordinary steps."
            )

    def encode(self, media: Sequence[Media]) -> tuple[tuple[Tensor, ...], ...]:
        """As `engine.host.Host.encode`; runs within the core's forward."""
        raise NotImplementedError

    def shape(self) -> EncoderShape | None:
        """As `engine.host.Host.encoder_shape`."""
        return None

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        """As `engine.host.Host.positions`."""
        raise NotImplementedError

    def sample(self, media: Sequence[Media]) -> Media:
        """A part of one of these, to compare the model on, of as few tokens as can be."""
        raise NotImplementedError


class ExpertCounts:
    """Buffers in which training counts tokens for each expert. By default there are none."""

    @property
    def kept(self) -> bool:
        """Whether there are such buffers."""
        return False

    def save(self, changes: Changes) -> None:
        """Restore the buffers when the changes are undone."""

    def add(self, logical_LE: Tensor) -> None:
        """Add a step's counts, int64 [layers, experts], to what is restored."""


class Entry(Protocol):
    """One library's model, while a policy has it.

    It is made of the model without DistributedDataParallel, when wrappers of forwards are taken
    off. Making it refuses a model that is none of the library's. Members with a value or a body are
    those of a library whose models have no encoder of images and no experts.
    """

    core: Any
    """The module whose forward is the decoder's and then the head's. Adapters may lie around it."""
    head: ModelHead
    stock: Stock
    stage: HeldStage
    encoder: Encoder = Encoder()
    counts: ExpertCounts = ExpertCounts()
    context_argument: str
    """The call argument in which layers pass on the microbatch."""
    known_hooks: tuple[Definition, ...] = ()
    """Hooks of modules that leave a microbatch's values as they are."""
    known_gradient_hooks: tuple[Definition, ...] = ()
    """Hooks of parameters that holders take off while a step runs."""
    registries: tuple[Mapping[str, Any], ...] = ()
    """Functions of the library that models are set to by name."""

    # Parts of the model

    @property
    def decoder(self) -> nn.Module:
        """The part of the core below its head."""
        ...

    @property
    def embeddings(self) -> nn.Module:
        """The input embeddings; the weight's rows are the tokens that are known."""
        ...

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's blocks, in their order."""
        ...

    @property
    def final_norms(self) -> Sequence[nn.Module]:
        """Modules that the decoder runs between its last block and the head."""
        return ()

    @property
    def routers(self) -> ModelRouters:
        """The routers of the model in its present state."""
        return ModelRouters()

    # Facts

    def configs(self) -> list[Any]:
        """Configurations, whose attributes decide what the model computes."""
        ...

    def shape(self) -> ModelShape:
        """Sizes of the part that this rank computes, in the model's present state."""
        ...

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A model of few such layers, of random weights and few tokens, in training mode."""
        ...

    @property
    def checkpointed(self) -> bool:
        """Whether the model itself recomputes activations of some layer."""
        ...

    @property
    def code_dtype(self) -> torch.dtype:
        """The narrowest dtype that the model's code computes in, for weights of any dtype: float32
        in norms, or a narrower one."""
        return torch.float32

    # Checks, which raise UnsupportedError

    def check_model(self) -> None:
        """The model's code and modules have been shown exact."""
        ...

    def check_training(self, *, routed: bool, encodes: bool) -> None:
        """Settings are exact in backwards; `routed`: the step has a router loss; `encodes`: the
        encoder runs as well."""
        ...

    def check_batch(self, batch: RolloutBatch) -> None:
        """The model computes each token of these rollouts from those before it alone."""
        ...

    def check_context_parallel(self, ranks: int) -> None:
        """Layers have been shown exact where the places of each microbatch are dealt out to so many
        ranks."""

    # Microbatches

    def prepare(self, changes: Changes) -> None:
        """Make forwards return logits, until the changes are undone."""

    def attach(self, changes: Changes) -> None:
        """Let attention and recurrences run microbatches, until the changes are undone."""
        ...

    def run(self, ids_1T: Tensor | None, positions_1T: Tensor | None, context: Any) -> Any:
        """Call the outermost module with a `CallContext`, or without tokens with an
        `EncoderContext`; gives what the core's forward returns."""
        ...

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states [1, T, C] of the decoder, from the arguments of a call of the core."""
        ...


@dataclass(frozen=True)
class Library:
    """A library of models."""

    entry: Callable[[nn.Module, Sequence[Any]], Entry]
    """Makes the entry of a model and its modules that are split over ranks."""
    stock: Callable[[nn.Module], Stock]
    """The stock forward of a model, or of a copy of one."""
    split_holder: Callable[[nn.Module], Holder | None]
    """The holder of a model that the library has split over ranks; None where it has not."""
    unsplit: Callable[[nn.Module, Sequence[Any]], None]
    """Makes modules of a copy whole, which the library has split over ranks in the model."""
