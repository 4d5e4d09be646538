"""Events of a pass and their milliseconds, without a device sync between them."""

from itertools import pairwise
from typing import Any

import torch

from forkpoint.device import between_ms, mark
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
        self._device = device
        self._phases: list[str] = []
        self._marks: list[Any] = []
        """Times at which instructions began, and the end of the last one: CUDA events, or
        seconds."""
        self._received: dict[int, Any] = {}
        """Times at which tensors of other stages had arrived, by index of the instruction."""

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        self._marks.append(mark(self._device))
        if not instruction.runs_microbatch:
            forward = instruction.operation in (SHARE, ENCODE)
            phase = PREFIX_FORWARD if forward else PREFIX_BACKWARD
        else:
            phase = phase_of_microbatch(instruction.operation, inputs.microbatch)
        self._phases.append(phase)
        self.events.append(self._plan.event(instruction))

    def after_receive(self, instruction: Instruction) -> None:
        self._received[len(self.events) - 1] = mark(self._device)

    def end(self) -> None:
        """Record the end of the last instruction, and wait for the device."""
        self._marks.append(mark(self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def each_ms(self) -> tuple[float, ...]:
        """Milliseconds of each event."""
        return tuple(between_ms(begin, end) for begin, end in pairwise(self._marks))

    def waits_ms(self) -> tuple[float, ...]:
        """Milliseconds that each event waited for tensors of other stages."""
        begins = self._marks[:-1]
        received = (self._received.get(at, begin) for at, begin in enumerate(begins))
        return tuple(map(between_ms, begins, received))

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds of every phase."""
        totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for phase, ms in zip(self._phases, self.each_ms(), strict=True):
            totals[phase] += ms
        return totals
