"""Events of a pass and their milliseconds, without a device sync between them."""

import time
from itertools import pairwise
from typing import Any

import torch

from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import (
    ENCODE,
    PHASES,
    PREFIX_BACKWARD,
    PREFIX_FORWARD,
    SHARE,
    Instruction,
)
from forkpoint.plan.program import phase_of as phase_of_microbatch


class Timing(Feature):
    """Measures the time of each event of a pass; on CUDA with events that are read at the end."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.events: list[str] = []
        self._plan = plan
        self._cuda = device.type == "cuda"
        self._device = device
        self._phases: list[str] = []
        self._marks: list[Any] = []
        """Times at which instructions began, and the end of the last one: CUDA events, or
        seconds."""
        self._received: dict[int, Any] = {}
        """Times at which tensors of other stages had arrived, by index of the instruction."""

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        self._marks.append(self._mark())
        if not instruction.runs_microbatch:
            forward = instruction.operation in (SHARE, ENCODE)
            phase = PREFIX_FORWARD if forward else PREFIX_BACKWARD
        else:
            phase = phase_of_microbatch(instruction.operation, inputs.microbatch)
        self._phases.append(phase)
        self.events.append(self._plan.event(instruction))

    def after_receive(self, instruction: Instruction) -> None:
        self._received[len(self.events) - 1] = self._mark()

    def end(self) -> None:
        """Record the end of the last instruction, and wait for the device."""
        self._marks.append(self._mark())
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3

    def each_ms(self) -> tuple[float, ...]:
        """Milliseconds of each event."""
        return tuple(self._ms(begin, end) for begin, end in pairwise(self._marks))

    def waits_ms(self) -> tuple[float, ...]:
        """Milliseconds that each event waited for tensors of other stages."""
        received = (self._received.get(at, mark) for at, mark in enumerate(self._marks[:-1]))
        return tuple(self._ms(mark, end) for mark, end in zip(self._marks, received, strict=False))

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds of every phase."""
        totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for phase, ms in zip(self._phases, self.each_ms(), strict=True):
            totals[phase] += ms
        return totals
