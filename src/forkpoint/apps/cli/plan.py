"""`forkpoint plan`: what would run for a file of rollouts, and what sharing saves on it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import DisallowNone, arg

from forkpoint.apps.cli.losses import Objective
from forkpoint.apps.cli.options import (
    Device,
    File,
    Flag,
    Limit,
    Memory,
    Reading,
    WholeNumber,
    batches_of,
    recorded_batches,
    show_source,
    whole_number,
)
from forkpoint.apps.cli.output import Output
from forkpoint.apps.cli.plan_text import (
    answers,
    further,
    longest_answer,
    memory_answers,
    mode_table,
    modes,
    plan_answers,
)
from forkpoint.apps.cli.ranks import Ranks
from forkpoint.apps.cli.stages import Pipeline
from forkpoint.config import AUTO, Config
from forkpoint.errors import ConfigError, ForkpointError, PlanError
from forkpoint.hosts.transformers.model_files import encoder_of_model, from_hub
from forkpoint.parallel.placement.place import check_ranks
from forkpoint.plan import Estimate, ModelShape, Totals, make_plan
from forkpoint.plan import Plan as MadePlan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.lanes import lanes_of
from forkpoint.plan.longest import longest, one_group, responses_of
from forkpoint.plan.parting import LITTLE, Parting, where_prompts_part
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.pricing.totals import EncoderTotals
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.traces import RolloutFile
from forkpoint.tree.forest import IntArray

if TYPE_CHECKING:
    from forkpoint.losses import Loss

LONGEST_MICROBATCHES = (16_384, 4096, 1024)
"""Limits of microbatches with which the longest prompt is planned. Plans of shorter ones take
minutes to make, and their microbatches do not fill a device."""
LABEL = 14
"""Characters of the names of answers."""
AnyModel = DisallowNone[
    Annotated[
        Path | None,
        arg(metavar="NAME|DIR|CONFIG.json", help_behavior_hint="(default: count tokens only)"),
    ]
]
RankCount = Annotated[int | None, WholeNumber, arg(help_behavior_hint="(default: none)")]
StageCount = Annotated[int | None, whole_number(1), arg(help_behavior_hint="(default: none)")]
LanesFile = DisallowNone[
    Annotated[Path | None, arg(metavar="FILE.json", help_behavior_hint="(default: none)")]
]
BatchRollouts = Annotated[
    int | None, whole_number(1), arg(help_behavior_hint="(default: all, up to 4 million tokens)")
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show what would run for a file of rollouts and what sharing saves, batch by batch.

    A batch is what one optimizer step trains on; nothing is shared between batches. A file of up to
    4 million tokens is one batch. A larger one is read as a stream of batches, in the memory of
    one; every batch is planned, and what the plans add up to is shown. Runs no model: it needs
    neither weights nor a GPU.

    Attributes:
        file: Rollouts, as a trainer or forkpoint writes them, such as hf://datasets/NAME/FILE, or
            the folder of a trace, whose batches are those that were recorded.
        model: A model by its name (Qwen/Qwen3-8B, llama3-8b, ...), its folder or its config.json;
            with it FLOPs and bytes are counted, not only tokens. Of other names on the Hub the
            config.json is fetched.
        batch_rollouts: A batch is this many rollouts, in the order of the file.
        details: Show the whole plan of the first batch as well: its microbatches and its tree, what
            was looked at, and what each way to share saves.
        ranks: Show what a step costs on N data-parallel ranks, with the rollouts placed by
            forkpoint, by token counts and in the order of the file. The ranks wait for each other
            in every forward and backward, as with sharded weights. Memory is then that of a rank.
        longest: Show the longest prompt that fits device_memory, and host_memory, with responses as
            long as those of the first group.
        stages: Show the step on N stages of a pipeline: time, bubble, and memory of each.
        lanes: Write what each stage runs and when, in the first batch, for forkpoint report.
        frozen_encoder: The encoder of images and video is not trained.
        limit: Read only the first N rollouts of the file.
        json: Print one line of JSON and nothing else.
        config: How batches are planned and run, as forkpoint.Config describes it.
    """

    file: File
    model: AnyModel = None
    batch_rollouts: BatchRollouts = None
    details: Flag = False
    ranks: RankCount = None
    longest: Flag = False
    stages: StageCount = None
    lanes: LanesFile = None
    frozen_encoder: Flag = False
    limit: Limit = None
    json: Flag = False
    objective: Objective = field(default_factory=Objective)
    reading: Reading = field(default_factory=Reading)
    config: Config = field(default_factory=Config)
    memory: Memory = field(default_factory=Memory)
    device: Device = field(default_factory=Device)

    def run(self) -> int:
        out, config = Output(json_only=self.json), self.config
        model = None if self.model is None else from_hub(self.model)
        shape = self.memory.shape(model)
        if self.ranks is not None:
            check_ranks(self.ranks)
        device = self.device.memory(model, shape, config.optimizer_bytes_per_parameter, self.ranks)
        if self.longest and (device is None or self.stages is not None):
            raise ConfigError(
                "longest is asked for, which is predicted for one device: give --model and "
                "--device-memory, and no --stages."
            )
        pipeline = None
        if self.lanes is not None and self.stages is None:
            raise ConfigError(
                f"lanes is {self.lanes}, and lanes are those of stages. Add --stages 4, say."
            )
        if self.stages is not None:
            if self.ranks is not None:
                raise ConfigError(
                    f"stages is {self.stages} and ranks is {self.ranks}; a step on both is not "
                    "predicted. Give one of the two."
                )
            pipeline = Pipeline.of(shape, self.stages)
            device = None if device is None else pipeline.device(device)
        measured = config.calibration
        named = measured not in (None, AUTO)
        calibration = Calibration.load(Path(measured or "")) if named else None
        source = self.reading.open(self.file, self.limit, pixels=False)
        estimate, totals, first = Estimate(shape), Totals(), None
        parting: Parting | None = None
        with out.waiting("planning"):
            loss, ranks = self.objective.make(), None
            leaves_early = shape is None or not shape.checkpointed
            capabilities = Capabilities(leaves_early=leaves_early, runs_ahead=device is not None)
            if self.ranks is not None:
                # Losses of pairs need both rollouts on one rank.
                pairs = loss.decomposition == "joint"
                ranks = Ranks(self.ranks, shape, calibration, config, whole_groups=pairs)

            budget_bytes = config.memory_budget_bytes
            if config.memory_budget == AUTO and device is not None:
                budget_bytes = device.budget_bytes

            def make(
                batch: RolloutBatch,
                prompts: tuple[PlannedPrompt, ...] | None = None,
                runs: IntArray | None = None,
                *,
                config: Config = config,
                budget_bytes: int | None = budget_bytes,
            ) -> MadePlan:
                if runs is None:
                    runs = self._edges_to_run(batch, loss, source)
                encoder = self._encoder(model, shape) if batch.media else None
                return make_plan(
                    batch,
                    shape,
                    config,
                    coupling=None if loss.decomposition == "token" else loss.coupling(batch),
                    calibration=calibration,
                    capabilities=replace(capabilities, encoder=encoder),
                    measured_budget_bytes=budget_bytes,
                    prompts=prompts,
                    runs=runs,
                )

            def planned(batch: RolloutBatch) -> MadePlan:
                if pipeline is None:
                    return make(batch)
                return pipeline.plan(
                    config,
                    budget_bytes,
                    lambda config, size: make(batch, config=config, budget_bytes=size),
                )

            responses: list[int] = []
            for batch in self._batches(source):
                try:
                    if shape is not None:
                        batch.check_vocabulary(shape.vocab)
                    plan = planned(batch)
                except ForkpointError as error:
                    if not totals.batches:
                        raise
                    raise type(error)(f"{self.file}, batch {totals.batches}: {error}") from None
                estimate.add(batch, plan.run_lengths)
                totals.add(plan)
                first = first or plan
                responses = responses or responses_of(batch)
                if parting is None and plan.computed_tokens >= LITTLE * plan.dense.tokens:
                    parting = where_prompts_part(batch)
                if ranks is not None:
                    ranks.add(batch, plan, make)
            prompt = None
            if self.longest and device is not None and shape is not None and responses:
                prompt = _longest_prompt(make, config, device, responses, shape.vocab)
        assert first is not None, "an empty file has been refused"
        if self.lanes is not None:
            lanes_of(first).save(self.lanes)
        show_source(source, out)
        of_rank = totals if ranks is None else ranks.of_rank
        peak = of_rank.predicted_peak_bytes if pipeline is None else pipeline.peak
        shown = answers(first, totals, estimate, parting)
        shown |= memory_answers(of_rank, peak, device)
        shown |= {} if prompt is None else {"longest": longest_answer(prompt, responses)}
        shown |= plan_answers(first, totals)
        shown["next"] = further(totals, parting, self.file, self.model, device, peak)
        shown |= ranks.answers() if ranks else {}
        shown |= pipeline.answers() if pipeline else {}
        out.show(*(f"{name:{LABEL}}{answer}" for name, answer in shown.items()))
        if self.details:
            out.show(*(["the first batch:"] if totals.batches > 1 else []))
            out.show(first.explain(width=out.width), mode_table(estimate, Path(self.file).name))
        out.result(
            self._result(first, totals, estimate)
            | {"device_memory": device and _device_facts(device, peak or 0)}
            | {"longest_prompt_tokens": prompt}
            | {"prompts_part": parting and asdict(parting)}
            | {"ranks": ranks and ranks.facts()}
            | {"pipeline": pipeline and pipeline.facts()}
        )
        return 0

    def _encoder(self, model: Path | None, shape: ModelShape | None) -> EncoderShape | None:
        if model is None or shape is None:
            return None
        found = encoder_of_model(
            model, dtype_bytes=shape.dtype_bytes, checkpointed=shape.checkpointed
        )
        return None if found is None else replace(found, trained=not self.frozen_encoder)

    def _batches(self, source: RolloutFile) -> Iterator[RolloutBatch]:
        if source.trace is not None and self.limit is None and self.batch_rollouts is None:
            return recorded_batches(source)
        return batches_of(source, self.batch_rollouts)

    def _edges_to_run(self, batch: RolloutBatch, loss: "Loss", source: RolloutFile) -> IntArray:
        """How many edges of each rollout run: int64 [N]."""
        from forkpoint.losses.zeros import zero_rollouts

        # With rewards in the place of advantages it is not known which give no gradient.
        if source.rewarded or self.config.all_logprobs:
            return run_lengths(batch)
        return run_lengths(batch, zero_rollouts(loss, batch))

    def _result(self, plan: MadePlan, totals: Totals, estimate: Estimate) -> dict[str, Any]:
        return {
            "command": "plan",
            "file": self.file,
            "model": self.model,
            "batches": estimate.batches,
            "rollouts": estimate.rollouts,
            "groups": estimate.groups,
            "logical_tokens": estimate.logical_tokens,
            "group_tokens": estimate.group_tokens,
            "unique_tokens": estimate.unique_tokens,
            "left_out": asdict(totals.left_out),
            "computed_tokens": totals.computed_tokens,
            "trained_tokens": estimate.trained_tokens,
            "microbatches": totals.microbatches,
            "encoder": _encoder_facts(totals.encoders),
            "plans": dict(totals.kinds.most_common()),
            "bound": estimate.bound(),
            "bound_unit": "tokens" if plan.shape is None else "flops",
            "predicted_speedup": totals.predicted_speedup,
            "predicted_peak_bytes": totals.predicted_peak_bytes,
            "predicted_ms": totals.predicted_ms,
            "max_microbatch_tokens": plan.max_microbatch_tokens,
            "sharing": plan.sharing,
            "boundary": plan.boundary,
            "reason": plan.reason,
            "candidates": [asdict(candidate) for candidate in plan.candidates],
            "modes": modes(estimate),
        }


def _longest_prompt(
    make: Callable[..., MadePlan],
    config: Config,
    device: DeviceMemory,
    responses: list[int],
    vocab: int,
) -> int:
    """The longest prompt whose plan, with these responses, fits; 0 if none does."""
    given = config.max_microbatch_tokens
    limits = LONGEST_MICROBATCHES if given is None else (given,)

    def fits(prompt: int) -> bool:
        batch = one_group(prompt, responses, vocab)
        runs = run_lengths(batch)
        for tokens in limits:
            try:
                limited = replace(config, max_microbatch_tokens=tokens)
                plan = make(batch, runs=runs, config=limited)
            except PlanError:
                continue
            if device.fits(plan.predicted_peak_bytes or 0):
                return True
        return False

    return longest(fits)


def _encoder_facts(found: EncoderTotals) -> dict[str, Any] | None:
    """Runs of encoders in the JSON line; None where rollouts have no images or video."""
    if not found.places:
        return None
    return {
        "places": found.places,
        "forwards": found.forwards,
        "backwards": found.backwards,
        "flops": found.flops or None,
        "share": found.share,
        "bound": found.bound,
    }


def _device_facts(device: DeviceMemory, peak_bytes: int) -> dict[str, Any]:
    """Memory of the device in the JSON line."""
    return {
        "bytes": device.total_bytes,
        "weights_bytes": device.weights_bytes,
        "gradients_bytes": device.gradients_bytes,
        "optimizer_bytes": device.optimizer_bytes,
        "left_bytes": device.left_bytes,
        "peak_bytes": peak_bytes,
        "fits": device.fits(peak_bytes),
        "fits_from_ranks": device.least_ranks(peak_bytes),
    }
