"""A lower bound on the time of work on the stages of a pipeline, for any order."""

from heapq import heappop, heappush
from itertools import chain

import numpy as np

from forkpoint.plan.pipeline import Floats, StageWork
from forkpoint.plan.program import IDLE


def lower_bound(work: StageWork) -> float:
    """A lower bound of the time of every order of the work, with unlimited memory.

    The largest, over stages, of the least time of that stage alone: each forward and backward there
    becomes ready no earlier than its longest way from the begin, and leaves its longest way to the
    end. With interruptions allowed the best order is known: of what is ready, that with the longest
    way to the end (Jackson's preemptive schedule).
    """
    if not work.slots:
        return 0.0
    heads, tails = _heads(work), work.tails
    costs = (work.forward, work.backward)
    return max(
        _one_machine(
            np.concatenate([x[s] for x in heads]).tolist(),
            np.concatenate([x[s] for x in costs]).tolist(),
            np.concatenate([x[s] for x in tails]).tolist(),
        )
        for s in range(work.stages)
    )


def _one_machine(ready: list[float], costs: list[float], tails: list[float]) -> float:
    arrivals = sorted(range(len(ready)), key=ready.__getitem__)
    left, open_, now, end = list(costs), list[tuple[float, int]](), 0.0, 0.0
    for at, item in enumerate(arrivals):
        now = max(now, ready[item])
        heappush(open_, (-tails[item], item))
        until = ready[arrivals[at + 1]] if at + 1 < len(arrivals) else np.inf
        while open_ and now < until:
            first = open_[0][1]
            spent = min(left[first], until - now)
            left[first] -= spent
            now += spent
            if left[first] <= 0:
                heappop(open_)
                end = max(end, now + tails[first])
    return end


def _heads(work: StageWork) -> tuple[Floats, Floats]:
    """[S, N] of forwards and backwards: the longest way from the begin to each."""
    forward, backward = np.zeros_like(work.forward), np.zeros_like(work.backward)
    children, stages = work.children, work.stages
    for s in range(stages):
        for slot, parent in enumerate(work.parents):
            before = forward[s - 1, slot] + work.forward[s - 1, slot] if s else 0.0
            above = forward[s, parent] + work.forward[s, parent] if parent != IDLE else 0.0
            forward[s, slot] = max(before, above)
    for s in reversed(range(stages)):
        for slot in reversed(range(work.slots)):
            if s == stages - 1:
                before = forward[s, slot] + work.forward[s, slot]
            else:
                before = backward[s + 1, slot] + work.backward[s + 1, slot]
            below = (backward[s, c] + work.backward[s, c] for c in children[slot])
            backward[s, slot] = max(chain((before,), below))
    return forward, backward
