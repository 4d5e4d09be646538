"""Where activations of a microbatch with children are while these run: kept, offloaded, or not at
all.

A microbatch that is recomputed has two forwards. The first is for its prefix cache alone: it ends
with the last layer's, and what autograd would save is dropped as it comes, rather than not
recorded, so that both forwards run the same code (compiled for autograd, where blocks are compiled)
and give the same bits. The second writes nothing that the children have read.

An offloaded microbatch is fetched while the backward before its own runs, into the memory that this
gives back and that no new gradient takes. When that one begins memory is fullest, with all of its
microbatch's activations alive. Afterwards there is as much at most, or two layers where these are
more.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from torch import Tensor

from forkpoint.engine.boundary import PrefixCache
from forkpoint.engine.distributed import holder_of
from forkpoint.engine.feature import Feature, Pack, Unpack
from forkpoint.engine.given_back import GivenBack, storage_id
from forkpoint.engine.host import Host
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.offload import OffloadedMicrobatch, OffloadStats
from forkpoint.engine.staging import Staging
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, RECOMPUTE, Instruction
from forkpoint.tree import Microbatch

# What autograd calls the ways in which autocast's linear layers see a weight.
COPIES = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})


class Activations(Feature):
    """Places of the activations of a pass with backwards: kept, offloaded or dropped."""

    def __init__(
        self,
        plan: Plan,
        prepared: list[MicrobatchInputs],
        host: Host,
        staging: Staging | None,
        missing_bytes: Callable[[], int],
    ) -> None:
        """
        Args:
            plan: of the step.
            prepared: its microbatches as tensors.
            host: the model.
            staging: may be None where the plan offloads no microbatch.
            missing_bytes: gives the size of gradients that do not exist yet.
        """
        self.microbatches: tuple[Microbatch, ...] = plan.microbatches
        self.layers: int = host.shape.layers
        self._follower = _followers(plan)
        self._cache: PrefixCache | None = None
        self._missing_bytes = missing_bytes
        self._staging = staging
        self._open: dict[int, OffloadedMicrobatch] = {}
        self._giving: dict[int, GivenBack] = {}
        """By microbatch: what tells the microbatch that follows it."""
        self.stats: OffloadStats | None = None
        self._held: frozenset[int] = frozenset()
        if any(microbatch.activations == "offload" for microbatch in plan.microbatches):
            assert staging is not None, "a microbatch is offloaded, and there is nowhere to"
            self.stats = OffloadStats()
            tensors = [
                *(p for _, p in host.named_parameters()),
                *holder_of(host.group).whole_parameters(),
                *host.model.buffers(),
                *(x for inputs in prepared for x in vars(inputs).values() if isinstance(x, Tensor)),
            ]
            self._held = frozenset(storage_id(x) for x in tensors)

    def close(self) -> None:
        """End the pass, however it went: no copy is under way, and all host memory is free."""
        if self.stats is None or self._staging is None:
            return
        if self._open:
            # A device that has failed ends copies as well; what failed is raised already.
            with suppress(RuntimeError):
                self._staging.transfers.drain()
            self._open.clear()
            self._giving.clear()
        self._staging.clear()
        self.stats.host_bytes = self._staging.held_bytes

    def begin_pass(self, cache: PrefixCache) -> None:
        self._cache = cache

    def saved_tensor_hooks(self, instruction: Instruction) -> tuple[Pack, Unpack] | None:
        if not instruction.keeps_graph:
            return _drop, _dropped
        if instruction.idle:
            return None
        microbatch = instruction.microbatch
        activations = self.microbatches[microbatch].activations
        if instruction.operation == RECOMPUTE:
            activations = "recompute"
        offloaded = None
        if activations == "offload":
            assert self._staging is not None and self.stats is not None
            offloaded = OffloadedMicrobatch(self._staging, self._stays, self.layers, self.stats)
            self._open[microbatch] = offloaded
        given_back = self._telling_follower(microbatch, offloaded)
        if offloaded is not None:
            return offloaded.hooks(given_back)
        return None if given_back is None else given_back.counted()

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if instruction.microbatch in self._open:
            self._open[instruction.microbatch].end_forward()

    def _telling_follower(
        self, microbatch: int, offloaded: OffloadedMicrobatch | None
    ) -> GivenBack | None:
        """The counter that tells the microbatch after this one, which may be offloaded itself."""
        if microbatch not in self._follower:
            return None
        following = self._open[self._follower[microbatch]]
        self._giving[microbatch] = GivenBack(
            self._stays,
            following.prefetch,
            layers=self.layers,
            least=following.ahead_bytes,
            ahead_bytes=None if offloaded is None else lambda: offloaded.ahead_bytes,
        )
        return self._giving[microbatch]

    def _stays(self, tensor: Tensor) -> bool:
        """Whether others hold it on the device anyway.

        These are parameters, their copies that autocast keeps, inputs, and prefix cache.
        """
        assert self._cache is not None
        held = storage_id(tensor) in self._held or self._cache.holds(tensor)
        return held or is_copy_of_leaf(tensor)

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Fetch ahead what the backward before has not: it may have freed too little."""
        if instruction.operation != BACKWARD:
            return
        if instruction.microbatch in self._open:
            self._open[instruction.microbatch].prefetch()
        if instruction.microbatch in self._giving:
            self._giving[instruction.microbatch].grows_bytes = self._missing_bytes()

    def after_backward(self, instruction: Instruction) -> None:
        self._giving.pop(instruction.microbatch, None)
        offloaded = self._open.pop(instruction.microbatch, None)
        if offloaded is not None:
            offloaded.close()


def _followers(plan: Plan) -> dict[int, int]:
    """By microbatch: the offloaded microbatch whose backward comes right after its own, and that
    was offloaded before its own activations were recorded."""
    recorded: dict[int, int] = {}
    offloaded: set[int] = set()
    for at, instruction in enumerate(plan.program.training):
        if instruction.idle or instruction.operation == BACKWARD or not instruction.keeps_graph:
            continue
        recorded[instruction.microbatch] = at
        kept = plan.microbatches[instruction.microbatch].activations
        if kept == "offload" and instruction.operation == FORWARD:
            offloaded.add(instruction.microbatch)
    return {
        one.microbatch: after.microbatch
        for one, after in pairwise(plan.program.training)
        if one.operation == after.operation == BACKWARD
        and not one.idle
        and after.microbatch in offloaded
        and recorded[after.microbatch] < recorded[one.microbatch]
    }


def is_copy_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf's copy in another dtype, perhaps transposed: a weight's, then."""
    node = tensor.grad_fn
    while node is not None and node.name() in COPIES:
        node = node.next_functions[0][0]
        if node is not None and node.name().endswith("AccumulateGrad"):
            return True
    return False


def _drop(_: Tensor) -> None:
    return None


def _dropped(_: None) -> NoReturn:
    raise AssertionError("the backward of a forward whose activations were dropped")
