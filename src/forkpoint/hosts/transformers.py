"""Stock transformers models, entered without editing them.

Two things are changed while microbatches run, and put back after: the name of the attention
    function in the model's configuration, and the forward of the causal language model (or critic)
    itself, whose head then computes what is asked for instead of logits. Everything else is the
    model's own code.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.boundary import boundary
from forkpoint.engine.changes import Changes
from forkpoint.engine.compiling import Compiling
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.host import HeadOutputs, RouteHolder, RouterNote
from forkpoint.engine.microbatches import KernelOptions, MicrobatchInputs, MicrobatchState
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.arguments import (
    CONTEXT_ARGUMENT,
    CallContext,
    refuse_call,
    taken_context,
)
from forkpoint.hosts.checkpointing import checkpoint_blocks, has_mlp
from forkpoint.hosts.compiled import CompiledBlocks
from forkpoint.hosts.computation import Computation, Computations
from forkpoint.hosts.coverings import Coverings, entered, set_forward, uncompiled
from forkpoint.hosts.distributed import unwrapped
from forkpoint.hosts.early_end import EarlyEnd, end_in_last_block
from forkpoint.hosts.families import FAMILIES, Family
from forkpoint.hosts.fingerprint import Fingerprint
from forkpoint.hosts.foreign_calls import (
    ForwardConfig,
    begin_forward,
    check_idle,
    claim,
    refuse_calls,
)
from forkpoint.hosts.heads import LogprobHead, ModelHead, ValueHead
from forkpoint.hosts.linear_attention import (
    check_recurrent_modules,
    recurrent_modules,
    run_recurrences,
)
from forkpoint.hosts.local_shapes import local_shape
from forkpoint.hosts.modules import (
    ATTENTION_NAME,
    configurations,
    every_module,
    every_parameter,
    list_once,
    plain_class,
)
from forkpoint.hosts.routers import Routers
from forkpoint.hosts.supported import supported_model
from forkpoint.hosts.tensor_parallel import (
    ModelParallel,
    check_compile_blocks,
    held_by_ranks,
)
from forkpoint.losses.outputs import Head
from forkpoint.ops.attention import shared_attention
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.mixtures import GROUPED, expert_activations
from forkpoint.plan.program import BLOCKS, BOUNDARY, FORWARD, Instruction
from forkpoint.rollouts.batch import RolloutBatch


def forkpoint_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer of a microbatch.

    query [B, H, L, D], key [B, K, L, D], value [B, K, L, E] hold the microbatch's tokens; the
    result is [B, L, H, E].

    In a compiled block this much is compiled. Compiled code wants gradients of what it gives
    contiguous in the order of dimensions that it gave. Attention's come as [B, L, H, D], so heads
    are put last on this side; on the other each gradient would be copied.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _attend(module, q, k, v, attention_mask, *args, **kwargs)


@torch.compiler.disable()
def _attend(
    module: nn.Module,
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same, not compiled: a microbatch's context and its tables are others at every
    microbatch."""
    context = taken_context(module, "its attention function", kwargs)
    if attention_mask is not None or dropout:
        found = "a mask" if attention_mask is not None else f"dropout {dropout}"
        raise UnsupportedError(
            f"{type(module).__name__} asks for {found} in attention; forkpoint knows causal "
            "attention without masks of one's own and without dropout. Set attention_dropout to 0 "
            "and give no attention_mask."
        )
    batch, length, _, dim = q_BLHD.shape
    q_THD, k_TKD, v_TKE = (x.flatten(0, 1) for x in _autocast(q_BLHD, k_BLKD, v_BLKE))
    k_TKD = boundary(k_TKD, (module, "k"), context.state.capture)
    v_TKE = boundary(v_TKE, (module, "v"), context.state.capture)
    if module in context.ends_in:
        raise EarlyEnd((k_TKD, v_TKE))
    window = sliding_window or 0
    o_THE, _ = shared_attention(
        q_THD,
        k_TKD,
        v_TKE,
        table=context.state.table(window, q_BLHD.device),
        cache=context.state.ancestors(module),
        sinks=s_aux,
        scale=dim**-0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        window=window,
        kernel=context.kernels.attention,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return o_THE.view(batch, length, *o_THE.shape[1:]), None


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As torch's own attention does, which is among the operations that autocast casts."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


class TransformersHost:
    """A causal language model or critic of transformers, perhaps inside a peft model.

    Raises UnsupportedError, naming what it is, for anything that has not been shown exact.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compile_blocks: bool | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`compile_blocks` as in Config, `mesh` as in `wrap`. Collective where several ranks hold
        the model."""
        model = uncompiled(model)
        self._wrapper: nn.Module = model
        model = self._model = unwrapped(model)
        self._group: Distributed | None = None
        self._coverings = Coverings()
        self._autocasts: tuple[torch.autocast, ...] = ()
        with Changes() as changes:
            if isinstance(model, nn.Module):
                self.prepare(changes)
            if isinstance(model, nn.Module):
                self._group = held_by_ranks(self._wrapper, mesh)
            self._look_at(model, compile_blocks)

    def _look_at(self, model: nn.Module, compile_blocks: bool | None) -> None:
        """Refuse a model that has not been shown exact, and find its parts."""
        self.causal: PreTrainedModel = supported_model(model)
        self.family: Family = FAMILIES[self.causal.config.model_type]
        critic = plain_class(self.causal).__name__ == self.family.critic_class
        self._head: ModelHead = (
            ValueHead(self.causal) if critic else LogprobHead(self.causal, self.family)
        )
        self._fingerprint = Fingerprint(model)
        self._computations = Computations(model)
        self._checked: tuple[int, bool, bool] | None = None
        self._watched: Routers | None = None
        """Routers that a step takes statistics of."""
        check_idle(self.causal)
        self._check_model()
        if self._group is not None:
            self._group.check(self.model, training=True)
        refusals.check_rotary_buffers(self.causal)  # here alone: it waits for the device
        if isinstance(self._group, ModelParallel):
            compile_blocks = check_compile_blocks(compile_blocks)
        self.compiling: Compiling = Compiling(compile_blocks)
        self._blocks = CompiledBlocks(
            cast(nn.ModuleList, self.causal.base_model.layers), self.compiling
        )
        size = next(self.causal.parameters()).element_size()
        self._recomputes = False
        self._changes: Changes | None = None
        """Of the step that runs; a microbatch's own are undone at its end."""
        width = {"vocab": self._head.width()} if critic else {}
        self._sizes = self.causal.config.to_dict()
        self._shape = ModelShape.from_config(self._sizes, dtype_bytes=size, **width)
        if isinstance(self._group, ModelParallel):
            self._shape = local_shape(self._shape, self.causal, self._group.splits)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def group(self) -> Distributed | None:
        return self._group

    @property
    def _is_sharded(self) -> bool:
        return self._group is not None and self._group.lockstep

    @property
    def shape(self) -> ModelShape:
        checkpointed = refusals.checkpointed(self.causal)
        shape = replace(self._shape, checkpointed=checkpointed, compiled=self.compiles)
        implementation = getattr(self.causal.config, "_experts_implementation", None)
        if shape.expert_layers and implementation != GROUPED:
            grouped, own = (expert_activations(self._sizes, x) for x in (GROUPED, implementation))
            kept = shape.expert_activations * own // grouped
            shape = replace(shape, expert_activations=kept)
        return shape

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks, in their order."""
        return self._blocks.blocks

    @property
    def compiles(self) -> bool:
        """Whether its blocks are compiled."""
        return self.compiling.reason_for_eager(self.device, self._embedding.dtype) is None

    @property
    def head(self) -> Head:
        return self._head.gives

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._embedding.dtype == torch.float64 else torch.float32

    @property
    def _embedding(self) -> Tensor:
        weight = self.causal.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(every_parameter(self.model))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for where, module in every_module(self.model):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{where}.{name}", buffer

    def prepare(self, changes: Changes) -> None:
        if self._group is not None:
            self._group.settle()  # a forward of the user's may have left weights gathered
        list_once(changes)
        self._coverings.take_off(self.model, changes)

    @property
    def routers(self) -> Routers:
        return Routers(self.causal)

    def watch_routers(
        self, note: RouterNote | None, changes: Changes, holder: RouteHolder | None = None
    ) -> None:
        routers = self.routers
        if note is not None:
            changes.set(vars(self), "_watched", routers)
        routers.enter(note, changes, holder)

    def check(self, batch: RolloutBatch, *, training: bool, routed: bool = False) -> int:
        check_idle(self.causal)
        # Since it was wrapped the model may have been compiled, moved, given adapters, or put into
        # another mode. What the fingerprint covers is looked at again where that has changed.
        found = (self.fingerprint(), training, routed)
        if found != self._checked:
            self._check_model()
            refusals.check_random(self.model)
            refusals.check_causal(self.causal)
            if training:
                refusals.check_checkpointing(self.causal)
                refusals.check_routers(self.causal, routed=routed)
            self._checked = found
        refusals.check_parameters(self.model, sharded=self._is_sharded)
        refusals.check_rope(self.causal, int(batch.lengths.max(initial=0)))
        if self._group is not None:
            self._group.check(self.model, training=training)
        if training:
            refusals.check_trainable(self.model)
            refusals.check_parameter_hooks(self.model)
        refusals.check_media(self.causal, self.family, batch)
        known = self._embedding.shape[0]
        # A critic predicts no tokens.
        batch.check_vocabulary(min(known, self._head.width()) if self.head == "logprobs" else known)
        return found[0]

    def fingerprint(self) -> int:
        """A number that stays the same while nothing but the model's weights changes."""
        return self._fingerprint.now()

    def settings(self) -> Computation:
        return self._computations.of(self.fingerprint())

    def _check_model(self) -> None:
        """Refuse what does not depend on the batch or on the values of parameters."""
        refusals.check_adapters(self.model)
        refusals.check_adapters(self.causal)
        refusals.check_blocks(cast(nn.ModuleList, self.causal.base_model.layers))
        check_recurrent_modules(self.causal)
        refusals.check_modules(
            self.model,
            self.family.package or self.causal.config.model_type,
            replaced={m.get_submodule("conv1d") for m in recurrent_modules(self.causal).values()},
        )
        refusals.check_functions(self.model)
        refusals.check_hooks(self.model)
        refusals.check_attention_function(self.model)
        refusals.check_embeddings(self.model)
        refusals.check_derived_weights(self.model)
        refusals.check_parameters(self.model, sharded=self._is_sharded)
        self._head.check()

    def enter(self, changes: Changes, *, compiled: bool = True) -> None:
        claim(self.causal, changes)
        decoder = vars(self.causal.base_model)
        changes.set(decoder, "config", ForwardConfig(decoder["config"]))
        covered = set_forward(self.causal)
        changes.set(vars(self), "_autocasts", covered.autocasts if covered else ())
        # Before attention is changed: who calls the model meanwhile is refused here.
        changes.replace_forward(self.causal, self._causal_forward)
        if self._wrapper is not self.model:
            changes.replace_forward(self._wrapper, refuse_call)
        self._recomputes = refusals.checkpointed(self.causal)
        if self.device.type == "cuda":
            # Kernels that are not torch's own are launched on the current device.
            current = torch.cuda.device(self.device)
            current.prev_idx = torch.cuda.current_device()
            changes.later(current.__exit__, None, None, None)
            current.__enter__()
        for config in configurations(self.causal):
            changes.set(vars(config), "_attn_implementation_internal", ATTENTION_NAME)
            if vars(config).get("output_router_logits"):  # which would keep them all
                changes.set(vars(config), "output_router_logits", False)
        if self._group is not None:
            self._group.enter(changes, list(self._blocks.blocks))
            self._head.enter(changes)
            refuse_calls((self.model, *self._blocks.blocks), changes)
        run_recurrences(self.causal, changes)
        if compiled and self.compiles:
            self._blocks.enter(changes, ranks=self._group is not None)
        changes.set(vars(self), "_changes", changes)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it `forward` works; for use outside of steps."""
        with Changes() as changes:
            self.enter(changes)
            yield

    @property
    def capabilities(self) -> Capabilities:
        """Without early ends where the model checkpoints itself: their exception would pass through
        the checkpoint, which lies within the block."""
        if refusals.checkpointed(self.causal):
            return Capabilities(leaves_early=False, checkpoints=("none",))
        selective = ("selective",) if all(map(has_mlp, self.blocks)) else ()
        return Capabilities(checkpoints=("none", *selective, "full"))

    def forward(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: MicrobatchState,
        kernels: KernelOptions,
        *,
        entropy: bool = False,
    ) -> HeadOutputs:
        policy = inputs.microbatch.checkpointing
        if policy != "none" and self._recomputes:
            raise UnsupportedError(
                "the model checkpoints itself (gradient_checkpointing) and the plan does as well "
                f"(checkpointing={policy!r}); disable one of them."
            )
        assert self._changes is not None, "the model has not been entered"
        # What a repeated forward saves is dropped; there is nothing to checkpoint.
        if instruction.operation == FORWARD and not instruction.records:
            policy = "none"
        early = instruction.ends_at_boundary
        last = self._shape.layers - 1
        block = self._blocks.blocks[last]
        mark = self._changes.mark
        routers = self._watched if early and instruction.is_noted else None
        at_router = routers is not None and routers.end_within(block, self._changes)
        context = CallContext(
            instruction,
            inputs,
            state,
            kernels,
            entropy=entropy,
            ends_in=frozenset(block.modules() if early and not at_router else ()),
        )
        checkpoint_blocks(self._blocks.blocks, policy, self._changes, but=last if early else None)
        if early:
            end_in_last_block(self.causal.base_model, block, self._changes)
        begin_forward(context, self._changes)
        # Through the outermost module: FSDP and peft work in its hooks and its forward.
        outputs = self.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            **{CONTEXT_ARGUMENT: context},
        )
        self._changes.undo(mark)
        if self._group is not None:
            self._group.end_forward()
        return HeadOutputs(outputs["per_token"], outputs["roots"])

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        if last and self._group is not None:
            self._group.last()
        if tensors:
            torch.autograd.backward(tensors, gradients)

    def empty_outputs(self) -> Tensor:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with Changes() as changes:
            for config in configurations(self.model):
                if config._attn_implementation == ATTENTION_NAME:  # which runs in steps alone
                    changes.set(vars(config), "_attn_implementation_internal", "eager")
            return self.model(input_ids=token, use_cache=False, return_dict=True).logits[:, :0]

    def _causal_forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Stands in for the causal model's forward, under the autocast that is set around that.

        Returns the fields of HeadOutputs: fully_shard finds tensors in dicts and tuples, and not in
        dataclasses.
        """
        if kwargs.get(CONTEXT_ARGUMENT) is None:
            refuse_call()
        with entered(self._autocasts):
            return self._decoder_and_head(*args, **kwargs)

    def _decoder_and_head(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        forkpoint_context: CallContext,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The decoder, then the head on chosen places."""
        kwargs.pop("return_dict", None)  # what peft's models of other tasks than language ask for
        assert not any(value is not None for value in kwargs.values()), kwargs
        top = self.causal.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            # Whatever the configuration says: these would keep states and install hooks.
            output_attentions=False,
            output_hidden_states=False,
            return_dict=True,
            **{CONTEXT_ARGUMENT: forkpoint_context},
        ).last_hidden_state
        if forkpoint_context.instruction.ends_at in (BOUNDARY, BLOCKS):
            return {"per_token": {}, "roots": (top,)}
        places = forkpoint_context.inputs.head_index
        hidden_nC = top.reshape(-1, top.shape[-1]).index_select(0, places)
        found = self._head.forward(hidden_nC, forkpoint_context)
        # Backwards without trained tokens reach the head as well, where ranks gather it.
        more = tuple(found.values()) if self._is_sharded else ()
        return {"per_token": found, "roots": (top, *more)}


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, forkpoint_attention)
