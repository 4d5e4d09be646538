"""Collectives around attention in a step of context parallelism, timed alone."""

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks.team import Team
from forkpoint.hosts.torch_dist.context_parallel import DealtPlaces
from forkpoint.plan import Plan
from forkpoint.plan.program import BACKWARD

REPEATS = 3


class Collectives:
    """The collectives of plans for one group of ranks. All methods are collective."""

    def __init__(self, team: Team, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._team, self._group, self._dtype = team, group, dtype
        self._places = DealtPlaces(group)
        self._exchange_ms: Callable[[int, int, int], float] = cache(self._timed_exchange)
        self._gather_ms: Callable[[int, int], float] = cache(self._timed_gather)
        self._reduce_ms: Callable[[int, int], float] = cache(self._timed_reduce)

    def by_heads_ms(self, plan: Plan) -> float:
        """Milliseconds of the all-to-alls of a plan by heads: in each layer queries, keys and
        values one way and outputs back; in the backward their gradients."""
        shape = plan.shape
        assert shape is not None
        kv_heads = shape.boundary_elements * shape.context // shape.head_dim
        total = 0.0
        for instruction in plan.program.instructions:
            if instruction.idle or instruction.exchanges:
                continue
            tokens = plan.microbatches[instruction.microbatch].tokens
            for heads in (shape.heads + kv_heads, shape.heads):
                total += self._exchange_ms(tokens, heads, shape.head_dim)
        return total * shape.attention_layers

    def gathered_ms(self, plan: Plan) -> float:
        """Milliseconds of collectives where the keys and values of the whole path are gathered for
        each forward and backward of a microbatch, and their gradients go back in float32."""
        shape = plan.shape
        assert shape is not None
        entry = shape.boundary_elements * shape.context
        total = 0.0
        for instruction in plan.program.instructions:
            if instruction.idle or instruction.exchanges:
                continue
            segments = plan.microbatches[instruction.microbatch].segments
            path = sorted({s for each in segments for s in plan.forest.path(each)})
            tokens = int(plan.forest.length[path].sum())
            total += self._gather_ms(tokens, entry)
            if instruction.operation == BACKWARD:
                total += self._reduce_ms(tokens, entry)
        return total * shape.attention_layers

    def _timed_exchange(self, tokens: int, heads: int, dim: int) -> float:
        own = -(-tokens // self._team.size)
        x_tHD = self._empty(own, heads, dim)
        return self._ms(lambda: self._places.heads_of((x_tHD,), own * self._team.size))

    def _timed_gather(self, tokens: int, entry: int) -> float:
        part = self._empty(-(-tokens // self._team.size), entry)
        whole = part.new_empty(self._team.size * len(part), entry)
        return self._ms(lambda: dist.all_gather_into_tensor(whole, part, group=self._group))

    def _timed_reduce(self, tokens: int, entry: int) -> float:
        part = self._empty(-(-tokens // self._team.size), entry, dtype=torch.float32)
        whole = part.new_zeros(self._team.size * len(part), entry)
        return self._ms(lambda: dist.reduce_scatter_tensor(part, whole, group=self._group))

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(sizes, dtype=dtype or self._dtype, device=self._team.device)

    def _ms(self, work: Callable[[], object]) -> float:
        """Milliseconds on the slowest rank."""
        work()
        self._team.begin()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            work()
        if self._team.cuda:
            torch.cuda.synchronize()
        return self._team.most((time.perf_counter() - begin) * 1e3 / REPEATS)
