"""Measures the memory budget for activations on a device, and the limit of host memory."""

import gc
import logging
import os
from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from forkpoint.config import AUTO, Config
from forkpoint.device import usable_bytes
from forkpoint.engine.distributed import local
from forkpoint.engine.host import Host
from forkpoint.errors import ConfigError
from forkpoint.host_memory import host_memory_bytes
from forkpoint.plan.device_memory import ADAM_STATES, LEAST_BYTES, margin_bytes
from forkpoint.plan.plan import Plan
from forkpoint.units import GIB, format_bytes, size_in_bytes

_log = logging.getLogger("forkpoint")

HOST_SHARE = 0.5
"""Part of the machine's memory that training processes may pin by default."""
LOWERED = 0.75
"""After an out-of-memory error the budget becomes this part of the predicted peak."""
DOES_NOT_FIT = (
    "no plan is predicted to fit in memory: the chosen plan needs %s, and %s are free "
    "(memory_budget='auto'). The step runs it nevertheless. To need less memory, use fewer or "
    "shorter rollouts, freeze layers, train adapters, shard the model, or use an optimizer with "
    "smaller states (optimizer_bytes_per_parameter)."
)
OUT_OF_MEMORY = (
    "the device ran out of memory; memory_budget='auto' is lowered from %s to %s, and the step "
    "runs once more. Config(memory_budget='%s') sets this budget from the start."
)


class MemoryBudgets:
    """Measured budgets of one model, for the life of its policies."""

    def __init__(self) -> None:
        self._bytes: dict[Hashable, int] = {}
        """Budgets that were measured, set, lowered, or agreed on with other ranks."""
        self._host_bytes: int | None = None
        self._predicted: int | None = None
        self._warned = False

    def of(self, host: Host, config: Config) -> int | None:
        """The memory budget of a configuration in bytes; None is no limit.

        With memory_budget "auto", it is measured on CUDA at the first call and kept, so that plans
        and bits do not change between steps. After their first step, all ranks use the smallest
        budget of any rank.
        """
        key = _key(config)
        measures = config.memory_budget == AUTO and host.device.type == "cuda"
        if measures and key not in self._bytes:
            parameters = [p for _, p in host.named_parameters()]
            gather = "step" if config.gather == "step" else "microbatch"
            besides = host.group.held_bytes(gather) + host.group.missing_bytes()
            self._bytes[key] = measured_budget(
                host.device, parameters, config, besides_bytes=besides
            )
        return self._bytes.get(key, config.memory_budget_bytes)

    def of_host(self, host: Host, config: Config) -> int | None:
        """The limit of host memory in bytes; None is no limit. "auto" is measured once."""
        if config.host_memory != AUTO or host.device.type != "cuda":
            return config.host_memory_bytes
        if self._host_bytes is None:
            self._host_bytes = host_memory_share()
        return self._host_bytes

    def agree(self, config: Config, least_bytes: int) -> None:
        """Use the smallest budget of all ranks from now on."""
        self._bytes[_key(config)] = least_bytes

    def use(self, config: Config, size_bytes: int) -> None:
        """Use this budget instead of a measured one. Raises ConfigError if it is no size."""
        found = size_in_bytes(size_bytes, "the memory budget")
        if found is None:  # as `Policy.memory_budget_bytes` is without a limit
            raise ConfigError(
                "the memory budget is None; it takes a number of bytes of at least 1. For no limit "
                "set Config(memory_budget=None)."
            )
        self._bytes[_key(replace(config, memory_budget=AUTO))] = found

    def planned(self, plan: Plan) -> None:
        """Remember the last plan's predicted peak, and warn once if a plan does not fit."""
        self._predicted = plan.predicted_peak_bytes
        if not plan.fits and not self._warned:
            self._warned = True
            needed, budget = plan.predicted_peak_bytes or 0, plan.memory_budget_bytes or 0
            _log.warning(DOES_NOT_FIT, format_bytes(needed), format_bytes(budget))

    def lower(self, host: Host, config: Config) -> bool:
        """Lower the budget after an out-of-memory error. Returns whether a lower one was set.

        With several ranks it is not lowered, because ranks plan together.
        """
        before = self.of(host, config)
        if config.memory_budget != AUTO or before is None:
            return False
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks and torch.distributed.get_world_size() > 1:
            return False
        least = min(before, self._predicted or before)
        lower = max(LEAST_BYTES, int(least * LOWERED) // GIB * GIB)
        if lower >= before:
            return False
        self._bytes[_key(config)] = lower
        _log.warning(OUT_OF_MEMORY, format_bytes(before), format_bytes(lower), f"{lower // GIB}GiB")
        torch.cuda.empty_cache()
        return True


def _key(config: Config) -> Hashable:
    """The option for the budget, and those that change the memory that a step needs in addition to
    activations."""
    return (
        config.memory_budget,
        config.optimizer_bytes_per_parameter,
        config.grad_accumulation_dtype,
        config.restore_grads,
        config.gather,
    )


def measured_budget(
    device: torch.device,
    parameters: Iterable[nn.Parameter],
    config: Config,
    *,
    besides_bytes: int = 0,
) -> int:
    """Bytes on a CUDA device for activations and prefix caches, in whole GiB.

    This is the memory that is free or cached by torch, minus a margin and minus the memory that a
    step will allocate: gradients and optimizer states of `parameters` that do not exist yet, and
    other allocations.

    besides_bytes: bytes of gathered weights and of gradients of sharded parameters, which the step
        allocates too.
    """
    every = [p for p in parameters if p.requires_grad]
    trained = [local(p) for p in every]
    elements = sum(p.numel() for p in trained)
    own_bytes = sum(p.numel() * p.element_size() for p in trained)
    needed = besides_bytes
    needed += sum(local(p).numel() * p.element_size() for p in every if p.grad is None)
    needed += 4 * elements if config.grad_accumulation_dtype == "float32" else 0
    needed += own_bytes if config.restore_grads else 0
    each = config.optimizer_bytes_per_parameter
    states = ADAM_STATES * own_bytes if each is None else int(each * elements)
    needed += max(0, states - _state_bytes(every, device))
    free = usable_bytes(device) - torch.cuda.memory_allocated(device)
    _, total = torch.cuda.mem_get_info(device)
    room = free - needed - margin_bytes(total)
    return max(LEAST_BYTES, room // GIB * GIB)


def host_memory_share() -> int:
    """Bytes of host memory for this process, in whole GiB: half of the machine's memory, or of the
    container's limit, divided by the training processes on the machine.

    Total memory is used, because free memory differs between ranks, which must plan equally. Where
    no launcher tells the number of processes on the machine, all ranks are assumed to be on it.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    processes = max(1, int(here)) if here.isdecimal() else ranks
    return max(LEAST_BYTES, int(host_memory_bytes() * HOST_SHARE) // processes // GIB * GIB)


def _state_bytes(parameters: list[nn.Parameter], device: torch.device) -> int:
    wanted = {id(p) for p in parameters}
    storages: dict[int, int] = {}
    # By type, because isinstance can run code of objects that override `__class__`.
    optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
    for optimizer in optimizers:
        for parameter, states in list(optimizer.state.items()):
            if id(parameter) not in wanted or not isinstance(states, dict):
                continue
            for value in states.values():
                if isinstance(value, torch.Tensor) and value.device == device:
                    storage = local(value).untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
