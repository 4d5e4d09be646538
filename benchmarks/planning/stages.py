"""Predicted pipelines of 2 to 16 stages, by counted costs.

Batches are 8 groups of 4 to 64 rollouts with prompts of 4,096 tokens and responses of about 2,048,
and the trees of a file of rollouts. Each schedule takes the fastest of several sizes of
microbatches, the first one as steps do (`plan.stage_sizes`).

- stages: each stage in an order of its own, within the memory of a device (`plan.pipeline`).
- three barriers: forwards of prefixes, then leaves, then backwards of prefixes, each on all stages
  before the next begins. It is predicted within the same memory, where it fits, and with no limit.
- dense 1F1B: no sharing; stage s of S has S - s microbatches in flight, of whole rollouts. Its
  memory is not limited.

The bound is of the same microbatches: `stage_bound.lower_bound`. A cell that does not fit the
memory has no bar.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.planning.stage_bound import lower_bound
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint import Config, RolloutBatch, load_rollouts
from forkpoint.config import Sharing
from forkpoint.errors import ConfigError
from forkpoint.plan import MODELS, ModelShape, Plan, make_plan
from forkpoint.plan.pipeline import StageWork, order_stages
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.plan.stage_sizes import choose_size, offers_of, plans_of_sizes
from forkpoint.plan.stages import (
    Stage,
    stage_prices,
    stage_work,
    stages_of_shape,
)
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.units import GIB

NAME = "stages"
BAR = 1.15
SIZES = (1024, 2048, 4096, 8192)


def three_barriers(work: StageWork, budget_bytes: float = np.inf) -> float:
    """Time with barriers between prefixes' forwards, leaves, and prefixes' backwards; infinite if
    it does not fit the budget of each stage."""
    prefixes, zeros = np.array(work.shared, bool), np.zeros_like(work.forward)
    rooms = budget_bytes - work.shared_bytes
    leaves = order_stages(_part(work, ~prefixes, work.forward, work.backward), rooms.tolist())
    needed = work.working[:, prefixes].max(1, initial=0.0)
    if (np.maximum(needed, leaves.peak_bytes) > rooms).any():
        return np.inf
    phases = (work.forward, zeros), (zeros, work.backward)
    return leaves.time + sum(order_stages(_part(work, prefixes, *costs)).time for costs in phases)


def _part(
    work: StageWork, chosen: np.ndarray, forward: np.ndarray, backward: np.ndarray
) -> StageWork:
    """Some of the slots, each inside of the next chosen one around it."""
    number = np.cumsum(chosen) - 1
    parents = []
    for slot in np.flatnonzero(chosen).tolist():
        parent = work.parents[slot]
        while parent >= 0 and not chosen[parent]:
            parent = work.parents[parent]
        parents.append(int(number[parent]) if parent >= 0 else -1)
    return StageWork(
        tuple(parents),
        forward[:, chosen],
        backward[:, chosen],
        work.held[:, chosen],
        work.working[:, chosen],
    )


def dense_1f1b(work: StageWork) -> float:
    """Time of 1F1B: stage s of S keeps S - s microbatches in flight."""
    counted = replace(work, held=np.ones_like(work.held), working=np.zeros_like(work.working))
    return order_stages(counted, [float(work.stages - s) for s in range(work.stages)]).time


@dataclass(frozen=True, kw_only=True)
class Stages(Benchmark):
    """Predict pipelines of several depths beside dense 1F1B, three barriers and a lower bound.

    Attributes:
        model: Whose counted costs are taken.
        stages: Depths of the pipeline.
        group_sizes: Rollouts of each of the 8 groups.
        data: The folder of airline.jsonl; left out where the file is missing.
        memory_gib: Activations and prefix cache that each stage may hold.
    """

    NAME: ClassVar[str] = NAME

    model: str = "qwen2.5-14b"
    stages: tuple[int, ...] = (2, 4, 8, 16)
    group_sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    data: Path = Path("../shared/data")
    memory_gib: float = 60.0

    def check(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model is {self.model!r}; it takes one of {', '.join(MODELS)}.")
        layers = ModelShape.from_config(MODELS[self.model]).layers
        if not all(1 <= count <= layers for count in self.stages):
            raise ConfigError(f"stages is {self.stages}; the model has 1 to {layers} stages.")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        shape = ModelShape.from_config(MODELS[self.model])
        for name, sharing, batch in self._batches():
            if deadline.over(name):
                continue
            longest = int(batch.lengths.max())
            sizes = {max(longest, size) for size in SIZES}
            dense = [_dense(batch, shape, size) for size in sizes]
            budget = round(self.memory_gib * GIB)
            for count in self.stages:
                shared = _shared(batch, shape, sharing, count, budget)
                yield from self._rows(f"{name}, {count} stages", shape, shared, dense, count)

    def _batches(self) -> Iterator[tuple[str, Sharing, RolloutBatch]]:
        for size in self.group_sizes:
            made = synthetic_rollouts(
                groups=8, rollouts_per_group=size, prompt_tokens=4096, response_tokens=2048
            )
            yield f"8 groups of {size}", "group", RolloutBatch(made)
        path = self.data / "airline.jsonl"
        if path.exists():
            yield "airline's trees", "tree", RolloutBatch(load_rollouts(path))

    def _rows(
        self,
        case: str,
        shape: ModelShape,
        shared: Sequence[Plan],
        dense: Sequence[Plan],
        count: int,
    ) -> Iterator[ResultRow]:
        stages, budget = stages_of_shape(shape, count), round(self.memory_gib * GIB)
        best = choose_size([offers_of(shared)], stages, budget)
        plan = shared[best.size]
        again = sum(m.activations != "keep" or m.checkpointing != "none" for m in plan.microbatches)
        bound, time = lower_bound(best.work), best.schedule.time
        busy = sum(best.schedule.busy)
        works = _works(shared, stages)
        others = {
            "three barriers": min((three_barriers(w, budget), _total(w)) for w in works),
            "three barriers, any memory": min((three_barriers(w), _total(w)) for w in works),
            "dense 1F1B": min((dense_1f1b(w), _total(w)) for w in _works(dense, stages)),
        }
        note = f"microbatches of {plan.max_microbatch_tokens} tokens"
        note += f", {again} of {len(plan.microbatches)} computed again" if again else ""
        note += "" if best.fits else ", which do not fit"
        bar = BAR if best.fits else None
        yield _row(case, "time over the bound", time / bound, note=note, bar=bar)
        yield _row(case, "bubble", best.schedule.bubble, note="idle part of the stages' time")
        yield _row(case, "bubble of the bound", 1 - busy / (count * bound))
        for name, (each, work) in others.items():
            if each < np.inf:
                yield _row(case, f"bubble of {name}", 1 - work / (count * each))
                yield _row(case, "speed-up", each / time, baseline=name)
        yield _row(case, "peak", max(best.schedule.peak_bytes) / GIB, "GiB")


def _row(case: str, metric: str, value: float, unit: str = "1", **more: Any) -> ResultRow:
    return ResultRow(bench=NAME, case=case, metric=metric, unit=unit, value=value, **more)


def _shared(
    batch: RolloutBatch, shape: ModelShape, sharing: Sharing, count: int, budget_bytes: int
) -> tuple[Plan, ...]:
    """Plans of the sizes that a step on so many stages chooses from."""

    def make(config: Config, budget_bytes: int | None) -> Plan:
        return make_plan(batch, shape, config, budget_bytes=budget_bytes)

    config = Config(sharing=sharing, boundary="across")
    return plans_of_sizes(config, budget_bytes, count, make)


def _dense(batch: RolloutBatch, shape: ModelShape, size: int) -> Plan:
    config = Config(sharing="none", boundary="within", max_microbatch_tokens=size)
    return make_plan(batch, shape, config)


def _works(plans: Sequence[Plan], stages: Sequence[Stage]) -> list[StageWork]:
    return [stage_work([p.program], [stage_prices(p, meter_of(p))], stages) for p in plans]


def _total(work: StageWork) -> float:
    return float((work.forward + work.backward).sum())
