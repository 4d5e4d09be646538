"""Steps of Qwen3-8B's shapes on several ranks, beside dense training there and on one GPU.

Each part has a load of its own, random tokens and random weights. Dense is the plan that shares
nothing, with the rows that were fastest on one GPU, in both ways to hold weights, the faster of
which counts; two samples of its rollouts are timed and extrapolated. A step takes as long as on the
slowest rank. Both sides have the same kernels, head and compiled blocks.

Before anything is timed, steps of few layers in float32 are compared with ordinary training in
float64 (`policy.verify`), for each way to hold the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import forkpoint
from benchmarks.ranks.team import (
    OnRanks,
    RankSteps,
    RankTimed,
    Team,
    dense_ms,
    sharded,
    team_here,
)
from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_group, make_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, device_for
from benchmarks.steps.stepper import DENSE, DENSE_ROW_TOKENS, Stepper, best_dense
from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import host_of
from forkpoint.losses import GRPO
from forkpoint.parallel.placement.lockstep import exchange_plans, predict_step
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.calibrate.calibrator import calibrate

SHAPE = "qwen3-8b"
SAMPLES = (4, 8)
"""Rollouts of the two samples of dense training."""
BESIDE = {"baseline": "dense", "baseline_leaves_out": True}
"""The denominator of a speed-up."""
GATHERS: tuple[Literal["microbatch", "step"], ...] = ("microbatch", "step")
Part = Literal["data", "group"]
CHECKED_LAYERS = 2
"""Layers of the models that are compared with ordinary training."""


@dataclass(frozen=True)
class OneRank:
    """The load of one rank on a GPU of its own."""

    dense_ms: float
    shared_ms: float
    bound: float
    row_tokens: int

    @property
    def speed_up(self) -> float:
        return self.dense_ms / self.shared_ms


@dataclass(frozen=True, kw_only=True)
class Ranks(OnRanks):
    """Time steps of several ranks, sharded and split, beside dense and one GPU; under torchrun.

    Attributes:
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
        parts: What to measure: data (two prompts of 8,192 with `responses` of 2,048 a rank, both
            ways to hold weights), group (one of 32, its prompt exchanged and replicated).
        responses: Of each prompt of `data`.
        mixed: Lengths of these are drawn from 131 to 2,048 instead.
        layers: Give the model fewer layers than its shape has.
        blocks: Whether decoder blocks are compiled, dense and shared alike.
        repeats: How often a step is timed after a first time.
        calibrate: Measure the device and the link first, and let plans be priced by that.
        unchecked: Leave out the comparison of gradients.
        tiny: A tiny model and lengths divided by 64, to try the command out, on CPUs as well.
    """

    NAME: ClassVar[str] = "ranks"

    max_seconds: Seconds = 540.0
    parts: tuple[Part, ...] = ("data", "group")
    responses: Count = 16
    mixed: Flag = False
    layers: Layers = None
    blocks: Literal["compiled", "eager"] = "compiled"
    repeats: Count = 2
    calibrate: Flag = False
    unchecked: Flag = False
    tiny: Flag = False

    def check(self) -> None:
        for name in ("layers", "repeats"):
            check_at_least_one(name, getattr(self, name))
        if self.responses < SAMPLES[1]:
            raise ConfigError(
                f"responses is {self.responses}; dense training is extrapolated from samples of "
                f"{SAMPLES[0]} and {SAMPLES[1]} of them. Give {SAMPLES[1]} or more."
            )
        if not torchrun.is_on_ranks() or (torchrun.size() < 2 and self.parts != ("data",)):
            raise ConfigError(
                "ranks measures steps of several ranks, and this process is alone. Start it by "
                "torchrun --nproc-per-node 2 -m benchmarks ranks. By --nproc-per-node 1 it can "
                "measure --parts data, which is then what fully_shard itself takes."
            )
        if torchrun.size() < 2 and self.calibrate:
            raise ConfigError(
                "calibrate measures the link between ranks, and there is one rank. Leave it out."
            )
        device_for(self.NAME, tiny=self.tiny)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        yield from _Measuring(self, team_here(), deadline).rows()


class _Measuring:
    """One run of the benchmark on this rank."""

    def __init__(self, options: Ranks, team: Team, deadline: Deadline) -> None:
        self.options, self.team, self.deadline = options, team, deadline
        self.shape = f"tiny {SHAPE}" if options.tiny else SHAPE
        self.shape += f" {options.layers} layers" if options.layers else ""
        self.scale = SCALE_TINY if options.tiny else 1
        self.dtype = torch.bfloat16 if team.cuda else torch.float32
        self.compiled = None if options.blocks == "compiled" else False
        self.calibration: Calibration | None = None
        self.prices: dict[str, Any] = {}

    def rows(self) -> Iterator[ResultRow]:
        parts = self.options.parts
        if not self.options.unchecked and not self._over("comparison of gradients"):
            yield from self._checked()
        if self.options.calibrate and not self._over("calibration"):
            yield from self._calibrated()
        alone: OneRank | None = None
        if "data" in parts and not self._over("one rank"):
            alone = self._alone()
            lengths = "131-2048" if self.options.mixed else "2048"
            load = f"P8192 R{lengths} N{self.options.responses}"
            figure = partial(self._row, f"one rank, {load} twice")
            yield figure("shared step", alone.shared_ms, "ms")
            yield figure("dense step", alone.dense_ms, "ms")
            yield figure("speed-up", alone.speed_up, "x", **BESIDE, bound=alone.bound)
            self.team.free()
        if not self._over("fully_shard"):
            yield from self._sharded(alone)

    # What all parts use
    # ------------------------------------------------------------

    def _over(self, what: str) -> bool:
        """Whether the time of the first rank is up, which counts on all. Collective."""
        return self.team.exchange(self.deadline.over(what))[0]

    def _row(self, case: str, metric: str, value: float, unit: str, **more: Any) -> ResultRow:
        where = f"{self.shape}, {self.team.size} ranks, {self.options.blocks}"
        return cell_row(Ranks.NAME, f"{where}, {case}", metric, value, unit, **more)

    def _model(
        self, dtype: torch.dtype | None = None, layers: int | None = None
    ) -> PreTrainedModel:
        """The model on each rank by itself."""
        return make_model(
            SHAPE,
            self.team.device,
            dtype=dtype or self.dtype,
            layers=layers or self.options.layers,
            tiny=self.options.tiny,
        )

    def _sharded_model(
        self, dtype: torch.dtype | None = None, layers: int | None = None
    ) -> PreTrainedModel:
        """The model, sharded by fully_shard over all ranks."""
        mesh = init_device_mesh(self.team.device.type, (self.team.size,))
        model = sharded(self._model(dtype, layers), mesh)
        self.team.free()
        return model

    def _groups(self, sizes: list[tuple[int, list[int]]], vocab: int, seed: int) -> RolloutBatch:
        """Groups of one prompt each, by its length and those of its responses."""
        rollouts = []
        for number, (prompt, responses) in enumerate(sizes):
            lengths = [max(2, response // self.scale) for response in responses]
            batch = make_group(
                max(2, prompt // self.scale),
                lengths,
                vocab=vocab,
                seed=seed + number,
                group=f"{seed + number}",
            )
            rollouts += [
                replace(r, rollout_id=f"{seed}-{len(rollouts) + n}") for n, r in enumerate(batch)
            ]
        return RolloutBatch(rollouts)

    def _load(self, vocab: int, rank: int) -> RolloutBatch:
        """Two prompts of 8,192 with responses of the same lengths on all ranks."""
        lengths = [2048] * self.options.responses
        if self.options.mixed:
            lengths = np.random.default_rng(42).integers(131, 2049, len(lengths)).tolist()
        return self._groups([(8192, lengths)] * 2, vocab, seed=100 * rank)

    def _checked(self) -> Iterator[ResultRow]:
        vocab = 64
        sizes = [(64 * self.scale, [24 * self.scale] * 3)] * 2
        batch = self._groups(sizes, vocab, seed=100 * self.team.rank)
        for gather in GATHERS:
            model = self._sharded_model(torch.float32, CHECKED_LAYERS)
            policy = forkpoint.wrap(model, forkpoint.Config(compile_blocks=False, gather=gather))
            report = policy.verify(batch, GRPO())
            errors = [f"{p.kind} {p.shared_error:.2g} of {p.allowed:.2g}" for p in report.plans]
            yield self._row(
                f"fully_shard, {gather}, {CHECKED_LAYERS} layers, float32",
                "plans that are not exact",
                float(sum(not plan.passed for plan in report.plans) + (not report.plans)),
                "plans",
                bar=0.0,
                note="; ".join(errors),
            )
            del model, policy, report
            self.team.free()

    def _calibrated(self) -> Iterator[ResultRow]:
        def measured() -> Calibration:
            shape = host_of(self._model(layers=1)).shape
            return calibrate(
                lambda layers: self._model(layers=layers), shape, compile_blocks=self.compiled
            )

        found = torchrun.from_the_first(measured)
        found = replace(found, link=torchrun.measured_link("auto"))
        path = self.options.path.with_suffix(".calibration.json").resolve()
        if self.team.rank == 0:
            found.save(path)
        self.team.free()
        self.team.begin()
        self.calibration, self.prices = found, {"calibration": str(path)}
        assert found.link is not None
        link = found.link
        figure = partial(self._row, "link", note=link.describe())
        yield figure("gathering", link.gather_bytes_per_ms / 1e6, "GB/s")
        yield figure("latency of gathering", link.gather_latency_ms, "ms")
        yield figure("sending", link.send_bytes_per_ms / 1e6, "GB/s")
        yield figure("latency of sending", link.send_latency_ms, "ms")

    def _alone(self) -> OneRank:
        """Each rank's load by itself, all at once; the slowest counts."""
        model = self._model()
        stepper = Stepper(model, compile_blocks=self.compiled, self_check=False)  # type: ignore[arg-type]
        batch = self._load(stepper.vocab, self.team.rank)
        found, policy, _ = best_dense(
            stepper,
            batch,
            sample=SAMPLES[0],
            row_tokens=DENSE_ROW_TOKENS // self.scale,
        )
        row_tokens = int(self.team.exchange(found.row_tokens)[0])
        rows: dict[str, Any] = {**DENSE, "max_microbatch_tokens": row_tokens}
        del found, policy, stepper
        self.team.free()  # also what rows held that did not fit
        steps = RankSteps(self.team, model, compile_blocks=self.compiled, **self.prices)
        repeats = self.options.repeats

        def run(some: RolloutBatch) -> float:
            return steps.time(some, repeats=1, **rows).typical_ms

        dense = dense_ms(run, batch, SAMPLES)
        shared = steps.time(batch, repeats=repeats)
        return OneRank(dense, shared.typical_ms, shared.plan.bound, row_tokens)

    # fully_shard
    # ------------------------------------------------------------

    def _sharded(self, alone: OneRank | None) -> Iterator[ResultRow]:
        model = self._sharded_model()
        steps = RankSteps(self.team, model, compile_blocks=self.compiled, **self.prices)
        if "data" in self.options.parts and alone is not None:
            yield from self._data(steps, alone)
        if "group" in self.options.parts and not self._over("group"):
            yield from self._group(steps)

    def _data(self, steps: RankSteps, alone: OneRank) -> Iterator[ResultRow]:
        batch = self._load(steps.policy.host.shape.vocab, self.team.rank)
        rows: dict[str, Any] = {**DENSE, "max_microbatch_tokens": alone.row_tokens}
        dense: dict[str, float] = {}
        for gather in GATHERS:

            def run(some: RolloutBatch, gather: str = gather) -> float:
                return steps.time(some, repeats=1, gather=gather, **rows).typical_ms

            dense[gather] = dense_ms(run, batch, SAMPLES)
        way = min(GATHERS, key=lambda gather: dense[gather])
        few = batch.select(list(range(SAMPLES[0])))
        dense_alone = steps.exposed(few, gather=way, **rows)
        dense_few = steps.time(few, repeats=1, gather=way, **rows).typical_ms
        shared: dict[str, RankTimed] = {}
        for gather in GATHERS:
            timed = steps.time(batch, repeats=self.options.repeats, gather=gather)
            shared[gather] = timed
            figure = partial(self._row, f"fully_shard, gather {gather}")
            bound, ratio = timed.plan.bound, dense[way] / timed.typical_ms
            yield figure("shared step", timed.typical_ms, "ms")
            yield figure("dense step", dense[gather], "ms", note=f"best is {way}")
            yield figure(
                "speed-up", ratio, "x", **{**BESIDE, "baseline": "dense at its best"}, bound=bound
            )
            yield figure(
                "one rank's speed-up over that of ranks",
                alone.speed_up / ratio,
                "1",
                bar=1 / 0.95 if self.team.cuda else None,
            )
            if timed.peak_bytes is not None:
                yield figure("shared peak", timed.peak_bytes, "bytes")
            yield figure("step besides that of one rank", timed.typical_ms - alone.shared_ms, "ms")
            own = steps.exposed(batch, gather=gather)
            if own is not None and dense_alone is not None:
                yield figure("communication that is not hidden", own, "ms", note="by a profiler")
                points = own / timed.typical_ms - dense_alone / dense_few
                yield figure(
                    "communication that is not hidden, more than dense has", points, "1", bar=0.03
                )
        figure = partial(self._row, "fully_shard, both ways")
        lockstep, once = (shared[gather] for gather in GATHERS)
        bar = 1.03 if self.team.cuda else None
        ratio = lockstep.typical_ms / once.typical_ms
        yield figure("lockstep", ratio, "1", baseline="gathered once", bar=bar)
        if lockstep.peak_bytes is not None and once.peak_bytes is not None:
            peak = lockstep.peak_bytes / once.peak_bytes
            yield figure("peak of lockstep", peak, "1", baseline="gathered once", bar=1.0)

    def _group(self, steps: RankSteps) -> Iterator[ResultRow]:
        """One group of 32, dealt out to the ranks."""
        size, shape = self.team.size, steps.policy.host.shape
        whole_group = self._groups([(8192, [2048] * 32)], shape.vocab, seed=0)
        parts = [whole_group.select(list(range(r, 32, size))) for r in range(size)]
        budget = steps.policy.with_config(gather="step").memory_budget_bytes
        planned = partial(
            make_plan,
            shape=shape,
            config=forkpoint.Config(memory_budget=budget),
            calibration=self.calibration,
        )
        plans: list[Plan | None] = [planned(part) for part in parts]
        others, prompts = exchange_plans(list(parts), plans, lambda b, t: planned(b, prompts=t))
        predicted = {
            "replicate": predict_step(plans, self.calibration).once,
            "exchange": predict_step(others, self.calibration, prompts).once,
        }
        found: dict[str, float] = {}
        for split, cost in predicted.items():
            timed = steps.time(
                parts[self.team.rank],
                repeats=self.options.repeats,
                planned=False,
                gather="step",
                split=split,
            )
            assert split == "replicate" or timed.plan.split == "exchange"
            found[split] = timed.typical_ms
            figure = partial(self._row, f"one group of 32, {split}")
            yield figure("step", timed.typical_ms, "ms", note="making the plan is in it")
            if self.calibration is not None:
                yield figure("predicted step", cost, "ms", note=self.calibration.describe())
            if timed.peak_bytes is not None:
                yield figure("peak", timed.peak_bytes, "bytes")
        figure = partial(self._row, "one group of 32, exchange", baseline="replicate")
        yield figure("step over replicating", found["exchange"] / found["replicate"], "1")
        ratio = predicted["exchange"] / predicted["replicate"]
        yield figure("predicted step over replicating", ratio, "1")
