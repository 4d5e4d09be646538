"""A model on this device, entered without editing it, whatever library it comes from.

While microbatches run, the forward of the model's core (its decoder and head) is replaced: the head
then computes log-probs or values of chosen places instead of logits of all. Attention is replaced
by the library's entry. Everything else is the model's own code, and all is put back after.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.compiling import Compiling
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.host import HeadOutputs, RouteHolder, RouterNote
from forkpoint.engine.links import Links
from forkpoint.engine.microbatches import CacheView, MicrobatchInputs
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.calls import (
    CallContext,
    EncoderContext,
    begin_forward,
    check_idle,
    claim,
    keep_to_this_thread,
    refuse_call,
    refuse_calls,
)
from forkpoint.hosts.checkpointing import checkpoint_blocks, mlp_of
from forkpoint.hosts.compiled import CompiledBlocks
from forkpoint.hosts.early_exit import end_in_last_block
from forkpoint.hosts.entry import Entry, Library
from forkpoint.hosts.fingerprint import Computation, Fingerprint
from forkpoint.hosts.modules import (
    add_hook,
    cache_module_walks,
    every_module,
    every_parameter,
)
from forkpoint.hosts.routers import ModelRouters
from forkpoint.hosts.topology import check_meshes, held_by_ranks, unwrapped
from forkpoint.hosts.torch_dist.stages import StageLinks, StageRanks
from forkpoint.hosts.wrappers import ForwardWrappers, autocasts_of, entered, set_forward, uncompiled
from forkpoint.losses.outputs import Head
from forkpoint.parallel.group import RankGroup
from forkpoint.parallel.topology import Topology
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import BLOCKS, BOUNDARY, FORWARD, Instruction
from forkpoint.plan.stages import least_sizes, stages_of_layers
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media, ShownMedia
from forkpoint.tree.forest import IntArray


class ModelHost:
    """A causal language model or critic, perhaps with adapters, that a library's entry describes.

    Raises UnsupportedError, naming what it is, for anything that has not been shown exact.
    """

    def __init__(
        self,
        model: nn.Module,
        library: Library,
        *,
        compile_blocks: bool | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Collective where several ranks hold the model. Raises RankError if another rank refuses
        it."""
        model = uncompiled(model)
        self._wrapper: nn.Module = model
        self.model: nn.Module = unwrapped(model)
        self.group: Distributed = Distributed()
        stage_ranks: StageRanks | None = None
        self._wrappers = ForwardWrappers()
        self._autocasts: tuple[torch.autocast, ...] = ()
        with Changes() as changes:
            if isinstance(self.model, nn.Module):
                self._take_off(changes)
                self.group, stage_ranks = held_by_ranks(self._wrapper, mesh, library.split_holder)
            self.topology: Topology = self.group.topology
            self._checked: tuple[int, bool, bool, bool] | None = None
            self._watched: ModelRouters | None = None
            """Routers that a step takes statistics of."""
            self._recomputes = False
            self._changes: Changes | None = None
            """Of the step that runs; a microbatch's own are undone at its end."""
            self._least_sizes: dict[str, Any] = {}
            self._mixtures: list[tuple[int, int]] = []
            """By stage: how many routers it has, and among how many experts these choose."""
            # Stages hold different blocks, so that one rank alone may refuse its part.
            read = partial(self._read_model, library, compile_blocks, mesh)
            shape = RankGroup(self.group.ranks).each(read, tells=(Exception,))
            self.links: Links = self._link_stages(stage_ranks, shape)

    def _read_model(
        self, library: Library, compile_blocks: bool | None, mesh: DeviceMesh | None
    ) -> ModelShape:
        """Read this rank's part of the model, or refuse it; arguments are those of `__init__`."""
        check_meshes(self.group, mesh)
        splits = self.group.splits
        self.entry: Entry = library.entry(self.model, splits)
        self._fingerprint = Fingerprint(self.model, self.entry)
        check_idle(self.entry.core)
        self._check_model()
        self.group.check(self.model, training=True)
        context = self.topology.relations.get("context", ())
        staged = "stage" in self.topology.relations
        if compile_blocks and (why := self._why_eager(staged=staged, context=bool(context))):
            raise UnsupportedError(
                "Config(compile_blocks=True) asks for compiled decoder blocks, which have not "
                f"been shown exact {why}. Leave compile_blocks out."
            )
        # With context parallelism they have not been timed on GPUs, so that they are asked for.
        eager = bool(splits) or staged or (bool(context) and compile_blocks is None)
        self.compiling: Compiling = Compiling(False if eager else compile_blocks)
        self._blocks = CompiledBlocks(
            self.compiling, self.entry.context_argument, self.topology.places
        )
        shape = self.entry.shape()  # which refuses parts of heads
        if context:
            self.entry.check_context_parallel(shape, len(context))
        return shape

    def _why_eager(self, *, staged: bool, context: bool) -> str:
        """Where compiled blocks have not been shown exact, as far as ranks have parts."""
        if self.group.splits:
            return "where their modules are split over ranks"
        if context and self.entry.checkpointed:
            return "with context parallelism of a model that checkpoints itself"
        if context and self.entry.shape().recurrent_layers:
            return "with context parallelism of layers that carry a state"
        return "on stages of a pipeline" if staged else ""

    def _link_stages(self, ranks: StageRanks | None, shape: ModelShape) -> Links:
        """The links of a stage with those before and after it. Collective if the ranks are
        stages."""
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
        # Stages plan alike, and modules that ranks split may lie on some of them alone.
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

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the model in its present state, which plans depend on.

        Without early exits where the model checkpoints itself: their exception would pass through
        the checkpoint, which lies within the block.
        """
        ahead = self.device.type == "cuda"
        shape = self.shape
        deals = not shape.recurrent_layers
        able = Capabilities(
            leaves_early=shape.leaves_early,
            runs_ahead=ahead,
            checkpoints=("none",),
            deals_segments=deals,
        )
        if self.entry.checkpointed:
            return able
        if self.compiles and not self.topology.places.whole:
            return able  # not shown exact with checkpoints
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

    @property
    def _vocab_size(self) -> int:
        """How many tokens the model knows, as an input and (of a language model) as a label."""
        known = self._embedding.shape[0]
        # A critic predicts no tokens.
        return min(known, self.entry.head.width()) if self.head == "logprobs" else known

    def shallow(self, layers: int) -> nn.Module | None:
        """A model of few such layers, of random weights and few tokens, to measure a layer.

        None where layers are not all trained, or split over ranks: another model takes other times.
        """
        trained = all(p.requires_grad for block in self.blocks for p in block.parameters())
        if not trained or self.group.splits:
            return None
        return self.entry.shallow(layers, self.device, self.compute_dtype)

    @property
    def compiles(self) -> bool:
        """Whether blocks run compiled, which takes other times."""
        return self.compiling.reason_for_eager(self.device, self._embedding.dtype) is None

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
        """The narrowest dtype that the model rounds to anywhere: that of compute, or one that its
        code converts to."""
        found = (self.compute_dtype, self.entry.code_dtype)
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(every_parameter(self.model))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are saved with the model; others are made of its configuration."""
        for where, module in every_module(self.model):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{where}.{name}", buffer

    def fingerprint(self) -> int:
        """A number that stays the same while nothing but the model's weights changes."""
        return self._fingerprint.now()

    def settings(self) -> Computation:
        """The model's present settings. Called after `prepare`."""
        return Computation(self.model, self.entry)

    # Checks
    # ------------------------------------------------------------

    def check(self, batch: RolloutBatch, *, training: bool, routed: bool = False) -> int:
        """Refuse what has not been shown exact, in the model's present state and for this batch.

        `training`: whether gradients are computed. `routed`: whether the step has a router loss,
        so that the model's own is in it. Returns the model's fingerprint.
        """
        check_idle(self.entry.core)
        # Since it was wrapped the model may have been compiled, moved, given adapters, or put into
        # another mode. What the fingerprint covers is looked at again where that has changed.
        encodes = bool(batch.media)
        idle = () if encodes else self.entry.encoder.modules
        self.entry.encoder.check_batch(batch)
        self.entry.check_batch(batch)
        found = (self.fingerprint(), training, routed, encodes)
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
            if "stage" not in self.topology.relations:  # else stages agree on it
                refusals.check_trainable(self.model, idle)
            refusals.check_parameter_hooks(self.model, self.entry.known_gradient_hooks)
        batch.check_vocabulary(self._vocab_size)
        return found[0]

    def _check_model(self) -> None:
        """Refuse what does not depend on the batch or on the values of parameters."""
        self.entry.check_model()
        refusals.check_hooks(self.model, self.entry.known_hooks)
        refusals.check_embeddings(self.model)
        refusals.check_derived_weights(self.model)
        refusals.check_parameters(self.model, sharded=self.topology.lockstep)
        self.entry.head.check()

    # Microbatches
    # ------------------------------------------------------------

    def prepare(self, changes: Changes) -> None:
        """Remove wrappers of the user's that a step replaces or does not need.

        Called first in every step and comparison. Nothing else may change the model until these
        changes are undone.
        """
        self._take_off(changes)
        self.entry.prepare(changes)
        self.entry.counts.save(changes)

    def add_counts(self, logical_LE: Tensor) -> None:
        """Add a step's counts of experts, int64 [layers, experts], to the model's buffers. The
        model is prepared."""
        if self.topology.places.rank == 0:  # optimizers add up those of ranks with parts of a batch
            routers = self.routers
            self.entry.counts.add(logical_LE[routers.first :][: len(routers.found)])

    def _take_off(self, changes: Changes) -> None:
        self.group.reshard()  # a forward of the user's may have left weights gathered
        cache_module_walks(changes)
        self._wrappers.take_off(self.model, changes)

    def enter(self, changes: Changes, *, compiled: bool = True) -> None:
        core = self.entry.core
        claim(core, changes)
        covered = set_forward(core)
        changes.set(vars(self), "_autocasts", covered.autocasts if covered else ())
        # Before attention is changed: who calls the model meanwhile is refused here.
        changes.replace_forward(core, self._core_forward)
        if self._wrapper is not self.model:
            changes.replace_forward(self._wrapper, refuse_call)
        self._recomputes = self.entry.checkpointed
        if self.device.type == "cuda":
            # Kernels that are not torch's own are launched on the current device.
            current = torch.cuda.device(self.device)
            current.prev_idx = torch.cuda.current_device()
            changes.later(current.__exit__, None, None, None)
            current.__enter__()
        if not self.group.ranks.is_alone:
            self.group.enter(changes, self.blocks, ())
            self.entry.head.enter(changes)
            refuse_calls((self.model, *self.blocks), changes)
        self.entry.attach(changes)
        if compiled and self.compiles:
            self._blocks.enter(self.blocks, changes)
        changes.set(vars(self), "_changes", changes)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it `forward` works; for use outside of steps."""
        with Changes() as changes:
            self.enter(changes)
            yield

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
        if not self.links.ends_here:
            # The next stage reads what the last block here gives.
            instruction = instruction._replace(ends_at=BLOCKS)
        policy = inputs.microbatch.checkpointing
        if policy != "none" and self._recomputes:
            raise UnsupportedError(
                "the model checkpoints itself (gradient_checkpointing) and the plan does as well "
                f"(checkpointing={policy!r}); disable one of them."
            )
        if policy != "none" and self.compiles and not self.topology.places.whole:
            raise UnsupportedError(
                f"blocks are compiled and checkpointed (checkpointing={policy!r}), which has not "
                "been shown exact with context parallelism. Leave compile_blocks out."
            )
        assert self._changes is not None, "the model has not been entered"
        # What a repeated forward saves is dropped; there is nothing to checkpoint.
        if instruction.operation == FORWARD and not instruction.keeps_graph:
            policy = "none"
        early = instruction.ends_at_boundary
        blocks = self.blocks
        last = len(blocks) - 1
        block = blocks[last]
        mark = self._changes.mark
        routers = self._watched if early and instruction.counts_routing else None
        at_router = routers is not None and routers.end_within(block, self._changes)
        context = CallContext(
            instruction,
            inputs,
            state,
            config,
            entropy=entropy,
            ends_in=frozenset(block.modules() if early and not at_router else ()),
            places=self.topology.places.of(inputs.microbatch),
        )
        checkpoint_blocks(blocks, policy, self._changes, but=last if early else None)
        if early:
            end_in_last_block(block, self.entry.final_norms, self._changes)
        if self.links.stages:
            self.entry.stage.set_hidden(hidden, self._changes)
        begin_forward(context, self._changes)
        # Through the outermost module: FSDP and adapters work in its hooks and its forward.
        outputs = self.entry.run(inputs.input_ids, inputs.position_ids, context)
        self._changes.undo(mark)
        self.group.end_forward()
        per_token, entries = outputs["per_token"], inputs.own_entries
        joined = context.places.joined(per_token, entries, inputs.entries)
        return HeadOutputs(joined, outputs["roots"])

    def encode(self, media: Sequence[Media]) -> tuple[tuple[Tensor, ...], ...]:
        outputs = self.entry.run(None, None, EncoderContext(media))
        self.group.end_forward()
        return outputs["roots"]

    def encoder_shape(self) -> EncoderShape | None:
        return self.entry.encoder.shape()

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        return self.entry.encoder.positions(batch)

    def _core_forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Stands in for the core's forward, under the autocast that is set around that.

        Returns the fields of HeadOutputs: fully_shard finds tensors in dicts and tuples, and not in
        dataclasses.
        """
        context = kwargs.get(self.entry.context_argument)
        with entered(self._autocasts):
            if isinstance(context, EncoderContext):
                return {"per_token": {}, "roots": self.entry.encoder.encode(context.media)}
            if not isinstance(context, CallContext):
                refuse_call()
            top = self.entry.decode(*args, **kwargs)
            if context.instruction.ends_at in (BOUNDARY, BLOCKS):
                return {"per_token": {}, "roots": (top,)}
            hidden_nC = top.reshape(-1, top.shape[-1]).index_select(0, context.inputs.head_index)
            found = self.entry.head.forward(hidden_nC, context)
            # Backwards without trained tokens reach the head as well, where ranks gather it.
            more = tuple(found.values()) if self.topology.lockstep else ()
            return {"per_token": found, "roots": (top, *more)}

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        if last:
            self.group.last()
        if tensors:
            torch.autograd.backward(tensors, gradients)

    # Routers
    # ------------------------------------------------------------

    @property
    def routers(self) -> ModelRouters:
        """The routers of the model in its present state."""
        found = self.entry.routers
        if self.links.stages:
            found.place(self._mixtures, self.links.index)
        return found

    def watch_routers(
        self, note: RouterNote | None, changes: Changes, holder: RouteHolder | None = None
    ) -> None:
        routers = self.routers
        if note is not None:
            changes.set(vars(self), "_watched", routers)
        routers.enter(note, changes, holder)

    # Stock forwards, for comparisons
    # ------------------------------------------------------------

    def stock(self, ids_NL: Tensor, shown: ShownMedia | None = None) -> Tensor:
        """Logits [N, L, V] (a critic's values [N, L, 1]) of the model's own forward, of rows with
        these media. Called while the model is not entered."""
        if not self.links.stages:
            return self.entry.stock.logits(ids_NL, shown=shown)
        return self._stock_of_stages(ids_NL, shown)

    def _stock_of_stages(self, ids_NL: Tensor, shown: ShownMedia | None) -> Tensor:
        """Outputs of the last stage, which all run their blocks for. Collective."""
        links, tops = self.links, list[Tensor]()
        with Changes() as changes:
            hidden = None if links.begins_here else links.receive_hidden(tuple(ids_NL.shape))
            self.entry.stage.set_hidden(hidden, changes)
            if not links.ends_here:
                # After features of images that enter behind the last block here.
                last = [*self.blocks, *self.entry.final_norms][-1]
                hooks: Any = last._forward_hooks
                add_hook(changes, hooks, lambda _, __, top: tops.append(top))
            outputs = self.entry.stock.logits(ids_NL, shown=shown)
        if tops:
            links.send_hidden(tops[0])
        outputs = outputs.detach().contiguous()
        links.end_pass([outputs])
        return outputs

    def allow_stock(self, changes: Changes) -> None:
        """Let `stock` work whatever the model is set to, on this thread alone, until the changes
        are undone."""
        keep_to_this_thread((self.entry.core, self.entry.decoder), changes)
        self.entry.stock.allow(self.rounding_dtype, changes)

    def empty_outputs(self) -> Tensor:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with Changes() as changes:
            self.entry.stock.allow(self.rounding_dtype, changes)
            return self.stock(token)[:, :0]
