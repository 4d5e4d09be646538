"""Where activations of a row with children are while these run: kept, offloaded, or not at all.

A row that is recomputed has two forwards. The first is for its boundary state alone: it ends with
the last layer's, and what autograd would save is dropped as it comes, rather than not recorded, so
that both forwards run the same code (compiled for autograd, where blocks are compiled) and give the
same bits. The second writes nothing that the children have read.

An offloaded row is fetched while the backward before its own runs, into the memory that this gives
back and that no new gradient takes. When that one begins memory is fullest, with all of its row's
activations alive. Afterwards there is as much at most, or two layers where these are more.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from torch import Tensor

from forkpoint.engine.boundary import Arena
from forkpoint.engine.given_back import GivenBack, Pack, Unpack, storage_id
from forkpoint.engine.host import Host
from forkpoint.engine.offload import OffloadedRow, OffloadStats
from forkpoint.engine.rows import RowInputs
from forkpoint.engine.staging import Staging
from forkpoint.plan.layout import Row
from forkpoint.plan.plan import Plan

# What autograd calls the ways in which autocast's linear layers see a weight.
COPIES = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})


class Residency:
    """What one pass with backwards does with the activations of its rows."""

    def __init__(
        self,
        plan: Plan,
        prepared: list[RowInputs],
        host: Host,
        arena: Arena,
        staging: Staging | None,
    ) -> None:
        """`staging` may be None where the plan offloads no row."""
        self.rows: tuple[Row, ...] = plan.rows
        self.layers: int = host.shape.layers
        self._follower = _followers(plan)
        self._arena = arena
        self._staging = staging
        self._open: dict[int, OffloadedRow] = {}
        self._giving: dict[int, GivenBack] = {}
        """By row: what tells the row that follows it."""
        self.stats: OffloadStats | None = None
        self._held: frozenset[int] = frozenset()
        if any(row.residency == "offload" for row in plan.rows):
            assert staging is not None, "a row is offloaded, and there is nowhere to"
            self.stats = OffloadStats()
            tensors = [
                *(p for _, p in host.named_parameters()),
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
        self._staging.release((0, 0))
        self.stats.host_bytes = self._staging.held_bytes

    def hooks(self, phase: str, row: int) -> tuple[Pack, Unpack] | None:
        """What saved tensors of a row's forward pass through; phase "F" is its first, "R" its
        second."""
        residency = self.rows[row].residency
        if phase == "F" and residency == "recompute":
            return _drop, _dropped
        offloaded = None
        if residency == "offload":
            assert self._staging is not None and self.stats is not None
            offloaded = OffloadedRow(self._staging, self._stays, self.layers, self.stats)
            self._open[row] = offloaded
        given_back = self._telling_follower(row, offloaded)
        if offloaded is not None:
            return offloaded.hooks(given_back)
        return None if given_back is None else given_back.counted()

    def end_forward(self, row: int) -> None:
        """The forward that the hooks were for is over."""
        if row in self._open:
            self._open[row].end_forward()

    def _telling_follower(self, row: int, offloaded: OffloadedRow | None) -> GivenBack | None:
        """What tells the row that follows this one, which may be offloaded itself."""
        if row not in self._follower:
            return None
        following = self._open[self._follower[row]]
        self._giving[row] = GivenBack(
            self._stays,
            following.prefetch,
            layers=self.layers,
            least=following.ahead_bytes,
            ahead_bytes=None if offloaded is None else lambda: offloaded.ahead_bytes,
        )
        return self._giving[row]

    def _stays(self, tensor: Tensor) -> bool:
        """Whether others hold it on the device anyway.

        These are parameters, their copies that autocast keeps, inputs, and boundary state.
        """
        held = storage_id(tensor) in self._held or self._arena.holds(tensor)
        return held or is_copy_of_leaf(tensor)

    def before_backward(self, row: int, missing_bytes: Callable[[], int]) -> None:
        """Fetch ahead what the backward before has not: it may have given back too little.

        missing_bytes: what gradients will take that do not exist yet.
        """
        if row in self._open:
            self._open[row].prefetch()
        if row in self._giving:
            self._giving[row].grows_bytes = missing_bytes()

    def after_backward(self, row: int) -> None:
        self._giving.pop(row, None)
        offloaded = self._open.pop(row, None)
        if offloaded is not None:
            offloaded.close()


def _followers(plan: Plan) -> dict[int, int]:
    """By row: the offloaded row whose backward comes right after its own."""
    return {
        row: after
        for (phase, row), (next_phase, after) in pairwise(plan.schedule())
        if phase == next_phase == "B" and plan.rows[after].residency == "offload"
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
