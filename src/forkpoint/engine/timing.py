"""Events of a pass and their milliseconds, without a device sync between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import PHASES, PREFIX_BACKWARD, PREFIX_FORWARD, SHARE, Instruction
from forkpoint.plan.program import phase_of as phase_of_microbatch


@dataclass(frozen=True)
class Event:
    """An instruction that is about to run."""

    operation: str
    """As in `plan.program.OPERATIONS`."""
    microbatch: int
    """Its index in `Plan.microbatches`; -1 of an idle slot, and of an exchange between ranks."""
    text: str
    """Such as "forward prefix 0"."""

    def __str__(self) -> str:
        return self.text


Observer = Callable[[Event], None]


class Timing(Feature):
    """Events of a pass, and what each took; on CUDA by events that are read at the end."""

    def __init__(self, plan: Plan, device: torch.device, observers: tuple[Observer, ...]) -> None:
        """`observers` are called with each event before it runs."""
        self.events: list[str] = []
        self._plan = plan
        self._observers = observers
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._held_bytes: list[int] = []

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        self._mark(_phase_of(instruction, inputs))
        text = self._plan.event(instruction)
        self.events.append(text)
        for observe in self._observers:
            observe(Event(instruction.operation, instruction.microbatch, text))

    def end(self) -> None:
        """The last instruction has run."""
        self._mark("")

    def _mark(self, phase: str) -> None:
        """Count the time from here to the next mark to this phase."""
        if self._cuda:
            self._held_bytes.append(torch.cuda.memory_allocated(self._device))
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def each_ms(self) -> tuple[float, ...]:
        """Milliseconds of each event. Waits for the device."""
        if self._cuda and self._marks:
            torch.cuda.synchronize(self._device)
        found: list[float] = []
        for (_, begin), (_, end) in pairwise(self._marks):
            if isinstance(begin, torch.cuda.Event):
                assert isinstance(end, torch.cuda.Event)
                found.append(begin.elapsed_time(end))
            else:
                assert isinstance(end, float)
                found.append((end - begin) * 1e3)
        return tuple(found)

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds of every phase."""
        totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, _), ms in zip(self._marks, self.each_ms(), strict=False):
            totals[phase] += ms
        return totals

    def allocated_bytes(self) -> tuple[int, ...] | None:
        """Bytes that CUDA held allocated after each event; None on the CPU."""
        return tuple(self._held_bytes[1:]) if self._cuda else None


def _phase_of(instruction: Instruction, inputs: MicrobatchInputs) -> str:
    if instruction.exchanges:
        return PREFIX_FORWARD if instruction.operation == SHARE else PREFIX_BACKWARD
    return phase_of_microbatch(instruction.operation, inputs.microbatch)
