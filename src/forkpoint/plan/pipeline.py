"""Orders of work on the stages of a pipeline.

The work consists of nested slots (`plan.program`). The forward of a slot comes after the forward of
the slot around it, and its backward after the backwards of the slots inside it. Forwards run from
the first stage to the last, backwards from the last to the first. Each stage has its costs and
bytes.

All stages run forwards in one order: a slot, then the slots inside it. Of neighbours, the one with
the longest time to the end comes first. A stage runs a forward first while few forwards wait at the
next stage (`AHEAD`), which would idle if the stage ran several backwards in a row. Otherwise it
runs the possible backward with the longest time to the end.

A forward waits until the stage's budget has room for its bytes and for the working memory of the
backward of any leaf. The forward of a prefix also waits for room for all open prefixes, and for the
working memory of the backward of one of them. A backward waits for room for its working memory.
Neither waits if only ancestors of the slot are open at the stage, as on one device.

So no budget stops a pipeline. Take the first slot whose forward has not run on all stages. All
slots before it have run their forwards. Backwards of leaves among them always have room. When these
have run, prefixes above them have room for their backwards. In the end only ancestors of the first
slot are open, and its forward runs.

`order_stages` makes up to four orders and takes the fastest that fits. Stages keep one or two
forwards ahead. Shared slots are open one after another or all at once. If all are open at once,
their forwards come first, then the other forwards, the longest first, and then the backwards of the
shared slots. This needs memory for all of them, and neighbours in the order have similar lengths.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from forkpoint.plan.program import IDLE

Floats = NDArray[np.float64]

AHEAD = (2, 1)
"""Number of forwards that a stage keeps waiting at the next stage."""
CLOSE = 0.005
"""No further orders are made once one is this close to the least time."""


@dataclass(frozen=True, eq=False)
class StageWork:
    """Slots of a pass, in the order of their forwards. S stages, N slots."""

    parents: tuple[int, ...]
    """[N]: the slot around each slot; -1 for none."""
    forward: Floats
    """[S, N]: cost of each forward."""
    backward: Floats
    """[S, N]: cost of each backward, with its recompute."""
    held: Floats
    """[S, N]: bytes of each slot from its forward to its backward."""
    working: Floats
    """[S, N]: bytes that each backward needs in addition to `held`."""

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def slots(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[N]: the slots directly inside each slot."""
        found: list[list[int]] = [[] for _ in self.parents]
        for slot, parent in enumerate(self.parents):
            if parent != IDLE:
                found[parent].append(slot)
        return tuple(map(tuple, found))

    @cached_property
    def shared(self) -> tuple[bool, ...]:
        """[N]: whether several slots are directly inside a slot, or inside a slot in it."""
        found = [len(inside) > 1 for inside in self.children]
        for slot in reversed(range(self.slots)):
            if found[slot] and self.parents[slot] != IDLE:
                found[self.parents[slot]] = True
        return tuple(found)

    @cached_property
    def apart(self) -> Self:
        """The same slots, with the slots that are not shared moved out of shared ones."""
        parents = (
            IDLE if parent != IDLE and self.shared[parent] and not self.shared[slot] else parent
            for slot, parent in enumerate(self.parents)
        )
        return replace(self, parents=tuple(parents))

    @cached_property
    def shared_bytes(self) -> Floats:
        """[S]: bytes of all slots that are shared."""
        return _sums(self.held * self.shared)

    @cached_property
    def least_time(self) -> float:
        """Lower bound of the time of any order: the maximum over stages of the time until the first
        forward arrives, plus all work of the stage, plus the time from its last backward to the
        end."""
        if not self.slots:
            return 0.0
        roots = [parent == IDLE for parent in self.parents]
        before, after = (
            (np.cumsum(costs, 0) - costs)[:, roots].min(1)
            for costs in (self.forward, self.backward)
        )
        return float((before + _sums(self.forward + self.backward) + after).max())

    @cached_property
    def tails(self) -> tuple[Floats, Floats]:
        """[S, N] of forwards and of backwards: the longest time from the end of each to the end."""
        forward, backward = np.zeros_like(self.forward), np.zeros_like(self.backward)
        children, stages = self.children, self.stages
        for s in range(stages):
            for slot, parent in enumerate(self.parents):
                after = self.backward[s - 1, slot] + backward[s - 1, slot] if s else 0.0
                above = self.backward[s, parent] + backward[s, parent] if parent != IDLE else 0.0
                backward[s, slot] = max(after, above)
        for s in reversed(range(stages)):
            for slot in reversed(range(self.slots)):
                if s == stages - 1:
                    after = self.backward[s, slot] + backward[s, slot]
                else:
                    after = self.forward[s + 1, slot] + forward[s + 1, slot]
                below = (self.forward[s, c] + forward[s, c] for c in children[slot])
                forward[s, slot] = max(chain((after,), below))
        return forward, backward


@dataclass(frozen=True, eq=False)
class StageSchedule:
    """Orders of the stages with their predicted times."""

    orders: tuple[tuple[tuple[int, bool], ...], ...]
    """For each stage in order, the slot and whether its backward runs."""
    begins: tuple[tuple[float, ...], ...]
    """For each stage in the same order, the begin of each forward and backward."""
    ends: tuple[tuple[float, ...], ...]
    time: float
    """Time from the first begin to the last end."""
    busy: tuple[float, ...]
    """For each stage, the time in which it runs something."""
    peak_bytes: tuple[float, ...]
    """For each stage, the predicted peak in bytes."""

    @property
    def bubble(self) -> float:
        """Part of the stages' time in which they run nothing."""
        return 1 - sum(self.busy) / (len(self.busy) * self.time) if self.time else 0.0


def order_stages(work: StageWork, budgets: float | Sequence[float] = np.inf) -> StageSchedule:
    """Order the work of all stages. The result depends only on the arguments.

    The result is the fastest order that fits. If none fits, it is the order that exceeds the
    budgets least.

    `budgets`: bytes for held activations and for the backward that runs, of all stages or of each.
    """
    limits = np.full(work.stages, budgets, float)
    can_hold = any(work.shared) and bool((work.shared_bytes <= limits).all())
    best, least = None, (np.inf, np.inf)
    for at_once, ahead in product((False, True) if can_hold else (False,), AHEAD):
        found = _Simulation(work, limits.tolist(), ahead, at_once=at_once).run()
        over = float((found.peak_bytes - limits).max().clip(0))
        if (over, found.time) < least:
            best, least = found, (over, found.time)
        if least <= (0.0, work.least_time * (1 + CLOSE)):
            break
    assert best is not None
    return best


def forwards_time(costs: Floats) -> float:
    """Time of a pass of forwards, which all stages run in one order. `costs`: [S, N]."""
    ends = [0.0] * len(costs)
    for column in costs.T.tolist():
        end = 0.0
        for s, cost in enumerate(column):
            end = ends[s] = max(end, ends[s]) + cost
    return ends[-1]


class _Simulation:
    """Simulation in which each free stage runs the work that can begin first.

    Args:
        limits: by stage, bytes.
        ahead: number of forwards that a stage keeps waiting at the next stage.
        at_once: whether all shared slots are open at once.
    """

    def __init__(
        self, work: StageWork, limits: Sequence[float], ahead: int, *, at_once: bool
    ) -> None:
        self.work, self.limits, self.ahead = work, limits, ahead
        lasting = self.lasting = work.shared if at_once else (False,) * work.slots
        """[N]: slots that are open from the first forward to the last."""
        stages, slots = work.stages, work.slots
        self.forward, self.backward = work.forward.tolist(), work.backward.tolist()
        self.held_of, self.working = work.held.tolist(), work.working.tolist()
        inner = np.array(list(map(bool, work.children)), bool)
        self.inner: list[bool] = inner.tolist()
        self.leaf_working, self.inner_working = (
            work.working[:, chosen].max(1, initial=0.0).tolist() for chosen in (~inner, inner)
        )
        ordered = work.apart if at_once else work
        self.depth: list[int] = []
        for parent in ordered.parents:
            self.depth.append(self.depth[parent] + 1 if parent != IDLE else 0)
        forwards, backwards = ordered.tails
        self.tails = (-backwards).tolist()
        nested = _longest_first(ordered, work.forward[0] + forwards[0])
        self.sequence = sorted(nested, key=lambda slot: not lasting[slot])
        """Slots in the order of their forwards."""
        self.position: list[int] = np.argsort(self.sequence).tolist()
        self.free, self.held, self.inner_held, self.peak = np.zeros((4, stages)).tolist()
        self.open = [0] * stages
        """By stage, the slots between their forward and their backward, except slots that are open
        throughout."""
        self.next = [0] * stages
        """For each stage, the position of the slot whose forward comes next."""
        self.arrival = [[0.0] * slots, *([np.inf] * slots for _ in range(stages - 1))]
        self.waiting = [[len(c) + 1 for c in work.children] for _ in range(stages)]
        """By stage and slot, the number of forwards and backwards that the backward still waits
        for."""
        self.ready_at = [[0.0] * slots for _ in range(stages)]
        self.later: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        """By stage, backwards with the time from which they can run."""
        self.now: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        """By stage, backwards that can run when the stage is free, the most urgent first."""
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
        busy = _sums(self.work.forward + self.work.backward)
        return StageSchedule(
            tuple(map(tuple, self.orders)),
            tuple(map(tuple, self.begins)),
            tuple(map(tuple, self.ends)),
            max(self.free),
            tuple(busy.tolist()),
            tuple(self.peak),
        )

    def _candidate(self, s: int) -> tuple[float, bool, int, int]:
        """The time at which the stage can begin its next work, whether that is a forward, and its
        slot."""
        free, now, later = self.free[s], self.now[s], self.later[s]
        while later and later[0][0] <= free:
            slot = later.pop(0)[1]
            insort(now, (self.tails[s][slot], slot))
        found = (np.inf, True, 0, s)
        if self.next[s] < self.work.slots:
            slot = self.sequence[self.next[s]]
            if self._forward_fits(s, slot):
                found = max(free, self.arrival[s][slot]), True, slot, s
                last = s + 1 == self.work.stages
                if found[0] == free and not last and self.next[s] - self.next[s + 1] < self.ahead:
                    return found  # the next stage has few forwards to run
        for _, slot in now:
            if self._backward_fits(s, slot):
                return free, False, slot, s
        for ready, slot in later:
            if self._backward_fits(s, slot):
                return min(found, (ready, False, slot, s))
        return found

    def _forward_fits(self, s: int, slot: int) -> bool:
        if self.lasting[slot] or self.open[s] == self.depth[slot]:
            return True
        held, limit = self.held_of[s][slot], self.limits[s]
        if self.inner[slot] and self.inner_held[s] + held + self.inner_working[s] > limit:
            return False
        return self.held[s] + held + self.leaf_working[s] <= limit

    def _backward_fits(self, s: int, slot: int) -> bool:
        lasting = self.lasting[slot]
        if lasting and self.next[s] < self.work.slots:
            return False
        fits = self.held[s] + self.working[s][slot] <= self.limits[s]
        return fits or self.open[s] == (0 if lasting else self.depth[slot] + 1)

    def _run(self, s: int, slot: int, begin: float) -> None:
        is_backward = self.next[s] > self.position[slot]
        end = self.free[s] = begin + (self.backward if is_backward else self.forward)[s][slot]
        self.orders[s].append((slot, is_backward))
        self.begins[s].append(begin)
        self.ends[s].append(end)
        sign = -1 if is_backward else 1
        self.open[s] += sign * (not self.lasting[slot])
        if is_backward:
            self.peak[s] = max(self.peak[s], self.held[s] + self.working[s][slot])
        held = sign * self.held_of[s][slot]
        self.held[s] += held
        self.inner_held[s] += held * self.inner[slot]
        if is_backward:
            ready = (self.tails[s][slot], slot)
            if ready in self.now[s]:
                self.now[s].remove(ready)
            else:
                self.later[s].remove((self.ready_at[s][slot], slot))
            if s:
                self._release(s - 1, slot, end)
            if self.work.parents[slot] != IDLE:
                self._release(s, self.work.parents[slot], end)
            return
        self.next[s] += 1
        if s + 1 < self.work.stages:
            self.arrival[s + 1][slot] = end
        else:
            self._release(s, slot, end)

    def _release(self, s: int, slot: int, end: float) -> None:
        """Count that work has ended for which a backward waits."""
        self.ready_at[s][slot] = max(self.ready_at[s][slot], end)
        self.waiting[s][slot] -= 1
        if not self.waiting[s][slot]:
            insort(self.later[s], (self.ready_at[s][slot], slot))


def _sums(rows: Floats) -> Floats:
    """[S]: sums of rows [S, N], added in order so that they have the same bits on every machine."""
    return np.cumsum(rows, 1)[:, -1] if rows.size else np.zeros(len(rows))


def _longest_first(work: StageWork, ways: Floats) -> list[int]:
    """Slots in nested order. Of neighbours, the one with the longest time to the end comes first.

    ways: [N]: longest time from each slot to the end of the pass.
    """
    children = work.children
    todo, found = [slot for slot, parent in enumerate(work.parents) if parent == IDLE], list[int]()
    todo.sort(key=lambda slot: (ways[slot], -slot))
    while todo:
        slot = todo.pop()
        found.append(slot)
        todo += sorted(children[slot], key=lambda slot: (ways[slot], -slot))
    return found
