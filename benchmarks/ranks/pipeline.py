"""Steps on the stages of a pipeline: the bubble predicted beside the one measured.

Groups of rollouts train a model that is cut into as many stages as there are ranks. The same plan
runs on the first rank alone, with the whole model. The measured bubble is the part of the stages'
time that the step on one rank does not explain; so it has the cost of sending as well. Measured
waits are the part in which stages wait for what others send, by the lanes of one step, which are
saved beside the rows. Another bubble is predicted: that with a barrier after the forwards of
prefixes and after the leaves (`benchmarks stages`). Blocks run eagerly on both sides. Where one
rank cannot hold the whole model and its step, give fewer layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from benchmarks.planning.stages import three_barriers
from benchmarks.ranks.team import OnRanks, RankSteps, RankTimed, Team, team_here
from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, device_for
from benchmarks.steps.stepper import Stepper, Timed
from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.plan.stage_sizes import choose_size, offers_of
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.synthetic import synthetic_rollouts

PROMPT, RESPONSE = 4096, 2048
Shape = Literal["qwen3-8b", "llama3-8b"]


@dataclass(frozen=True, kw_only=True)
class Pipeline(OnRanks):
    """Time steps on stages of a pipeline, beside the step on one rank; under torchrun.

    Attributes:
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
        shape: Whose sizes the model has.
        groups: Groups of a batch.
        group_sizes: Rollouts of each group.
        microbatch: The most tokens of a microbatch.
        layers: Give the model fewer layers than its shape has.
        repeats: How often a step is timed after a first time.
        tiny: A tiny model and lengths divided by 64, to try the command out, on CPUs as well.
    """

    NAME: ClassVar[str] = "pipeline"

    max_seconds: Seconds = 540.0
    shape: Shape = "qwen3-8b"
    groups: Count = 2
    group_sizes: tuple[int, ...] = (4, 16)
    microbatch: Count = 4096
    layers: Layers = None
    repeats: Count = 3
    tiny: Flag = False

    def check(self) -> None:
        for name in ("groups", "microbatch", "layers", "repeats"):
            check_at_least_one(name, getattr(self, name))
        for size in self.group_sizes:
            check_at_least_one("group_sizes", size)
        if not torchrun.is_on_ranks() or torchrun.size() < 2:
            raise ConfigError(
                "pipeline measures steps of several ranks, and this process is alone. Start it by "
                "torchrun --nproc-per-node 2 -m benchmarks pipeline."
            )
        device_for(self.NAME, tiny=self.tiny)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        yield from _Measuring(self, team_here(), deadline).rows()


class _Measuring:
    """The figures on this rank."""

    def __init__(self, options: Pipeline, team: Team, deadline: Deadline) -> None:
        self.options, self.team, self.deadline = options, team, deadline
        self.scale = SCALE_TINY if options.tiny else 1
        self.mesh = init_device_mesh(team.device.type, (team.size,), mesh_dim_names=("pp",))
        self.limits: dict[str, Any] = {
            "sharing": "group",
            "boundary": "across",
            "max_microbatch_tokens": max(1, options.microbatch // self.scale),
            "memory_budget": "auto" if team.cuda else None,
        }

    def rows(self) -> Iterator[ResultRow]:
        alone = self.team.exchange(self._alone() if self.team.rank == 0 else {})[0]
        self.team.free()
        steps = RankSteps(
            self.team, self._model(), compile_blocks=None, mesh=self.mesh, **self.limits
        )
        for size, one in alone.items():
            if self._over(f"groups of {size}"):
                continue
            timed = steps.time(self._batch(size), repeats=self.options.repeats, planned=False)
            yield from self._figures(size, one, timed, steps)

    def _figures(
        self, size: int, one: float, timed: RankTimed, steps: RankSteps
    ) -> Iterator[ResultRow]:
        stages, plan, ms = self.team.size, timed.plan, timed.typical_ms
        schedule = plan.pipeline
        assert schedule is not None
        cut = steps.policy.host.links.stages
        nested = plan.with_program(scores=False)
        policy = steps.policy
        prices = policy.model_state.calibration(policy.host, policy.config)
        barriers = three_barriers(choose_size([offers_of([nested], prices)], cut).work)
        busy, lanes = sum(schedule.busy), timed.lanes
        assert lanes is not None
        if self.team.rank == 0:
            lanes.save(self.options.path.with_suffix(f".{size}.lanes.json"))
        runs = sum(lane.busy for lane in lanes.measured)
        end = max(lane.ends[-1] for lane in lanes.measured)
        note = f"{len(plan.microbatches)} microbatches of at most {plan.max_microbatch_tokens}"
        for metric, value, unit in (
            ("one rank's step", one, "ms"),
            ("step", ms, "ms"),
            ("predicted bubble", schedule.bubble, "1"),
            ("predicted bubble of three barriers", 1 - busy / (stages * barriers), "1"),
            ("measured bubble", 1 - one / (stages * ms), "1"),
            ("measured waits", 1 - runs / (stages * end), "1"),
            ("predicted speed-up", busy / schedule.time, "x"),
            ("measured speed-up", one / ms, "x"),
        ):
            baseline = "one rank" if unit == "x" else None
            yield self._row(size, metric, value, unit, note=note, baseline=baseline)

    def _alone(self) -> dict[int, float]:
        """Milliseconds of each step on this rank alone, by the size of its groups."""
        stepper = Stepper(self._model(), compile_blocks=None, self_check=False, **self.limits)
        policy, found = stepper.configured(), dict[int, float]()
        for size in self.options.group_sizes:
            batch = self._batch(size)
            first = stepper.step(policy, batch)
            timed = Timed(first.plan)
            stepper.repeat(policy, batch, repeats=self.options.repeats, into=timed)
            found[size] = timed.typical_ms
        return found

    # Models and batches
    # ------------------------------------------------------------

    def _over(self, what: str) -> bool:
        """Whether the time of the first rank is up, which counts on all. Collective."""
        return self.team.exchange(self.deadline.over(what))[0]

    def _row(self, size: int, metric: str, value: float, unit: str, **more: Any) -> ResultRow:
        options = self.options
        name = f"tiny {options.shape}" if options.tiny else options.shape
        layers = f", {options.layers} layers" if options.layers else ""
        case = f"{name}{layers}, {self.team.size} stages, {options.groups} groups of {size}"
        return cell_row(Pipeline.NAME, case, metric, value, unit, **more)

    def _model(self) -> PreTrainedModel:
        return make_model(
            self.options.shape,
            self.team.device,
            dtype=torch.bfloat16 if self.team.cuda else torch.float32,
            layers=self.options.layers,
            tiny=self.options.tiny,
        )

    def _batch(self, size: int) -> RolloutBatch:
        return RolloutBatch(
            synthetic_rollouts(
                groups=self.options.groups,
                rollouts_per_group=size,
                prompt_tokens=PROMPT // self.scale,
                response_tokens=RESPONSE // self.scale,
                vocab_size=64 if self.options.tiny else 8192,
            )
        )
