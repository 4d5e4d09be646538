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
    """The unmodified forward of a model or a copy, for comparisons."""

    model: nn.Module

    @property
    def is_critic(self) -> bool:
        """Whether the model gives a value for each token instead of logits."""
        return False

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        """Logits [N, L, V], or a critic's values [N, L, 1].

        Args:
            ids_NL: int64.
            keep: int64 [n], positions of the wanted logits: the result is [N, n, V]. Default: all.
            shown: the media of the rows; None: no media.
        """
        ...

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        """Run the decoder now. Until the changes are undone, it returns these outputs again.

        So the model's own head can compute `logits` of a few positions at a time.
        """
        ...

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        """Select code that computes in `dtype` throughout, until the changes are undone. By default
        nothing changes, because the model's code takes any dtype."""

    def allow(self, dtype: torch.dtype, changes: Changes) -> None:
        """Let `logits` run even if the model is set to forkpoint's attention, and exclude kernels
        that round to fewer bits than `dtype` has, until the changes are undone."""


class HeldStage:
    """The stage of a pipeline that this rank holds. By default it is the whole model."""

    def __init__(self, layers: int) -> None:
        """`layers`: number of layers of the model."""
        self._count = layers

    @property
    def first_layers(self) -> int:
        """Least number of layers of the first stage. It must hold the layers that read features of
        images."""
        return 1

    @property
    def layers(self) -> tuple[range, int]:
        """Indices of the layers that this rank holds, and the number of layers of the model."""
        return range(self._count), self._count

    @property
    def tied(self) -> frozenset[nn.Parameter]:
        """Parameters that the first and the last stage both have."""
        return frozenset()

    def check(self) -> None:
        """Refuse a model that was cut in a way that has not been shown exact."""

    def hold(self, stage: Stage) -> None:
        """Drop the modules of other stages, unless that has been done.

        Raises UnsupportedError if stages of the model have not been shown exact, or if it holds
        another stage.
        """
        raise UnsupportedError(
            "stages of a pipeline have not been shown exact with this library's models. Use a mesh "
            "without the dimension 'pp'."
        )

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Add the modules of all other stages to a copy of a stage. Collective over stages.

        exchange: takes this stage's value and returns those of all stages.
        """
        raise NotImplementedError

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        """Allow calls of the stage until the changes are undone. `hidden_1TC`: input of its first
        block; None if that reads embeddings."""
        raise NotImplementedError


class Encoder:
    """Modules of a model that run only for images and video. By default there are none."""

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
        """As `engine.host.Host.encode`. Called within the core's forward."""
        raise NotImplementedError

    def shape(self) -> EncoderShape | None:
        """As `engine.host.Host.encoder_shape`."""
        return None

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        """As `engine.host.Host.positions`."""
        raise NotImplementedError

    def sample(self, media: Sequence[Media]) -> Media:
        """A part of one of these media with as few tokens as possible, for the self-check."""
        raise NotImplementedError


class ExpertCounts:
    """Buffers in which training counts tokens for each expert. By default there are none."""

    @property
    def kept(self) -> bool:
        """Whether the model has such buffers."""
        return False

    def save(self, changes: Changes) -> None:
        """Restore the buffers when the changes are undone."""

    def add(self, logical_LE: Tensor) -> None:
        """Add a step's counts, int64 [layers, experts], to the values that `save` restores."""


class Entry(Protocol):
    """Access to the parts of one model of a library.

    The model is given without DistributedDataParallel and without wrappers of forwards. The
    constructor refuses models of other libraries. Default values are for models without encoders
    and experts.
    """

    core: Any
    """The module whose forward runs the decoder and then the head. It may be inside adapters."""
    head: ModelHead
    stock: Stock
    stage: HeldStage
    encoder: Encoder = Encoder()
    counts: ExpertCounts = ExpertCounts()
    context_argument: str
    """Name of the call argument in which layers pass on the microbatch."""
    known_hooks: tuple[Definition, ...] = ()
    """Hooks of modules that do not change the values of a microbatch."""
    known_gradient_hooks: tuple[Definition, ...] = ()
    """Hooks of parameters that holders remove during a step."""
    registries: tuple[Mapping[str, Any], ...] = ()
    """Functions of the library that a model's configuration selects by name."""

    # Parts of the model

    @property
    def decoder(self) -> nn.Module:
        """The part of the core below its head."""
        ...

    @property
    def embeddings(self) -> nn.Module:
        """The input embeddings. Their weight has one row for each token id."""
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
        """Configurations that the model's code reads."""
        ...

    def shape(self) -> ModelShape:
        """Sizes of the part that this rank computes, in the model's present state."""
        ...

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A model with a few such layers, random weights and a small vocabulary, in training
        mode."""
        ...

    @property
    def checkpointed(self) -> bool:
        """Whether the model itself recomputes activations of some layer."""
        ...

    @property
    def code_dtype(self) -> torch.dtype:
        """The narrowest dtype that the model's code converts to for weights of any dtype: float32
        (in norms) or narrower."""
        return torch.float32

    # Checks, which raise UnsupportedError

    def check_model(self) -> None:
        """Refuse code and modules that have not been shown exact."""
        ...

    def check_training(self, *, routed: bool, encodes: bool) -> None:
        """Refuse settings whose backwards are not exact. `routed`: the step has a router loss.
        `encodes`: the encoder runs."""
        ...

    def check_batch(self, batch: RolloutBatch) -> None:
        """Refuse rollouts in which the model's outputs depend on later tokens or on the rollout's
        length."""
        ...

    def check_context_parallel(self, ranks: int) -> None:
        """Refuse layers that have not been shown exact with context parallelism over `ranks`
        ranks."""

    # Microbatches

    def prepare(self, changes: Changes) -> None:
        """Make forwards return logits, until the changes are undone."""

    def attach(self, changes: Changes) -> None:
        """Replace attention and recurrences by those of microbatches, until the changes are
        undone."""
        ...

    def run(self, ids_1T: Tensor | None, positions_1T: Tensor | None, context: Any) -> Any:
        """Call the outermost module with a `CallContext`, or with an `EncoderContext` and without
        tokens. Returns the output of the core's forward."""
        ...

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states [1, T, C] of the decoder, from the arguments of a call of the core."""
        ...


@dataclass(frozen=True)
class Library:
    """A library of models."""

    entry: Callable[[nn.Module, Sequence[Any]], Entry]
    """Makes the entry of a model, given its modules that are split over ranks."""
    stock: Callable[[nn.Module], Stock]
    """Makes the stock forward of a model or a copy."""
    split_holder: Callable[[nn.Module], Holder | None]
    """Makes the holder of a model that the library has split over ranks; None if it has not."""
    unsplit: Callable[[nn.Module, Sequence[Any]], None]
    """Lets a whole copy run on one rank, if the library has split the model over ranks."""
