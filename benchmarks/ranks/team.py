"""The ranks of one benchmark: what they agree on, and steps that all of them time together."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from benchmarks.runner import Benchmark, Deadline
from forkpoint.apps.cli import torchrun
from forkpoint.config import Config
from forkpoint.losses import GRPO
from forkpoint.plan import Plan
from forkpoint.plan.lanes import Lanes
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.results import StepStats
from forkpoint.wrapping import wrap

T = TypeVar("T")
Interval = tuple[float, float]


class Team:
    """This process among the ranks of the default group."""

    def __init__(self, device: torch.device) -> None:
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.device: torch.device = device
        self.cuda: bool = device.type == "cuda"
        self._group = dist.new_group(backend="gloo")

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks. Collective, over CPUs."""
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found  # type: ignore[return-value]

    def most(self, value: float) -> float:
        """The largest value of any rank. Collective."""
        return max(self.exchange(value))

    def begin(self) -> None:
        """Wait until all ranks are here and their devices idle. Collective."""
        if self.cuda:
            torch.cuda.synchronize()
        self.exchange(None)

    def free(self) -> None:
        """Give back the memory of models that are gone."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


class OnRanks(Benchmark):
    """A benchmark that torchrun starts; all ranks measure, and the first one writes the rows."""

    def run(self) -> int:
        self.check()
        with torchrun.process_group("auto"):
            if torchrun.rank() == 0:
                return super().run()
            for _ in self.measure(Deadline(None)):  # the first rank writes the rows
                pass
            return 0


def sharded(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """The model, sharded by fully_shard over a mesh: each block, then the rest."""
    for block in model.get_decoder().layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def team_here() -> Team:
    """The team of this rank, on its GPU if there is one."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torchrun.local_rank()) if cuda else torch.device("cpu")
    return Team(device)


@dataclass
class RankTimed:
    """Repeats of one step of all ranks, each as long as on the slowest."""

    plan: Plan
    """Of this rank."""
    ms: list[float] = field(default_factory=list)
    peak_bytes: float | None = None
    """The most that any rank's device held."""
    lanes: Lanes | None = None
    """Of the last step, if the ranks are stages of a pipeline."""

    @property
    def typical_ms(self) -> float:
        return median(self.ms)


class RankSteps:
    """Runs steps of a model that ranks hold together, or of a whole model on each."""

    def __init__(
        self,
        team: Team,
        model: nn.Module,
        *,
        compile_blocks: bool | None,
        mesh: DeviceMesh | None = None,
        **options: object,
    ) -> None:
        # No optimizer steps here, and numbers are checked by themselves.
        limits = {"optimizer_bytes_per_parameter": 0, "checkpointing": "none", "self_check": False}
        config = Config(compile_blocks=compile_blocks, **{**limits, **options})  # type: ignore[arg-type]
        self.team = team
        self.policy: Policy = wrap(model, config, mesh=mesh)

    def time(
        self,
        batch: RolloutBatch,
        *,
        repeats: int,
        warm: int = 1,
        planned: bool = True,
        **changes: object,
    ) -> RankTimed:
        """Time a step of all ranks, after some to warm up. Collective.

        Args:
            batch: of this rank.
            repeats: how often it is timed.
            warm: steps before that.
            planned: whether the plan is made before; otherwise the step makes it, as it must where
                ranks exchange prompts, and it is part of the time.
            changes: of the configuration.
        """
        policy = self.policy.with_config(**changes)
        plan = policy.plan(batch) if planned else None
        timed: RankTimed | None = None
        for step in range(warm + repeats):
            stats, ms = self._once(policy, batch, plan)
            timed = timed or RankTimed(stats.plan)
            timed.plan, timed.lanes = stats.plan, stats.lanes
            if step >= warm:
                timed.ms.append(ms)
        assert timed is not None
        if self.team.cuda:
            timed.peak_bytes = self.team.most(torch.cuda.max_memory_allocated())
        return timed

    def exposed(self, batch: RolloutBatch, **changes: object) -> float | None:
        """Milliseconds of a step in which a rank's device communicates and does nothing else, on
        the rank where that is most; None on CPUs, which have no such record. Collective."""
        if not self.team.cuda:
            return None
        policy = self.policy.with_config(**changes)
        plan = policy.plan(batch)
        self._once(policy, batch, plan)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
            self._once(policy, batch, plan)
        return self.team.most(exposed_ms(record))

    def _once(
        self, policy: Policy, batch: RolloutBatch, plan: Plan | None
    ) -> tuple[StepStats, float]:
        for parameter in policy.host.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.team.begin()
        if self.team.cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        stats = policy.forward_backward(batch, GRPO(), plan=plan)
        if self.team.cuda:
            torch.cuda.synchronize()
        return stats, self.team.most((time.perf_counter() - begin) * 1e3)


def dense_ms(
    run: Callable[[RolloutBatch], float], batch: RolloutBatch, counts: tuple[int, int]
) -> float:
    """Milliseconds of a dense step of a whole batch, by those of two samples of it.

    The time is linear in the tokens. Work that comes once a step, such as reducing gradients, is in
    both samples and is not scaled.

    Args:
        run: times a step of some of the rollouts.
        batch: rollouts of about equal lengths, or with prompts that are long beside the rest.
        counts: of rollouts in the samples, the smaller first.
    """
    samples = [batch.select(list(range(count))) for count in counts]
    few, more = map(run, samples)
    tokens = [int(sample.lengths.sum()) for sample in samples]
    each = (more - few) / (tokens[1] - tokens[0])
    return more + max(0.0, each) * (int(batch.lengths.sum()) - tokens[1])


def exposed_ms(record: profile) -> float:
    """Milliseconds in which kernels of NCCL run on the device and no others do."""
    own: list[Interval] = []
    others: list[Interval] = []
    for event in record.events() or ():
        if event.device_type.name == "CUDA":
            kind = own if "nccl" in event.name.lower() else others
            kind.append((event.time_range.start, event.time_range.end))
    return not_covered(own, others) / 1e3


def not_covered(own: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Total length of the union of the intervals `own` minus the union of `others`."""
    a, b = _joined(own), _joined(others)
    return sum(end - begin for begin, end in a) - _common(a, b)


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, ascending."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
