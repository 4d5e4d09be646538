"""Prefix caches that ranks of context parallelism have by heads, gathered for whole leaves.

A leaf that one rank runs alone (plan/dealing.py) reads keys and values of all heads. They are
gathered once, when the microbatch that captures them has run forward, into a second cache with the
same slots. Leaves leave gradients there. Before the backward of that microbatch the sums over ranks
come to the rank that has the heads, beside what microbatches that run by heads have left.
"""

import torch

from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache, joined
from forkpoint.parallel.topology import Places
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, FORWARD, SCORE, Instruction


class GatheredCache(Feature):
    """The gathered prefix caches of one step."""

    def __init__(self, plan: Plan, places: Places) -> None:
        """`plan`: with microbatches whose prefix cache is gathered (`Microbatch.gathered`)."""
        self._plan = plan
        self._places = places
        self._cache: PrefixCache | None = None

    def begin_pass(self, cache: PrefixCache) -> None:
        self._cache = cache
        cache.whole = PrefixCache(self._plan.cache_tokens, gradients=cache.gradients)
        cache.whole.media = cache.media

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Gather what a microbatch has captured. Collective."""
        if instruction.operation not in (SCORE, FORWARD) or not inputs.microbatch.gathered:
            return
        cache = self._cache
        assert cache is not None and cache.whole is not None
        with torch.no_grad():
            for key in cache.layout():
                heads, _ = cache.read(key)
                for begin, end in _runs(inputs):
                    found = self._places.all_heads(heads[begin:end])
                    cache.whole.write(key, found, [(0, end - begin, begin)])

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Add the gradients that parts of other microbatches have left. Collective."""
        if instruction.operation != BACKWARD or not inputs.microbatch.gathered:
            return
        cache = self._cache
        assert cache is not None and cache.whole is not None
        with torch.no_grad():
            for key in cache.layout():
                _, heads = cache.read(key)
                _, whole = cache.whole.read(key)
                assert heads is not None and whole is not None
                for begin, end in _runs(inputs):
                    heads[begin:end] += self._places.sum_of_heads(whole[begin:end])


def _runs(inputs: MicrobatchInputs) -> list[tuple[int, int]]:
    """Slots of the prefix cache of a microbatch, neighbours joined."""
    its = inputs.microbatch
    begins = zip(its.cache_begin, its.lengths.tolist(), strict=True)
    return joined((begin, begin + length) for begin, length in begins if begin >= 0)
