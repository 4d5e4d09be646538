"""Runs microbatches through a model of any library without editing its code.

While microbatches run, the forward of the model's core (decoder and head) is replaced, so that the
head computes log-probs or values of chosen tokens instead of all logits. The library's entry
replaces attention. Everything else is the model's own code. All changes are undone afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.host import ChooseExperts, HeadOutputs, RouterNote
from forkpoint.engine.microbatches import CacheView, MicrobatchInputs
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import calls
from forkpoint.hosts.checkpointing import checkpoint_blocks
from forkpoint.hosts.compiled import CompiledBlocks
from forkpoint.hosts.early_exit import end_in_last_block
from forkpoint.hosts.held_model import HeldModel
from forkpoint.hosts.modules import add_hook
from forkpoint.hosts.routers import ModelRouters, force_routers, record_routers
from forkpoint.hosts.wrappers import entered, set_forward
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import BLOCKS, BOUNDARY, FORWARD, Instruction
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media, ShownMedia
from forkpoint.tree.forest import IntArray


class ModelHost(HeldModel):
    """Runs microbatches through a model, and its stock forward."""

    _watched: ModelRouters | None = None
    """Routers whose statistics the step computes."""
    _recomputes: bool = False
    """Whether the model checkpoints itself in the step that runs."""
    _autocasts: tuple[torch.autocast, ...] = ()
    """Autocasts that are set around the core's forward."""
    _changes: Changes | None = None
    """Changes of the running step. Those of a microbatch are undone at its end."""

    @cached_property
    def _blocks(self) -> CompiledBlocks:
        return CompiledBlocks(self.compiling, self.entry.context_argument, self.topology.places)

    # Microbatches
    # ------------------------------------------------------------

    def enter(self, changes: Changes, *, compiled: bool = True) -> None:
        core = self.entry.core
        calls.claim(core, changes)
        covered = set_forward(core)
        changes.set(vars(self), "_autocasts", covered.autocasts if covered else ())
        # Before attention is changed, so that concurrent calls of the model are refused from here
        # on.
        changes.replace_forward(core, self._core_forward)
        if self._wrapper is not self.model:
            changes.replace_forward(self._wrapper, calls.refuse_call)
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
            calls.refuse_calls((self.model, *self.blocks), changes)
        self.entry.attach(changes)
        if compiled and self.compiles:
            self._blocks.enter(self.blocks, changes)
        changes.set(vars(self), "_changes", changes)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager in which `forward` can be called outside of steps."""
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
            # The next stage reads the output of the last block of this stage.
            instruction = instruction._replace(ends_at=BLOCKS)
        policy = inputs.microbatch.checkpointing
        if policy != "none" and self._recomputes:
            raise UnsupportedError(
                "the model checkpoints itself (gradient_checkpointing) and the plan does as well "
                f"(checkpointing={policy!r}); disable one of them."
            )
        assert self._changes is not None, "the model has not been entered"
        # If the microbatch is recomputed, this forward's saved tensors are dropped: nothing to
        # checkpoint.
        if instruction.operation == FORWARD and not instruction.keeps_graph:
            policy = "none"
        early = instruction.ends_at == BOUNDARY
        blocks = self.blocks
        last = len(blocks) - 1
        block = blocks[last]
        mark = self._changes.mark
        routers = self._watched if early and instruction.counts_routing else None
        at_router = routers is not None and routers.end_within(block, self._changes)
        context = calls.CallContext(
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
        calls.begin_forward(context, self._changes)
        # Through the outermost module: FSDP and adapters work in its hooks and its forward.
        outputs = self.entry.run(inputs.input_ids, inputs.position_ids, context)
        self._changes.undo(mark)
        self.group.end_forward()
        per_token, entries = outputs["per_token"], inputs.own_entries
        joined = context.places.joined(per_token, entries, inputs.entries)
        return HeadOutputs(joined, outputs["roots"])

    def encode(self, media: Sequence[Media]) -> tuple[tuple[Tensor, ...], ...]:
        outputs = self.entry.run(None, None, calls.EncoderContext(media))
        self.group.end_forward()
        return outputs["roots"]

    def encoder_shape(self) -> EncoderShape | None:
        return self.entry.encoder.shape()

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        return self.entry.encoder.positions(batch)

    def _core_forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Replaces the core's forward, under the autocasts that are set around it.

        Returns the fields of HeadOutputs as a dict, because fully_shard does not find tensors in
        dataclasses.
        """
        context = kwargs.get(self.entry.context_argument)
        with entered(self._autocasts):
            if isinstance(context, calls.EncoderContext):
                return {"per_token": {}, "roots": self.entry.encoder.encode(context.media)}
            if not isinstance(context, calls.CallContext):
                calls.refuse_call()
            top = self.entry.decode(*args, **kwargs)
            if context.instruction.ends_at in (BOUNDARY, BLOCKS):
                return {"per_token": {}, "roots": (top,)}
            hidden_nC = top.reshape(-1, top.shape[-1]).index_select(0, context.inputs.head_index)
            found = self.entry.head.forward(hidden_nC, context)
            # If ranks gather the head, backwards without trained tokens must reach it as well.
            more = tuple(found.values()) if self.topology.lockstep else ()
            return {"per_token": found, "roots": (top, *more)}

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        if last:
            self.group.last()
        if tensors:
            # In this thread, because a second one waits for the interpreter lock at each Python
            # node.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(tensors, gradients)

    # Routers
    # ------------------------------------------------------------

    def watch_routers(
        self, note: RouterNote | None, changes: Changes, choose: ChooseExperts | None = None
    ) -> None:
        routers = self.routers
        if note is not None:
            changes.set(vars(self), "_watched", routers)
            record_routers(routers.found, note, changes, chosen=routers.chosen_output)
        if choose is not None:
            force_routers(routers.found, choose, changes)

    def add_counts(self, logical_LE: Tensor) -> None:
        """Add a step's counts of experts, int64 [layers, experts], to the model's buffers. Called
        after `prepare`."""
        if self.topology.places.rank == 0:  # optimizer hooks sum over ranks with parts of a batch
            routers = self.routers
            self.entry.counts.add(logical_LE[routers.first :][: len(routers.found)])

    # Stock forwards, for comparisons
    # ------------------------------------------------------------

    def stock(self, ids_NL: Tensor, shown: ShownMedia | None = None) -> Tensor:
        """Logits [N, L, V] (a critic's values [N, L, 1]) by the model's own forward. `shown`: media
        of the rows. Called while the model is not entered."""
        if not self.links.stages:
            return self.entry.stock.logits(ids_NL, shown=shown)
        return self._stock_of_stages(ids_NL, shown)

    def _stock_of_stages(self, ids_NL: Tensor, shown: ShownMedia | None) -> Tensor:
        """Run the stock forward on all stages. Returns the outputs of the last stage.
        Collective."""
        links, tops = self.links, list[Tensor]()
        with Changes() as changes:
            hidden = None if links.begins_here else links.receive_hidden(tuple(ids_NL.shape))
            self.entry.stage.set_hidden(hidden, changes)
            if not links.ends_here:
                # Behind the place where features of images are added after the last block of this
                # stage.
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
        """Let `stock` run with any settings of the model, on this thread only, until the changes
        are undone."""
        calls.claim(self.entry.core, changes)
        calls.keep_to_this_thread((self.entry.core, self.entry.decoder), changes)
        self.entry.stock.allow(self.rounding_dtype, changes)

    def empty_outputs(self) -> Tensor:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with Changes() as changes:
            self.entry.stock.allow(self.rounding_dtype, changes)
            return self.stock(token)[:, :0]
