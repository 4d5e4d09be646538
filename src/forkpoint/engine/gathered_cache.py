"""Prefix caches whose heads are split over context-parallel ranks, gathered for leaves that one
rank runs alone.

Such a leaf (plan/dealing.py) reads keys and values of all heads. They are gathered once, after the
forward of the microbatch that captures them, into a second cache with the same slots. Leaves add
their gradients there. Before the backward of that microbatch, these gradients are summed over
ranks, and each rank adds those of its heads to those in its prefix cache.
"""

import torch

from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs, cache_run
from forkpoint.engine.prefix_cache import PrefixCache, joined
from forkpoint.parallel.topology import Places
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, SCORE, Instruction
from forkpoint.tree import Microbatch


class GatheredCache(Feature):
    """The gathered prefix caches of one step."""

    def __init__(self, plan: Plan, places: Places) -> None:
        """`plan`: a plan in which prefix caches of microbatches are gathered
        (`Microbatch.gathered`)."""
        self._plan = plan
        self._places = places

    def begin_pass(self, cache: PrefixCache) -> None:
        super().begin_pass(cache)
        cache.whole = PrefixCache(self._plan.cache_tokens, gradients=cache.gradients)
        cache.whole.media = cache.media

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Gather the prefix cache of a microbatch. Collective."""
        if instruction.operation not in (SCORE, FORWARD) or not inputs.microbatch.gathered:
            return
        cache = self.cache
        assert cache.whole is not None
        with torch.no_grad():
            for key in cache.layout():
                heads, _ = cache.read(key)
                for begin, end in self._runs(inputs.microbatch):
                    found = self._places.all_heads(heads[begin:end])
                    cache.whole.write(key, found, [(0, end - begin, begin)])

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Add the gradients of leaves to this rank's heads. Collective."""
        if instruction.operation != BACKWARD or not inputs.microbatch.gathered:
            return
        cache = self.cache
        assert cache.whole is not None
        with torch.no_grad():
            for key in cache.layout():
                _, heads = cache.read(key)
                _, whole = cache.whole.read(key)
                assert heads is not None and whole is not None
                for begin, end in self._runs(inputs.microbatch):
                    heads[begin:end] += self._places.sum_of_heads(whole[begin:end])

    def _runs(self, microbatch: Microbatch) -> list[tuple[int, int]]:
        """Runs of cache slots of a microbatch, adjacent ones joined."""
        return joined(cache_run(self._plan, s) for s in self._plan.captured(microbatch))
