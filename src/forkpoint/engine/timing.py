"""Milliseconds of the phases, without a device sync between them."""

import time

import torch

PHASES: tuple[str, ...] = ("A", "B", "C")
"""A: forwards of rows with children. B: rows without. C: backwards of rows with children."""


class PhaseTimer:
    """Adds up the time of each phase; on CUDA by events that are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """What follows, up to the next mark, is of this phase."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds of every phase; the last mark ends the one before it."""
        totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        if self.cuda and self.marks:
            torch.cuda.synchronize()
        for (phase, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(begin, torch.cuda.Event):
                assert isinstance(end, torch.cuda.Event)
                totals[phase] += begin.elapsed_time(end)
            else:
                assert isinstance(end, float)
                totals[phase] += (end - begin) * 1e3
        return totals
