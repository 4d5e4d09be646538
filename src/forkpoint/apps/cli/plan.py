"""`forkpoint plan`: predicts the step and the speed-up for a file of rollouts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import DisallowNone, arg

from forkpoint.apps.cli import plan_text as text
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
    check_kernels,
    recorded_batches,
    show_source,
    whole_number,
)
from forkpoint.apps.cli.output import Output, check_output
from forkpoint.apps.cli.ranks import Ranks
from forkpoint.apps.cli.stages import Pipeline
from forkpoint.config import AUTO, Config
from forkpoint.errors import ConfigError, ForkpointError
from forkpoint.hosts.transformers.model_files import encoder_of_model, from_hub
from forkpoint.parallel.placement.place import check_ranks
from forkpoint.plan import ModelShape, Totals, make_plan
from forkpoint.plan import Plan as MadePlan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.lanes import lanes_of
from forkpoint.plan.parting import LITTLE, Partings
from forkpoint.plan.plan import LongestPrompt
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.pricing.totals import EncoderTotals
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.traces import RolloutFile
from forkpoint.tree.forest import IntArray
from forkpoint.units import MOST

_DEFAULT = Config()
_MEMORY = {
    name: getattr(_DEFAULT, name)
    for name in (
        *("max_microbatch_tokens", "memory_budget", "activations", "checkpointing"),
        *("prefix_cache", "head_logits"),
    )
}
"""Defaults of the options that trade time for memory."""
LABEL = 14
"""Width of the names of answers in characters."""
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
    """Predict the step and the speed-up for a file of rollouts, batch by batch.

    A batch has the rollouts of one optimizer step. Batches share nothing. A file of up to 4 million
    tokens is one batch. A larger file is read as a stream of batches, in the memory of one batch;
    the output has the sums over all plans. The command needs neither weights nor a GPU.

    Attributes:
        file: Rollouts of a trainer or of forkpoint (a path or a url such as
            hf://datasets/NAME/FILE), or the folder of a trace with its recorded batches.
        model: Name of a model (Qwen/Qwen3-8B, llama3-8b, ...), its folder or its config.json. With
            it FLOPs and bytes are counted too. For other names on the Hub the config.json is
            downloaded.
        batch_rollouts: Number of rollouts in a batch, in the order of the file.
        details: Show the whole plan of the first batch too: its microbatches, its tree, the plans
            that were compared, the tokens without sharing and with each kind of sharing, and the
            token at which each group parts.
        ranks: Show the step on N data-parallel ranks, with rollouts placed by forkpoint, by token
            counts and in the order of the file. The ranks run in lockstep, as with sharded weights.
            Memory is that of one rank.
        stages: Show the step on N stages of a pipeline: time, bubble, and memory of each.
        lanes: Write the times of each stage in the first batch, for forkpoint report.
        frozen_encoder: Plan for an encoder of images and video that is not trained.
        limit: Read only the first N rollouts of the file.
        json: Print one line of JSON and nothing else.
        config: Options of planning and running, as in forkpoint.Config.
    """

    file: File
    model: AnyModel = None
    batch_rollouts: BatchRollouts = None
    details: Flag = False
    ranks: RankCount = None
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
        out = Output(json_only=self.json)
        check_kernels(self.config)
        model = None if self.model is None else from_hub(self.model)
        shape = self.memory.shape(model)
        device = self._checked_device(model, shape)
        pipeline = None
        if self.stages is not None:
            pipeline = Pipeline.of(shape, self.stages)
            device = None if device is None else pipeline.device(device)
        source = self.reading.open(self.file, self.limit, pixels=False)
        totals, first, partings = Totals(), None, Partings()
        with out.waiting("planning"):
            planner = _Planner(self, source, model, shape, device, pipeline)
            ranks = None
            if self.ranks is not None:
                # Losses of pairs need both rollouts of a pair on one rank.
                pairs = planner.loss.decomposition == "joint"
                calibration = planner.calibration
                ranks = Ranks(self.ranks, shape, calibration, self.config, whole_groups=pairs)
            for batch in self._batches(source):
                try:
                    plan = planner.plan(batch)
                except ForkpointError as error:
                    if not totals.batches:
                        raise
                    raise type(error)(f"{self.file}, batch {totals.batches}: {error}") from None
                totals.add(batch, plan, planner.unlimited(batch))
                first = first or plan
                little = plan.computed_tokens >= LITTLE * plan.dense.tokens
                partings.add(batch, little=little)
                if ranks is not None:
                    ranks.add(batch, plan, planner.make)
            assert first is not None, "an empty file has been refused"
            longest = planner.longest_prompt(first)
        if self.lanes is not None:
            lanes_of(first).save(self.lanes)
        show_source(source, out)
        of_rank = totals if ranks is None else ranks
        peak = of_rank.predicted_peak_bytes if pipeline is None else pipeline.peak
        shown = text.answers(first, totals, partings)
        shown |= {} if model is None else {"dtype": self.memory.dtype_text(model)}
        own = ["the model's own"] if self.memory.gradient_checkpointing else None
        shown |= text.memory_answers(peak, own or of_rank.checkpointing, device)
        limited = planner.budget_bytes is not None
        shown |= text.cost_answers(totals, self.config, self._unused(totals), limited=limited)
        shown |= {} if longest is None else {"longest": str(longest)}
        shown |= text.plan_answers(first, totals)
        shown["next"] = text.further(
            totals, partings, self.file, self.model, device, peak, self.stages
        )
        shown |= text.smaller_answers(device, peak)
        shown |= ranks.answers() if ranks else {}
        shown |= pipeline.answers() if pipeline else {}
        out.show(*(f"{name:{LABEL}}{answer}" for name, answer in shown.items()))
        if self.details:
            out.show(*(["the first batch:"] if totals.batches > 1 else []))
            out.show(first.explain(width=out.width), text.mode_table(totals, Path(self.file).name))
            out.show(*([text.parting_table(partings.of_first)] if partings.of_first else []))
        out.result(
            self._result(first, totals, model)
            | {"device_memory": device and _device_facts(device, peak or 0)}
            | {"longest_prompt_tokens": longest and longest.tokens}
            | {"prompts_part": partings.needless and asdict(partings.needless)}
            | {"groups_part": [asdict(one) for one in partings.of_first or ()]}
            | {"ranks": ranks and ranks.facts()}
            | {"pipeline": pipeline and pipeline.facts()}
        )
        return 0

    def _checked_device(self, model: Path | None, shape: ModelShape | None) -> DeviceMemory | None:
        """The memory of the device; None without --device-memory. Raises ConfigError for options
        that exclude each other."""
        if self.ranks is not None:
            check_ranks(self.ranks)
        device = self.device.memory(model, shape, self.config, self.ranks)
        policy = self.config.checkpointing
        if self.memory.gradient_checkpointing and policy not in (AUTO, "none"):
            raise ConfigError(
                f"gradient_checkpointing is set and checkpointing is {policy!r}; a step does not "
                "take both. Leave one of them out."
            )
        sharded = self.device.shard == "fully" and (self.ranks or 1) > 1
        if sharded and self.config.grad_accumulation_dtype == "float32":
            raise ConfigError(
                "grad_accumulation_dtype is 'float32' and shard is 'fully'; fully_shard adds up "
                "gradients itself, in its reduce_dtype. Leave the option out, or add --shard none."
            )
        if self.lanes is not None and self.stages is None:
            raise ConfigError(
                f"lanes is {self.lanes}, and stages is not set. Add the stages, as in --stages 4."
            )
        if self.lanes is not None:
            check_output("lanes", self.lanes)
        if self.stages is not None and self.ranks is not None:
            raise ConfigError(
                f"stages is {self.stages} and ranks is {self.ranks}; a step on both is not "
                "predicted. Give one of the two."
            )
        return device

    def _unused(self, totals: Totals) -> list[str]:
        """Options of this command that are set and change nothing, with the reason."""
        given, config, found = self.device, self.config, list[str]()
        fixed = {
            f"--trained-share {given.trained_share:g}": given.trained_share != 1,
            f"--shard {given.shard}": given.shard != "fully",
            "--optimizer-bytes-per-parameter": config.optimizer_bytes_per_parameter is not None,
            "--grad-accumulation-dtype float32": config.grad_accumulation_dtype == "float32",
            "--restore-grads": config.restore_grads,
        }
        options = " and ".join(option for option, is_set in fixed.items() if is_set)
        if options and given.device_memory is None:
            found.append(f"{options}: without --device-memory fixed memory is not counted")
        elif given.shard != "fully" and (self.ranks or 1) == 1:
            found.append(f"--shard {given.shard}: one rank holds the whole model")
        of_ranks = {f"--{n} {getattr(config, n)}": getattr(config, n) for n in ("gather", "split")}
        if options := " and ".join(option for option, how in of_ranks.items() if how != AUTO):
            found.append(
                f"{options}: --ranks predicts gathers for each microbatch, with and without "
                "exchanged prompts"
            )
        if self.frozen_encoder and not totals.encoders.places:
            found.append("--frozen-encoder: the rollouts have no images or videos")
        return found

    def _batches(self, source: RolloutFile) -> Iterator[RolloutBatch]:
        if source.trace is not None and self.limit is None and self.batch_rollouts is None:
            return recorded_batches(source)
        return batches_of(source, self.batch_rollouts)

    def _result(self, plan: MadePlan, totals: Totals, model: Path | None) -> dict[str, Any]:
        return {
            "command": "plan",
            "file": self.file,
            "model": self.model,
            "dtype": None if model is None else self.memory.dtype_of(model),
            "batches": totals.batches,
            "rollouts": totals.rollouts,
            "groups": totals.groups,
            "logical_tokens": totals.logical_tokens,
            "group_tokens": totals.group_tokens,
            "unique_tokens": totals.unique_tokens,
            "left_out": asdict(totals.left_out),
            "computed_tokens": totals.computed_tokens,
            "trained_tokens": totals.trained_tokens,
            "microbatches": totals.microbatches,
            "encoder": _encoder_facts(totals.encoders),
            "plans": dict(totals.kinds.most_common()),
            "bound": totals.bound(),
            "bound_unit": "tokens" if plan.shape is None else "flops",
            "predicted_speedup": totals.predicted_speedup,
            "predicted_peak_bytes": totals.predicted_peak_bytes,
            "predicted_ms": totals.predicted_ms,
            "cost": totals.cost,
            "cost_unit": totals.cost_unit,
            "cost_without_limit": totals.unlimited_cost,
            "max_microbatch_tokens": plan.max_microbatch_tokens,
            "sharing": plan.sharing,
            "boundary": plan.boundary,
            "reason": plan.reason,
            "candidates": [asdict(candidate) for candidate in plan.candidates],
            "modes": text.modes(totals),
        }


class _Planner:
    """Plans batches of a file for one device, for ranks, or for stages."""

    def __init__(
        self,
        command: Plan,
        source: RolloutFile,
        model: Path | None,
        shape: ModelShape | None,
        device: DeviceMemory | None,
        pipeline: Pipeline | None,
    ) -> None:
        self.command, self.source, self.model = command, source, model
        self.shape, self.device, self.pipeline = shape, device, pipeline
        self.config: Config = command.config
        self.loss = command.objective.make()
        measured = self.config.calibration
        named = measured not in (None, AUTO)
        self.calibration = Calibration.load(Path(measured or "")) if named else None
        leaves_early = shape is None or shape.leaves_early
        self.capabilities = Capabilities(leaves_early=leaves_early, runs_ahead=device is not None)
        self.budget_bytes: int | None = self.config.memory_budget_bytes
        if self.config.memory_budget == AUTO and device is not None:
            self.budget_bytes = device.budget_bytes

    def plan(self, batch: RolloutBatch) -> MadePlan:
        """Plan a batch of the file."""
        from forkpoint.losses.dpo import PairLoss

        if self.shape is not None:
            batch.check_vocabulary(self.shape.vocab)
        if isinstance(self.loss, PairLoss):
            self.loss.check_pairs(batch)
        if self.pipeline is None:
            return self.make(batch)
        return self.pipeline.plan(
            self.config,
            self.budget_bytes,
            lambda config, size: self.make(batch, config=config, budget_bytes=size),
            self.calibration,
        )

    def unlimited(self, batch: RolloutBatch) -> MadePlan | None:
        """Plan a batch without a memory limit and without options that save memory.

        None if neither is set, without the sizes of a model, and for stages.
        """
        changed = [name for name, value in _MEMORY.items() if getattr(self.config, name) != value]
        limited = self.budget_bytes is not None or changed
        if self.shape is None or self.pipeline is not None or not limited:
            return None
        kept = replace(self.config, **(_MEMORY | {"head_logits": "keep"}))
        return self.make(batch, config=kept, budget_bytes=MOST)

    def make(
        self,
        batch: RolloutBatch,
        prompts: tuple[PlannedPrompt, ...] | None = None,
        *,
        config: Config | None = None,
        budget_bytes: int | None = None,
    ) -> MadePlan:
        """Plan some rollouts for one device. `config` and `budget_bytes` replace those of the
        command."""
        encoder = self._encoder() if batch.media else None
        return make_plan(
            batch,
            self.shape,
            config or self.config,
            coupling=None if self.loss.decomposition == "token" else self.loss.coupling(batch),
            calibration=self.calibration,
            capabilities=replace(self.capabilities, encoder=encoder),
            budget_bytes=budget_bytes or self.budget_bytes,
            prompts=prompts,
            runs=self._edges_to_run(batch),
        )

    def longest_prompt(self, plan: MadePlan) -> LongestPrompt | None:
        """The longest prompt that fits; None without a limit, or if fixed memory does not fit."""
        device = self.device
        if device is not None and device.left_bytes < (plan.memory_budget_bytes or 0):
            return None
        return plan.longest_prompt

    def _encoder(self) -> EncoderShape | None:
        if self.model is None or self.shape is None:
            return None
        found = encoder_of_model(
            self.model, dtype_bytes=self.shape.dtype_bytes, checkpointed=self.shape.checkpointed
        )
        return found and replace(found, trained=not self.command.frozen_encoder)

    def _edges_to_run(self, batch: RolloutBatch) -> IntArray:
        """Number of edges of each rollout that run: int64 [N]."""
        from forkpoint.losses.zeros import zero_rollouts

        # If the file has rewards and no advantages, rollouts without gradient are unknown.
        if self.source.rewarded or self.config.all_logprobs:
            return run_lengths(batch)
        return run_lengths(batch, zero_rollouts(self.loss, batch))


def _encoder_facts(found: EncoderTotals) -> dict[str, Any] | None:
    """Fields of the JSON line about encoders; None if rollouts have no images or video."""
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
