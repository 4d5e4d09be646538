"""Orders of work on the stages of a pipeline.

Work is slots that nest (`plan.program`): the forward of a slot comes after that of the slot that it
lies inside of, its backward after the backwards of the slots inside. Forwards go from the first
stage to the last, backwards from the last to the first. Costs and bytes are given by stage.

All stages run forwards in one order: a slot, then those inside of it, of neighbours the one with
the longest way to the end first. Each stage runs backwards as soon as they can run, that with the
longest way to the end first. A forward waits until its bytes fit the stage's budget, or until all
that is open at the stage is what the slot lies inside of, as on one device. So no budget stops a
pipeline: the first forward that has not run waits only for backwards of slots before it, which need
no memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from forkpoint.plan.program import IDLE

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageWork:
    """Slots of a pass, in the order of their forwards. S stages, N slots."""

    parents: tuple[int, ...]
    """[N]: the slot that each lies inside of; -1 for none."""
    forward: Floats
    """[S, N]: cost of each forward."""
    backward: Floats
    """[S, N]: cost of each backward, with its recompute."""
    held: Floats
    """[S, N]: bytes of each slot from its forward to its backward."""
    working: Floats
    """[S]: the most bytes that a backward needs in addition to `held`."""

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def slots(self) -> int:
        return len(self.parents)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[N]: the slots directly inside of each."""
        found: list[list[int]] = [[] for _ in self.parents]
        for slot, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(slot)
        return tuple(map(tuple, found))


@dataclass(frozen=True, eq=False)
class StageSchedule:
    """Orders of the stages, and times that they are predicted to take."""

    orders: tuple[tuple[tuple[int, bool], ...], ...]
    """By stage, in order: the slot, and whether it is its backward."""
    begins: tuple[tuple[float, ...], ...]
    """By stage, in that order: when each begins."""
    ends: tuple[tuple[float, ...], ...]
    time: float
    """From the first begin to the last end."""
    busy: tuple[float, ...]
    """By stage: time in which it runs something."""
    peak_bytes: tuple[float, ...]
    """By stage: the most bytes held at once."""

    @property
    def bubble(self) -> float:
        """Part of the stages' time in which they run nothing."""
        return 1 - sum(self.busy) / (len(self.busy) * self.time) if self.time else 0.0


def order_stages(work: StageWork, budgets: Sequence[float] | None = None) -> StageSchedule:
    """Order the work of all stages, the same on every rank that is given the same numbers.

    `budgets`: by stage, bytes for what is held and for a backward; None is no limit.
    """
    return _Simulation(work, budgets).run()


def forwards_time(costs: Floats) -> float:
    """Time of forwards alone, which all stages run in one order. `costs`: [S, N]."""
    ends = [0.0] * len(costs)
    for column in costs.T.tolist():
        end = 0.0
        for s, cost in enumerate(column):
            end = ends[s] = max(end, ends[s]) + cost
    return ends[-1]


class _Simulation:
    """Stages that each take, when they are free, what can begin first."""

    def __init__(self, work: StageWork, budgets: Sequence[float] | None) -> None:
        self.work = work
        stages, slots = work.stages, work.slots
        limits = [np.inf] * stages if budgets is None else budgets
        self.rooms = [b - w for b, w in zip(limits, work.working.tolist(), strict=True)]
        self.forward, self.backward = work.forward.tolist(), work.backward.tolist()
        self.held_of = work.held.tolist()
        self.depth: list[int] = []
        for parent in work.parents:
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
        tails = longest_tails(work)
        self.tails = (-tails[1]).tolist()
        self.sequence: list[int] = _longest_first(work, work.forward[0] + tails[0][0])
        """Slots in the order of their forwards."""
        self.position: list[int] = np.argsort(self.sequence).tolist()
        self.free = [0.0] * stages
        self.held, self.peak, self.open = [0.0] * stages, [0.0] * stages, [0] * stages
        self.next = [0] * stages
        """By stage: the position of the slot whose forward comes next."""
        self.arrival = [[0.0] * slots, *([np.inf] * slots for _ in range(stages - 1))]
        self.waiting = [[len(c) + 1 for c in work.children] for _ in range(stages)]
        """By stage and slot: how many a backward still waits for."""
        self.ready_at = [[0.0] * slots for _ in range(stages)]
        self.later: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        """By stage: backwards that can run from some time on."""
        self.now: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        """And those that can run when the stage is free, the most urgent first."""
        self.orders: list[list[tuple[int, bool]]] = [[] for _ in range(stages)]
        self.begins: list[list[float]] = [[] for _ in range(stages)]
        self.ends: list[list[float]] = [[] for _ in range(stages)]

    def run(self) -> StageSchedule:
        stages = range(self.work.stages)
        found = [self._candidate(s) for s in stages]
        for _ in range(2 * self.work.stages * self.work.slots):
            begin, _, slot, s = min(found)
            assert begin < np.inf, "nothing can run"
            self._run(s, slot, begin)
            for other in range(max(0, s - 1), min(s + 2, len(found))):
                found[other] = self._candidate(other)
        busy = (self.work.forward + self.work.backward).sum(1)
        return StageSchedule(
            tuple(map(tuple, self.orders)),
            tuple(map(tuple, self.begins)),
            tuple(map(tuple, self.ends)),
            max(self.free),
            tuple(busy.tolist()),
            tuple(p + w for p, w in zip(self.peak, self.work.working.tolist(), strict=True)),
        )

    def _candidate(self, s: int) -> tuple[float, bool, int, int]:
        """When the stage could begin something, whether that is a forward, and its slot."""
        free, now, later = self.free[s], self.now[s], self.later[s]
        while later and later[0][0] <= free:
            _, slot = heappop(later)
            heappush(now, (self.tails[s][slot], slot))
        if now:
            return free, False, now[0][1], s
        found = (np.inf, True, 0, s)
        if self.next[s] < self.work.slots:
            slot = self.sequence[self.next[s]]
            if self._fits(s, slot):
                found = max(free, self.arrival[s][slot]), True, slot, s
        if later:
            found = min(found, (later[0][0], False, later[0][1], s))
        return found

    def _fits(self, s: int, slot: int) -> bool:
        fits = self.held[s] + self.held_of[s][slot] <= self.rooms[s]
        return fits or self.open[s] == self.depth[slot]

    def _run(self, s: int, slot: int, begin: float) -> None:
        is_backward = self.next[s] > self.position[slot]
        end = self.free[s] = begin + (self.backward if is_backward else self.forward)[s][slot]
        self.orders[s].append((slot, is_backward))
        self.begins[s].append(begin)
        self.ends[s].append(end)
        if is_backward:
            waiting = self.now[s] or self.later[s]
            heappop(waiting)
            self.held[s] -= self.held_of[s][slot]
            self.open[s] -= 1
            if s:
                self._release(s - 1, slot, end)
            if self.work.parents[slot] >= 0:
                self._release(s, self.work.parents[slot], end)
            return
        self.next[s] += 1
        self.open[s] += 1
        self.held[s] += self.held_of[s][slot]
        self.peak[s] = max(self.peak[s], self.held[s])
        if s + 1 < self.work.stages:
            self.arrival[s + 1][slot] = end
        else:
            self._release(s, slot, end)

    def _release(self, s: int, slot: int, end: float) -> None:
        """One of those that a backward waits for has ended."""
        self.ready_at[s][slot] = max(self.ready_at[s][slot], end)
        self.waiting[s][slot] -= 1
        if not self.waiting[s][slot]:
            heappush(self.later[s], (self.ready_at[s][slot], slot))


def _longest_first(work: StageWork, ways: Floats) -> list[int]:
    """Slots in an order that nests, of neighbours the one with the longest way first.

    ways: [N]: of each slot, to the end of the pass.
    """
    children = work.children
    todo, found = [slot for slot, parent in enumerate(work.parents) if parent < 0], list[int]()
    todo.sort(key=lambda slot: (ways[slot], -slot))
    while todo:
        slot = todo.pop()
        found.append(slot)
        todo += sorted(children[slot], key=lambda slot: (ways[slot], -slot))
    return found


def longest_tails(work: StageWork) -> tuple[Floats, Floats]:
    """[S, N] of forwards and backwards: the longest way from the end of each to the end."""
    forward, backward = np.zeros_like(work.forward), np.zeros_like(work.backward)
    children, stages = work.children, work.stages
    for s in range(stages):
        for slot, parent in enumerate(work.parents):
            after = work.backward[s - 1, slot] + backward[s - 1, slot] if s else 0.0
            above = work.backward[s, parent] + backward[s, parent] if parent != IDLE else 0.0
            backward[s, slot] = max(after, above)
    for s in reversed(range(stages)):
        for slot in reversed(range(work.slots)):
            if s == stages - 1:
                after = work.backward[s, slot] + backward[s, slot]
            else:
                after = work.forward[s + 1, slot] + forward[s + 1, slot]
            below = (work.forward[s, c] + forward[s, c] for c in children[slot])
            forward[s, slot] = max(chain((after,), below))
    return forward, backward
