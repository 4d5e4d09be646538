"""Stages of a pipeline: the ranks of a pipeline, and their sends and receives.

Hidden states are sent to the next stage, and their gradients to the previous one, each direction in
a separate group. Messages have no tags (NCCL has none), so each side must know the other's order.
All stages run forwards in the same order. Gradients are received in the order in which the next
stage sends them (`Plan.pipeline`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forkpoint.engine.distributed import Holder, local
from forkpoint.engine.feature import Links, Root
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.errors import UnsupportedError
from forkpoint.parallel.process_groups import process_group
from forkpoint.parallel.topology import Relation
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, RECOMPUTE, Instruction
from forkpoint.plan.stages import Stage

T = TypeVar("T")
DIMENSION = "pp"
"""Name of the mesh dimension whose ranks are stages, as in transformers and torchtitan."""


class StageRanks(Holder):
    """The holder of the ranks of one pipeline. Each rank has the gradients of its own blocks. Only
    gradients of parameters that two stages have are summed."""

    lockstep = True

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh`: a mesh with one dimension."""
        self.meshes: Sequence[DeviceMesh] = (mesh,)
        self.down: dist.ProcessGroup = mesh.get_group()
        self.global_ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self.down))
        self.index: int = self.global_ranks.index(dist.get_rank())
        self.relations: Mapping[Relation, tuple[int, ...]] = {"stage": self.global_ranks}
        self._ends = (self.global_ranks[0], self.global_ranks[-1])
        self.process_groups: Sequence[tuple[int, ...]] = (self.global_ranks, self._ends)
        self.tied: frozenset[nn.Parameter] = frozenset()
        """Parameters that the first and the last stage have."""

    @cached_property
    def up(self) -> dist.ProcessGroup | None:
        """Group for messages to previous stages."""
        return process_group(self.global_ranks)

    @cached_property
    def ends(self) -> dist.ProcessGroup | None:
        """Group of the first and the last stage; None on other stages."""
        return process_group(self._ends)

    def exchange(self, value: T) -> list[T]:
        """The values of all stages. Collective."""
        found: list[Any] = [None] * len(self.global_ranks)
        dist.all_gather_object(found, value, group=self.up)
        return found

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter in parameters if parameter in self.tied]

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        found = list(gradients)
        for at, parameter in enumerate(parameters):
            if parameter in self.tied:
                gradient = found[at]
                total = torch.zeros_like(parameter) if gradient is None else gradient
                if isinstance(total, DTensor) and isinstance(parameter, DTensor):
                    # On tensor-parallel ranks, the gradient of embeddings is replicated or a
                    # partial sum.
                    total = total.redistribute(placements=parameter.placements)
                dist.all_reduce(local(total), group=self.ends)
                found[at] = total
        return found


class StageLinks(Links):
    """Sends and receives of one stage."""

    def __init__(
        self,
        ranks: StageRanks,
        stages: tuple[Stage, ...],
        model: nn.Module,
        hidden: tuple[int, torch.dtype, torch.device],
        parts: int = 1,
        idle: Collection[nn.Module] = (),
    ) -> None:
        """`hidden`: width, dtype and device of hidden states. `model`: this rank's part of the
        model. `parts`: number of ranks that split hidden states (sequence parallelism). `idle`:
        modules that run only for batches with media."""
        self.ranks = ranks
        self.stages = stages
        self.index: int = ranks.index
        self.model = model
        self.begins_here: bool = self.stage.is_first
        self.ends_here: bool = self.stage.is_last
        self._width, self._dtype, self._device = hidden
        self._parts = parts
        self._idle = idle
        self._inputs: dict[int, Tensor] = {}
        """Received hidden states by slot, until the backward of the slot."""
        self._tops: dict[int, Tensor] = {}
        """Sent hidden states by slot, until the backward of the slot; if a forward is repeated,
        those of the second."""
        self._shapes: dict[int, torch.Size] = {}
        """Shapes of sent hidden states, by slot."""
        self._sends: list[tuple[Any, Tensor]] = []
        self._pending: dict[int, tuple[Any, Tensor]] = {}
        """Gradients that are being received, by slot."""
        self._expected: list[int] = []
        """Slots in the reverse of the order in which the next stage sends their gradients."""
        self._trains_before = False
        """Whether any parameter of a previous stage is trained."""

    def begin_pass(self, plan: Plan, instructions: Sequence[Instruction]) -> None:
        for kept in (self._inputs, self._tops, self._shapes, self._sends, self._pending):
            kept.clear()  # of a pass that has failed
        if not any(i.operation == BACKWARD for i in instructions):
            return
        run = (m for m in self.model.modules() if plan.media or m not in self._idle)
        own = any(p.requires_grad for m in run for p in m.parameters(recurse=False))
        self._trains_before = any(self.ranks.exchange(own)[: self.stage.index])
        if not self.ends_here:
            assert plan.pipeline is not None, "the plan was not made for stages"
            order = plan.pipeline.orders[self.stage.index + 1]
            self._expected = [slot for slot, is_backward in reversed(order) if is_backward]

    def receive(self, instruction: Instruction, inputs: MicrobatchInputs) -> Tensor | None:
        if self.stage.is_first:
            return None
        if instruction.operation == RECOMPUTE:
            return self._inputs[instruction.slot]
        hidden = self.receive_hidden(tuple(inputs.input_ids.shape))
        if instruction.operation == FORWARD:
            hidden.requires_grad_(self._trains_before)
            self._inputs[instruction.slot] = hidden
        return hidden

    def send(self, instruction: Instruction, top: Tensor) -> None:
        if self.ends_here:
            return
        if instruction.operation != RECOMPUTE:
            self._shapes[instruction.slot] = top.shape
            self.send_hidden(top)
        if instruction.operation in (FORWARD, RECOMPUTE) and instruction.keeps_graph:
            self._tops[instruction.slot] = top

    def roots(self, instruction: Instruction) -> list[Root]:
        if self.ends_here:
            return []
        slot, top = instruction.slot, self._tops.pop(instruction.slot)
        if not top.requires_grad:
            return []
        while slot not in self._pending:
            # The next stage may have repeated a forward that this one has yet to repeat.
            coming = self._expected.pop()
            gradient = top.new_empty(self._shapes[coming])
            source = self.ranks.global_ranks[self.stage.index + 1]
            self._pending[coming] = dist.irecv(gradient, source, group=self.ranks.up), gradient
        work, gradient = self._pending.pop(slot)
        work.wait()
        return [(top, gradient)]

    def after_backward(self, instruction: Instruction) -> None:
        hidden = self._inputs.pop(instruction.slot, None)
        if hidden is not None and hidden.requires_grad:
            gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self._send(gradient, self.stage.index - 1, self.ranks.up)

    def end_pass(self, results: Iterable[Tensor]) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        for result in results:  # the last stage's
            dist.broadcast(result, self.ranks.global_ranks[-1], group=self.ranks.down)

    def exchange(self, value: T) -> list[T]:
        return self.ranks.exchange(value)

    def summed(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.ranks.down)
        return total

    # Messages
    # ------------------------------------------------------------

    def receive_hidden(self, shape: tuple[int, ...]) -> Tensor:
        shape = shape[0], shape[1] // self._parts, self._width
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        source = self.ranks.global_ranks[self.stage.index - 1]
        dist.recv(hidden, source, group=self.ranks.down)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        hidden = local(hidden)
        if hidden.dtype != self._dtype:
            raise UnsupportedError(
                f"the last block of stage {self.stage.index} gives {hidden.dtype}, and embeddings "
                f"are {self._dtype}: hidden states that change their dtype between blocks have not "
                "been shown exact with stages. Load the model in one dtype."
            )
        self._send(hidden, self.stage.index + 1, self.ranks.down)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        self._sends = [(work, x) for work, x in self._sends if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        to = self.ranks.global_ranks[stage]
        self._sends.append((dist.isend(tensor, to, group=group), tensor))


def has_stages(mesh: DeviceMesh | None) -> TypeGuard[DeviceMesh]:
    """Whether a mesh has several stages."""
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    return mesh is not None and DIMENSION in (names or ()) and mesh[DIMENSION].size() > 1
