"""A model and its holders: its properties, and checks that it has been shown exact."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.feature import Links
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.calls import check_idle
from forkpoint.hosts.checkpointing import mlp_of
from forkpoint.hosts.compiled import Compiling
from forkpoint.hosts.entry import Entry, Library
from forkpoint.hosts.fingerprint import Computation, Fingerprint
from forkpoint.hosts.modules import cache_module_walks, every_module, every_parameter
from forkpoint.hosts.routers import ModelRouters
from forkpoint.hosts.topology import check_meshes, held_by_ranks, unwrapped
from forkpoint.hosts.torch_dist.stages import StageLinks, StageRanks
from forkpoint.hosts.wrappers import ForwardWrappers, autocasts_of, uncompiled
from forkpoint.losses.outputs import Head
from forkpoint.parallel.call import RankGroup
from forkpoint.parallel.topology import Topology
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.stages import least_sizes, stages_of_layers
from forkpoint.rollouts.batch import RolloutBatch


class HeldModel:
    """A causal language model or critic of a library, perhaps with adapters.

    The constructor raises UnsupportedError for anything that has not been shown exact.
    """

    def __init__(
        self,
        model: nn.Module,
        library: Library,
        *,
        compile_blocks: bool | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Collective if several ranks hold the model. Raises RankError if another rank refuses its
        part."""
        model = uncompiled(model)
        self._wrapper: nn.Module = model
        self.model: nn.Module = unwrapped(model)
        self.group: Distributed = Distributed()
        stage_ranks: StageRanks | None = None
        self._wrappers = ForwardWrappers()
        with Changes() as changes:
            if isinstance(self.model, nn.Module):
                self._take_off(changes)
                self.group, stage_ranks = held_by_ranks(self._wrapper, mesh, library.split_holder)
            self.topology: Topology = self.group.topology
            self._checked: tuple[int, bool, bool, bool] | None = None
            self._least_sizes: dict[str, Any] = {}
            self._mixtures: list[tuple[int, int]] = []
            """By stage: its number of routers, and their number of experts."""
            # Stages hold different blocks, so a single rank may refuse its part.
            read = partial(self._read_model, library, compile_blocks, mesh)
            shape = RankGroup(self.group.ranks).each(read, tells=(Exception,))
            self.links: Links = self._link_stages(stage_ranks, shape)

    def _read_model(
        self, library: Library, compile_blocks: bool | None, mesh: DeviceMesh | None
    ) -> ModelShape:
        """Read this rank's part of the model, or refuse it; arguments are those of `__init__`."""
        check_meshes(self.group, mesh)
        self.entry: Entry = library.entry(self.model, self.group.splits)
        self._fingerprint = Fingerprint(self.model, self.entry)
        check_idle(self.entry.core)
        self._check_model()
        self.group.check(self.model, training=True)
        context = self.topology.relations.get("context", ())
        if compile_blocks and self.group.splits:
            raise UnsupportedError(
                "Config(compile_blocks=True) asks for compiled decoder blocks, which are not "
                "supported where their modules are split over ranks. Leave compile_blocks out."
            )
        self.compiling: Compiling = Compiling(False if self.group.splits else compile_blocks)
        shape = self.entry.shape()  # which refuses parts of heads
        if context:
            self.entry.check_context_parallel(len(context))
        return shape

    def _link_stages(self, ranks: StageRanks | None, shape: ModelShape) -> Links:
        """The links to the previous and the next stage. Collective if the ranks are stages."""
        held, layers = self.entry.stage.layers
        if ranks is None:
            if len(held) < layers:
                raise UnsupportedError(
                    f"the model holds a stage of a pipeline ({len(held)} of {layers} layers), and "
                    "wrap was given no mesh with the dimension 'pp'. Give it the mesh that the "
                    "stage was made with."
                )
            return Links()
        if len(held) == layers:
            raise UnsupportedError(
                "the mesh has stages of a pipeline ('pp'), and fully_shard or "
                "DistributedDataParallel holds all layers of the model. Call "
                "forkpoint.cut(model, mesh) first, and shard or replicate what it leaves."
            )
        routers = self.entry.routers
        mixture = len(routers.found), routers.experts if routers.found else 0
        every = ranks.exchange((held, shape, mixture))
        stages = stages_of_layers([held for held, _, _ in every], layers)
        ranks.tied = self.entry.stage.tied
        # Stages plan equally, although split modules may be only on some of them.
        self._least_sizes = least_sizes([shape for _, shape, _ in every])
        self._mixtures = [mixture for _, _, mixture in every]
        hidden = shape.hidden, self._embedding.dtype, self.device
        multiple, idle = self.topology.length_multiple, self.entry.encoder.modules
        return StageLinks(ranks, stages, self.model, hidden, multiple, idle)

    # Facts
    # ------------------------------------------------------------

    @property
    def shape(self) -> ModelShape:
        context = len(self.topology.relations.get("context", (0,)))
        found = replace(self.entry.shape(), **self._least_sizes)
        return replace(found, compiled=self.compiles, context=context)

    def capabilities(self, shape: ModelShape) -> Capabilities:
        """Capabilities of the model in its present state, for the planner.

        A model that checkpoints itself has no early exits, because their exception would pass
        through the checkpoint inside the block.
        """
        able = Capabilities(
            leaves_early=shape.leaves_early,
            runs_ahead=self.device.type == "cuda",
            checkpoints=("none",),
            deals_segments=not shape.recurrent_layers,
            keeps_logits=self.entry.head.keeps_logits(shape.dtype_bytes),
        )
        if shape.checkpointed:
            return able
        selective = ("selective",) if all(map(mlp_of, self.blocks)) else ()
        return replace(able, checkpoints=("none", *selective, "full"))

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's blocks, in their order."""
        return self.entry.blocks

    @property
    def _embedding(self) -> Tensor:
        weight = self.entry.embeddings.weight
        assert isinstance(weight, Tensor)
        return weight

    def shallow(self, layers: int) -> nn.Module | None:
        """A model with a few such layers, random weights and a small vocabulary, to measure a
        layer.

        None if some layers are not trained, or are split over ranks, because their times differ.
        """
        trained = all(p.requires_grad for block in self.blocks for p in block.parameters())
        if not trained or self.group.splits:
            return None
        return self.entry.shallow(layers, self.device, self.compute_dtype)

    @property
    def compiles(self) -> bool:
        """Whether blocks run compiled."""
        return self.compiling.compiles(self.device, self._embedding.dtype)

    @property
    def head(self) -> Head:
        return self.entry.head.gives

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._embedding.dtype == torch.float64 else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype a step computes in: the narrowest of the parameters, or autocast's, if
        narrower."""
        # A wrapper may cast parameters.
        dtypes = {*self.group.param_dtypes} or {p.dtype for p in self.model.parameters()}
        # Autocast leaves float64 alone.
        if dtypes != {torch.float64}:
            kind = self.device.type
            if torch.is_autocast_enabled(kind):
                dtypes.add(torch.get_autocast_dtype(kind))
            dtypes |= {
                autocast.fast_dtype
                for autocast in autocasts_of(self.model)
                if autocast._enabled and autocast.device == kind
            }
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def rounding_dtype(self) -> torch.dtype:
        """The narrowest dtype that the model rounds to: `compute_dtype`, or one that its code
        converts to."""
        found = (self.compute_dtype, self.entry.code_dtype)
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(every_parameter(self.model))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Persistent buffers. Other buffers are computed from the configuration."""
        for where, module in every_module(self.model):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{where}.{name}", buffer

    def fingerprint(self) -> int:
        """A number that changes with anything of the model except its weights."""
        return self._fingerprint.now()

    def settings(self) -> Computation:
        """The model's present settings. Called after `prepare`."""
        return Computation(self.model, self.entry)

    @property
    def routers(self) -> ModelRouters:
        """The routers of the model in its present state."""
        found = self.entry.routers
        if self.links.stages:
            found.place(self._mixtures, self.links.index)
        return found

    # Checks
    # ------------------------------------------------------------

    def check(self, batch: RolloutBatch, *, training: bool, routed: bool = False) -> int:
        """Refuse a model or a batch that has not been shown exact, in the model's present state.

        `training`: whether gradients are computed. `routed`: whether the step has a router loss,
        which replaces the model's own. Returns the model's fingerprint.
        """
        check_idle(self.entry.core)
        # Since wrap, the model may have been compiled, moved, given adapters, or put into another
        # mode. If the fingerprint has changed, the checks that depend on it run again.
        encodes = bool(batch.media)
        idle = () if encodes else self.entry.encoder.modules
        self.entry.encoder.check_batch(batch)
        self.entry.check_batch(batch)
        if encodes and "stage" in self.topology.relations and self.topology.reduces:
            raise UnsupportedError(
                "the rollouts have media, which have not been shown exact on stages of a pipeline "
                "that fully_shard holds. Use DistributedDataParallel, or a mesh without the "
                "dimension 'pp'."
            )
        fingerprint = self.fingerprint()
        found = fingerprint, training, routed, encodes
        if found != self._checked:
            self._check_model()
            refusals.check_random(self.model, idle)
            if encodes:
                self.entry.encoder.check()
            if training:
                self.entry.check_training(routed=routed, encodes=encodes)
            self._checked = found
        refusals.check_parameters(self.model, sharded=self.topology.lockstep)
        self.group.check(self.model, training=training)
        if training:
            refusals.check_inference_mode()
            if {"stage", "data"}.isdisjoint(self.topology.relations):  # else ranks agree on it
                refusals.check_trainable(self.model, idle)
            refusals.check_parameter_hooks(self.model, self.entry.known_gradient_hooks)
        known = self._embedding.shape[0]
        if self.head == "logprobs":  # a critic predicts no tokens
            known = min(known, self.entry.head.width())
        batch.check_vocabulary(known)
        return fingerprint

    def _check_model(self) -> None:
        """Run the checks that depend neither on the batch nor on values of parameters."""
        self.entry.check_model()
        refusals.check_hooks(self.model, self.entry.known_hooks)
        refusals.check_embeddings(self.model)
        refusals.check_derived_weights(self.model)
        refusals.check_parameters(self.model, sharded=self.topology.lockstep)
        self.entry.head.check()

    def prepare(self, changes: Changes) -> None:
        """Remove wrappers of forwards that a step replaces or does not need.

        Called first in every step and comparison. Nothing else may change the model until these
        changes are undone.
        """
        self._take_off(changes)
        self.entry.prepare(changes)
        self.entry.counts.save(changes)

    def _take_off(self, changes: Changes) -> None:
        self.group.reshard()  # a forward of the user's may have left weights gathered
        cache_module_walks(changes)
        self._wrappers.take_off(self.model, changes)
