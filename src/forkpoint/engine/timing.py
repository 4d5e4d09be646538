"""Milliseconds of events and phases, without a device sync between them."""

import time
from itertools import pairwise

import torch

from forkpoint.plan.program import PHASES


class PhaseTimer:
    """Times what lies between marks; on CUDA by events that are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.cuda: bool = device.type == "cuda"
        self.device: torch.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.held_bytes: list[int] = []

    def mark(self, phase: str) -> None:
        """Count the time from here to the next mark to this phase."""
        if self.cuda:
            self.held_bytes.append(torch.cuda.memory_allocated(self.device))
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def each_ms(self) -> tuple[float, ...]:
        """Milliseconds from each mark to the next; the last mark only ends the one before it."""
        if self.cuda and self.marks:
            torch.cuda.synchronize(self.device)
        found: list[float] = []
        for (_, begin), (_, end) in pairwise(self.marks):
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
        for (phase, _), ms in zip(self.marks, self.each_ms(), strict=False):
            totals[phase] += ms
        return totals

    def allocated_bytes(self) -> tuple[int, ...] | None:
        """Bytes that CUDA held allocated at each mark but the first; None on the CPU."""
        return tuple(self.held_bytes[1:]) if self.cuda else None
