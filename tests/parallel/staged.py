"""Collectives of tensors on a GPU by way of the CPU, for ranks that share one GPU.

NCCL wants a GPU for each rank, and gloo has not all collectives for tensors on GPUs.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

NAME = "staged"


class Received(dist.Work):
    """A message that is copied to its tensor once it is waited for."""

    def __init__(self, work: dist.Work, host: Tensor, tensor: Tensor) -> None:
        super().__init__()
        self.work, self.host, self.tensor = work, host, tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        self.tensor.copy_(self.host)
        return True


class StagedGroup(dist.ProcessGroup):
    """Gloo on copies in the CPU's memory. Each call ends when it is done, but for messages."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME

    def __repr__(self) -> str:
        return f"{NAME} group, rank {self._rank} of {self._size}"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place("allreduce", tensors, opts or dist.AllreduceOptions())

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place("broadcast", tensors, opts or dist.BroadcastOptions())

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for every, own in zip(outputs, inputs, strict=True):
            host = own.detach().cpu().contiguous()
            found = [torch.empty_like(host) for _ in every]
            self._gloo.allgather([found], [host]).wait()
            for output, part in zip(every, found, strict=True):
                output.copy_(part.view_as(output))
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather([list(output.view(self._size, -1))], [own.reshape(-1)])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        host = whole.detach().cpu().clone()
        reduction = dist.AllreduceOptions()
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        reduction.reduceOp = dist.ReduceOp.SUM if mean or opts is None else opts.reduceOp
        self._gloo.allreduce([host], reduction).wait()
        own = host.view(self._size, -1)[self._rank]
        output.copy_((own / self._size if mean else own).view_as(output))
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        host, found = own.detach().cpu().contiguous(), torch.empty(output.shape, dtype=output.dtype)
        self._gloo.alltoall_base(found, host, output_sizes, input_sizes).wait()
        output.copy_(found)
        return _done(output)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._gloo.send([t.detach().cpu().contiguous() for t in tensors], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Received(self._gloo.recv([host], source, tag), host, tensor)

    def _in_place(self, name: str, tensors: list[Tensor], opts: Any) -> dist.Work:
        mean = getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG
        if mean:
            opts.reduceOp = dist.ReduceOp.SUM
        for tensor in tensors:
            host = tensor.detach().cpu().clone()
            getattr(self._gloo, name)([host], opts).wait()
            tensor.detach().copy_(host / self._size if mean else host)
        return _done(tensors)


def _done(value: Any) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)


def register() -> None:
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
