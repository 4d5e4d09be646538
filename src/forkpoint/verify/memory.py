"""Memory that `verify` takes, counted before anything runs, and strategies to take less.

The reference is in higher precision, so it needs more than a step: a copy of the weights, and
gradients of its own. What does not fit is made smaller, in this order: logits are made in parts,
blocks are checkpointed, and the copy of the blocks stays in the host's memory, from which each
block is brought to the device while it runs.
"""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import nn

from forkpoint.engine.host import Host
from forkpoint.errors import PlanError
from forkpoint.losses.base import Loss
from forkpoint.losses.router import RouterLoss
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import GIB
from forkpoint.verify.plans import Choice, Planning, choose_plans

T = TypeVar("T")
Planned = TypeVar("Planned", bound=Planning)

MARGIN_BYTES = GIB
MARGIN_SHARE = 0.04
"""Kept free: workspaces of matrix products, and memory lost between blocks of the allocator."""
PART_TOKENS = 1024
"""Tokens whose logits exist at a time where they are made in parts."""
HEAD_COPIES = 5
"""Tensors of the logits' size, in the loss's dtype, that a plain log-softmax with its entropy has
alive in its backward, besides the logits and their gradient."""
SCORE_COPIES = 4
"""Tensors of the scores' size, in float32 or wider, that attention has alive while it works, where
it writes them out. Besides, each layer keeps its probabilities."""


@dataclass(frozen=True)
class MemoryStrategy:
    """How a run of single rollouts saves memory."""

    head_tokens: int | None = None
    """Tokens whose logits exist at a time; None is all of a rollout's."""
    checkpointed: bool = False
    """Whether a block keeps its input alone and runs again in the backward."""
    streamed: bool = False
    """Whether the blocks' weights stay in the host's memory. Only of the reference's copy."""

    def text(self) -> str:
        """Such as "blocks checkpointed, logits in parts of 1,024 tokens"."""
        parts = ["blocks streamed from the host's memory"] * self.streamed
        parts += ["blocks checkpointed"] * (self.checkpointed and not self.streamed)
        if self.head_tokens is not None:
            parts.append(f"logits in parts of {self.head_tokens:,} tokens")
        return ", ".join(parts) or "plain"


PLAIN = MemoryStrategy()
IN_PARTS = MemoryStrategy(head_tokens=PART_TOKENS)
CHECKPOINTED = MemoryStrategy(checkpointed=True)
SMALL = MemoryStrategy(head_tokens=PART_TOKENS, checkpointed=True)
STREAMED = MemoryStrategy(head_tokens=PART_TOKENS, checkpointed=True, streamed=True)
REFERENCE_STRATEGIES = (PLAIN, IN_PARTS, SMALL, STREAMED)
# A head in parts adds up its gradient in parts, which in 16 bits rounds each time: last of all.
DENSE_STRATEGIES = (PLAIN, CHECKPOINTED, SMALL)


@dataclass(frozen=True)
class Needs:
    """Bytes that runs of single rollouts take, for one model and batch."""

    weights: int
    """The reference's copy of the model."""
    gradients: int
    """The reference's gradients, of trainable parameters alone."""
    outside: int
    """Weights and gradients of the copy that lie outside the blocks."""
    block: int
    """Weights and gradients of the copy's largest block."""
    own_gradients: int
    """Gradients of the model itself, in its own dtype."""
    own_copy: int
    """A whole copy of a sharded model, in its own dtype."""
    longest: int
    """Tokens of the longest rollout."""
    trained: int
    """The most tokens that a rollout trains."""
    shape: ModelShape
    itemsize: int
    """Bytes of a number that the model computes with."""
    reference_itemsize: int
    writes_scores: bool
    """Whether stock attention writes out its scores of all pairs."""
    reference_writes_scores: bool

    def reference(self, strategy: MemoryStrategy) -> int:
        """Bytes of the reference run besides the model."""
        model = self.weights + self.gradients
        if strategy.streamed:
            model = self.outside + 2 * self.block  # one runs, the next is being copied
        return model + self._run(strategy, self.reference_itemsize, self.reference_writes_scores)

    def dense(self, strategy: MemoryStrategy) -> int:
        """Bytes of the dense run besides the model."""
        return (
            self.own_copy
            + self.own_gradients
            + self._run(strategy, self.itemsize, self.writes_scores)
        )

    def _run(self, strategy: MemoryStrategy, itemsize: int, writes_scores: bool) -> int:
        """Activations, logits and scores of the longest rollout."""
        shape = replace(self.shape, dtype_bytes=itemsize, compiled=False)
        policy = "full" if strategy.checkpointed else "none"
        total = shape.activation_bytes(policy) * self.longest
        if writes_scores:
            layers = 1 if strategy.checkpointed or shape.checkpointed else shape.attention_layers
            pairs = shape.heads * self.longest**2
            # Of 16 bits the softmax is kept in float32, and its result as well.
            kept = itemsize if itemsize >= 4 else 4 + itemsize
            total += pairs * (layers * kept + SCORE_COPIES * max(4, itemsize))
        logits, entries = self.longest, self.trained
        if strategy.head_tokens is not None:
            logits = entries = min(strategy.head_tokens, self.trained)
        loss_itemsize = max(4, itemsize)
        head = 2 * logits * itemsize + HEAD_COPIES * entries * loss_itemsize
        return total + shape.vocab * head


def count_needs(
    host: Host,
    batch: RolloutBatch,
    dtype: torch.dtype,
    reference_dtype: torch.dtype,
    *,
    copied: Callable[[str, nn.Parameter], int] | None = None,
) -> Needs:
    """Count the bytes that runs of single rollouts of the batch take.

    Args:
        host: the model.
        batch: the rollouts.
        dtype: of the step's computation.
        reference_dtype: of the reference's. A float64 model, which is its own reference, has no
            copy.
        copied: elements of a parameter, by its name, that a copy has on this rank, where ordinary
            training runs on a copy as well; None where it runs on the model.
    """
    named = dict(host.model.named_parameters())
    parameters = list(named.values())
    inside = {id(p) for p in host.blocks.parameters()}
    wide = reference_dtype.itemsize
    is_own = dtype == reference_dtype and copied is None
    elements = {
        id(p): p.numel() if copied is None else copied(name, p) for name, p in named.items()
    }

    def of_copy(chosen: Iterable[nn.Parameter]) -> int:
        return sum(elements[id(p)] * wide * (1 + p.requires_grad) for p in chosen)

    trainable = [p for p in parameters if p.requires_grad]
    gradients = sum(elements[id(p)] for p in trainable) * wide
    masks = (batch.loss_mask[a:b] for a, b in zip(batch.offsets, batch.offsets[1:], strict=False))
    return Needs(
        weights=0 if is_own else sum(elements.values()) * wide,
        gradients=gradients,
        outside=of_copy(p for p in parameters if id(p) not in inside),
        block=max((of_copy(block.parameters()) for block in host.blocks), default=0),
        own_gradients=sum(elements[id(p)] * p.element_size() for p in trainable),
        own_copy=0 if copied is None else sum(elements.values()) * dtype.itemsize,
        longest=int(batch.lengths.max(initial=0)),
        trained=max((int(mask.sum()) for mask in masks), default=0),
        shape=host.shape,
        itemsize=dtype.itemsize,
        reference_itemsize=wide,
        writes_scores=_writes_scores(host, dtype),
        reference_writes_scores=_writes_scores(host, reference_dtype),
    )


def _writes_scores(host: Host, dtype: torch.dtype) -> bool:
    if host.writes_scores:
        return True
    # On CUDA stock attention has no fused kernel for float64, nor for float32 where several query
    # heads share a key.
    shared_heads = host.shape.heads != host.shape.kv_heads
    unfused = dtype == torch.float64 or (dtype == torch.float32 and shared_heads)
    return host.device.type == "cuda" and unfused


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a CUDA device has free, what torch has cached among them, less a margin.

    None on the CPU, whose memory is not counted.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    total = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    free = min(free, total - reserved)
    free += reserved - torch.cuda.memory_allocated(device)
    return max(0, free - MARGIN_BYTES - int(MARGIN_SHARE * total))


@dataclass(frozen=True)
class MemoryStrategies:
    """How the two runs of single rollouts save memory: the first strategy that fits, and further
    ones for where memory runs out all the same."""

    reference: tuple[MemoryStrategy, ...]
    dense: tuple[MemoryStrategy, ...]

    @classmethod
    def fitting(
        cls, needs: Needs, room: int | None, keeps: bool, streams: bool
    ) -> "MemoryStrategies":
        """The strategies for these needs.

        Args:
            needs: bytes that runs take.
            room: free bytes; None if nobody counts them.
            keeps: whether the reference's gradients stay on the device.
            streams: whether the reference's blocks may stay in the host's memory.
        """
        reference = REFERENCE_STRATEGIES if streams else REFERENCE_STRATEGIES[:-1]
        left = room if room is None or not keeps else room - needs.gradients
        return cls(
            reference=_from_first_fitting(reference, needs.reference, room),
            dense=_from_first_fitting(DENSE_STRATEGIES, needs.dense, left),
        )


def _from_first_fitting(
    strategies: tuple[MemoryStrategy, ...],
    needed: Callable[[MemoryStrategy], int],
    room: int | None,
) -> tuple[MemoryStrategy, ...]:
    """The strategies from the first on that fits; the last alone where none does."""
    if room is None:
        return strategies
    fitting = (at for at, strategy in enumerate(strategies) if needed(strategy) <= room)
    return strategies[next(fitting, len(strategies) - 1) :]


def run_in_memory(
    strategies: tuple[MemoryStrategy, ...],
    run: Callable[[MemoryStrategy], T],
    undo: Callable[[], None],
) -> T:
    """Call `run` with the first strategy, and with each further one where memory runs out.

    `undo` is called between two attempts.
    """
    for strategy in strategies[:-1]:
        try:
            return run(strategy)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
        undo()
        torch.cuda.empty_cache()
    return run(strategies[-1])


def fitting_plans(
    policy: Planned,
    batch: RolloutBatch,
    loss: Loss,
    needs: Needs,
    room: int | None,
    router: RouterLoss | None = None,
) -> tuple[Planned, Choice, bool]:
    """The policy to run, its plans, and whether the reference's gradients stay on the device.

    They go to the host's memory where plans would have to become smaller for their sake.
    """
    choice = choose_plans(policy, batch, loss, router)
    if room is None or choice.reason is not None:
        return policy, choice, True
    left = room - needs.own_gradients
    if choice.peak_bytes + needs.gradients <= left:
        return policy, choice, True
    if choice.peak_bytes <= left:
        return policy, choice, False
    changed = policy
    given = policy.config.checkpointing
    for checkpointing in (given, "full") if given != "full" else (given,):
        changed = cast(
            Planned, policy.with_config(memory_budget=max(1, left), checkpointing=checkpointing)
        )
        try:
            smaller = choose_plans(changed, batch, loss, router)
        except PlanError:
            continue
        if smaller.compared and (choice.unfit or not smaller.unfit):
            return changed, smaller, False
    # Predictions may be too high, and what does not fit says so.
    return policy, choice, False
