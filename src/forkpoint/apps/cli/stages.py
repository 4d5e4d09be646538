"""Predicted steps on pipeline stages, for `forkpoint plan --stages`. Imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

from forkpoint.apps.cli.plan_text import counted
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.plan import ModelShape, Plan
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.stage_sizes import Planner, choose_size, offers_of, plans_of_sizes
from forkpoint.plan.stages import Stage, stages_of_shape
from forkpoint.units import format_bytes


@dataclass
class Pipeline:
    """Sums over batches of predicted steps on stages. Times have the unit of costs of plans."""

    stages: tuple[Stage, ...]
    time: float = 0.0
    busy: list[float] = field(default_factory=list)
    """For each stage, the time in which it runs something."""
    peak_bytes: list[float] = field(default_factory=list)
    """For each stage, the largest peak of activations and prefix cache of any batch, in bytes."""

    @classmethod
    def of(cls, shape: ModelShape | None, count: int) -> "Pipeline":
        """Raises ConfigError without a shape, and PlanError for more stages than layers."""
        if shape is None:
            raise ConfigError(
                f"stages is {count}, but without a model there are no layers to divide. Add "
                "a model, such as --model Qwen/Qwen3-8B."
            )
        return cls(stages_of_shape(shape, count), busy=[0.0] * count, peak_bytes=[0.0] * count)

    def plan(
        self,
        config: Config,
        budget_bytes: int | None,
        make: Planner,
        calibration: Calibration | None,
    ) -> Plan:
        """Plan one batch with the best size of microbatches for the stages, and add it to the sums.
        `budget_bytes`: budget of each stage; None means no limit."""
        plans = plans_of_sizes(config, budget_bytes, len(self.stages), make)
        strict = config.memory_budget_bytes is not None
        offers = offers_of(plans, calibration)
        found = choose_size([offers], self.stages, budget_bytes, strict=strict)
        self.time += found.time
        ends = zip(found.busy, found.schedule.peak_bytes, strict=True)
        for stage, (busy, peak) in enumerate(ends):
            self.busy[stage] += busy
            self.peak_bytes[stage] = max(self.peak_bytes[stage], peak)
        return found.predicted(plans[found.size])

    @property
    def peak(self) -> int:
        """Largest peak of activations and prefix cache of any stage, in bytes."""
        return round(max(self.peak_bytes))

    def device(self, whole: DeviceMemory) -> DeviceMemory:
        """Memory of the device of the stage with the most parameters, from that of the whole
        model."""
        blocks = whole.parameters - whole.embeddings
        share = max(stage.share for stage in self.stages)
        # The first stage has the embeddings and the last stage the head, if these are not tied.
        ends = whole.embeddings if len(self.stages) == 1 else -(-whole.embeddings // 2)
        return replace(whole, parameters=int(blocks * share) + ends, embeddings=ends)

    def facts(self) -> dict[str, Any]:
        """Fields of the JSON line."""
        work, time = sum(self.busy), len(self.stages) * self.time
        return {
            "step_over_share": time / work if work else 1.0,
            "bubble": 1 - work / time if time else 0.0,
            "stages": [
                {
                    "layers": stage.layers,
                    "idle_share": 1 - busy / self.time if self.time else 0.0,
                    "peak_bytes": round(peak),
                }
                for stage, busy, peak in zip(self.stages, self.busy, self.peak_bytes, strict=True)
            ],
        }

    def answers(self) -> dict[str, str]:
        """Lines of the output, by their names."""
        facts, stages = self.facts(), counted(len(self.stages), "stage")
        found = {
            "stages": f"{stages}: step {facts['step_over_share']:.2f}x an equal share, bubble "
            f"{facts['bubble']:.0%}"
        }
        for stage, fact in zip(self.stages, facts["stages"], strict=True):
            head = " and head" if stage.is_last else ""
            found[f"stage {stage.index}"] = (
                f"{counted(stage.layers, 'layer')}{head}: {fact['idle_share']:.0%} idle, "
                f"{format_bytes(fact['peak_bytes'])} of activations"
            )
        return found
