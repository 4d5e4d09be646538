"""`forkpoint replay`: optimizer steps on the groups of a file, shared and dense."""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import DisallowNone, arg

from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.losses import RoutedObjective
from forkpoint.apps.cli.options import (
    Count,
    File,
    Flag,
    Limit,
    ModelPath,
    Reading,
    Runtime,
    WholeNumber,
    check_kernels,
    load_batch,
    show_source,
)
from forkpoint.apps.cli.output import Output, options, table
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.traces.trace import is_trace

if TYPE_CHECKING:
    from forkpoint.apps.replay.batches import TraceBatches
    from forkpoint.apps.replay.loop import MakeOptimizer
    from forkpoint.apps.replay.records import ReplayReport
    from forkpoint.losses import Loss
    from forkpoint.rollouts.traces import Trace

OptimizerName = Literal["adamw", "sgd"]
MOST_STEPS = 40
"""Largest number of steps in the table."""
MOST_RATE = 1e30
"""Largest learning rate. torch converts it to float32, whose largest number is 3e38."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of training and of the comparison.

    Attributes:
        optimizer: Optimizer that applies the gradients.
        lr: Learning rate.
        max_grad_norm: Largest norm of the gradients. Larger gradients are scaled down to it.
        steps: Number of optimizer steps. They use the groups of the file in turn, and start again
            after the last group.
        groups_per_step: Number of groups in the batch of one step.
        baseline: dense also trains a copy of the model without sharing, from the same weights, and
            compares times, losses and final parameters.
    """

    optimizer: OptimizerName = "adamw"
    lr: Annotated[float, arg(metavar="RATE")] = 1e-5
    max_grad_norm: DisallowNone[
        Annotated[float | None, arg(metavar="NORM", help_behavior_hint="(default: no clipping)")]
    ] = None
    steps: Count = 4
    groups_per_step: Count = 1
    baseline: Literal["none", "dense"] = "none"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Files that the replay writes.

    Attributes:
        output: Folder of the results. Its rows.jsonl gets one row per step.
        checkpoint_every: Save the state of the models in the output folder every N steps. The state
            after the last step is always saved.
        resume: Continue the replay in the output folder from its last checkpoint, or begin it if
            the folder has none. A replay with other rollouts, weights or options is refused.
    """

    output: DisallowNone[
        Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: write no files)")]
    ] = None
    checkpoint_every: Annotated[
        int | None, WholeNumber, arg(help_behavior_hint="(default: only at the end)")
    ] = None
    resume: Flag = False


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Train a model for some steps on a file of rollouts or a trace, and measure it.

    With --baseline dense, dense training (whole rollouts packed into microbatches) also runs each
    step, and the two are compared. The line of --json has the values of the table.

    Attributes:
        file: Rollouts of a trainer or of forkpoint, or the folder of a trace. Each batch of a trace
            is a step.
        model: A transformers model's folder, or a config.json for random weights. Nothing is
            downloaded.
        limit: Read only the first N rollouts of the file.
        json: Print one line of JSON and nothing else.
        config: Options of planning and running, as in forkpoint.Config.
    """

    file: File
    model: ModelPath
    limit: Limit = None
    json: Flag = False
    reading: Reading = field(default_factory=Reading)
    objective: RoutedObjective = field(default_factory=RoutedObjective)
    training: Training = field(default_factory=Training)
    recording: Recording = field(default_factory=Recording)
    config: Config = field(default_factory=Config)
    runtime: Runtime = field(default_factory=Runtime)

    def run(self) -> int:
        if torchrun.is_on_ranks():
            raise ConfigError(
                "torchrun has started this process, and replay trains a model of one process. Run "
                "it without torchrun; on ranks, measure steps of a policy (stats.metrics())."
            )
        out = Output(json_only=self.json)
        check_kernels(self.config)
        training, recording = self.training, self.recording
        trace = self._trace(out) if is_trace(Path(self.file)) else None
        batch = None if trace else load_batch(self.file, self.limit, self.reading, out)
        with out.waiting("making the model"):
            from forkpoint.apps.cli.models import load_model, out_of_memory_explained
            from forkpoint.apps.replay.loop import replay
            from forkpoint.device import versions

            # This check comes before a large model is loaded.
            router = self.objective.make_router()
            optimizer = make_optimizer(training.optimizer, training.lr)
            batches, loss = self._batches(trace, batch)
            model = load_model(self.model, self.runtime)
        device = next(model.parameters()).device
        with out_of_memory_explained(), out.progress("training", training.steps) as advance:
            report = replay(
                model,
                batches,
                loss,
                optimizer=optimizer,
                steps=training.steps,
                groups_per_step=training.groups_per_step,
                baseline=training.baseline == "dense",
                config=self.config,
                max_grad_norm=training.max_grad_norm,
                router=router,
                output=recording.output,
                resume=recording.resume,
                checkpoint_every=recording.checkpoint_every,
                about={
                    "command": shlex.join(["forkpoint", *sys.argv[1:]]),
                    "file": Path(self.file).name,
                    "options": options(self),
                    "versions": versions(),
                },
                on_step=lambda _: advance(1),
                on_resume=advance,
            )
        show_report(out, report)
        out.result(
            {
                "command": "replay",
                **report.to_dict(),
                "config": options(self),
                "device": str(device),
                "versions": versions(),
            }
        )
        return 0

    def _trace(self, out: Output) -> "Trace | None":
        """The trace in `file`; None if it is not a trace. Raises ConfigError for options that a
        trace does not use."""
        given = options(self.reading)
        usual = options(Reading(memory_limit=self.reading.memory_limit))
        unused = [name for name, value in usual.items() if given[name] != value]
        unused += ["limit"] if self.limit is not None else []
        unused += ["groups_per_step"] if self.training.groups_per_step != 1 else []
        if unused:
            raise ConfigError(
                f"{self.file} is a trace, whose batches are replayed unchanged: "
                f"{', '.join(unused)} has no effect. Leave it out."
            )
        source = self.reading.open(self.file, None)
        show_source(source, out)
        return source.trace

    def _batches(
        self, trace: "Trace | None", batch: RolloutBatch | None
    ) -> "tuple[RolloutBatch | TraceBatches, Loss]":
        """The batches and the loss. Raises ConfigError for a trace without --loss."""
        objective = self.objective
        if trace is None:
            assert batch is not None
            loss = objective.make()
            loss.check(batch)
            return batch, loss
        from forkpoint.apps.replay.batches import TraceBatches

        if objective.loss is None:
            raise ConfigError(
                f"{trace.path} is a trace, in which no loss is recorded. Set --loss, as in --loss "
                "grpo,clip=0.2."
            )
        return TraceBatches(trace, self.training.steps), objective.make()


def make_optimizer(name: OptimizerName, lr: float) -> "MakeOptimizer":
    """Make torch's optimizer of this name, with its defaults except for the rate.

    Raises ConfigError if the rate is negative or too large for float32.
    """
    import torch

    if not 0 <= lr <= MOST_RATE:
        raise ConfigError(f"lr is {lr}; it takes a number from 0 to {MOST_RATE:g}.")
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return lambda parameters: kinds[name](parameters, lr=lr)


def show_report(out: Output, report: "ReplayReport") -> None:
    """Show the steps as a table, with their sums."""
    values = report.to_dict()
    columns = ["step", "tokens", "run", "shared loss", "shared ms"]
    if values["dense_ms"] is not None:
        columns += ["dense loss", "dense ms", "speed-up"]
    rows = []
    for step in report.steps[:MOST_STEPS]:
        one, other = step.shared, step.dense
        row = [len(rows) + 1, f"{step.logical_tokens:,}", f"{one.computed_tokens:,}"]
        row += [f"{one.loss:.6f}", f"{one.ms:,.0f}"]
        if other is not None:
            row += [f"{other.loss:.6f}", f"{other.ms:,.0f}", f"{other.ms / one.ms:.2f}x"]
        rows.append(row)
    more = len(report.steps) - MOST_STEPS
    title = f"optimizer steps, with tokens of rollouts and tokens run: {', '.join(values['plans'])}"
    out.show(table(title, rows, columns, f"and {more:,} more steps" if more > 0 else ""))
    out.show(_summary(values))


def _summary(v: dict[str, Any]) -> str:
    """Summary of a replay. `v`: result of ReplayReport.to_dict."""
    left_out = f"; {v['left_out_tokens']:,} are left out, because they have no gradient"
    lines = [
        f"tokens run: {v['computed_tokens']:,} of {v['logical_tokens']:,}"
        + left_out * bool(v["left_out_tokens"]),
        f"time, planning and optimizer included: shared {v['shared_ms']:,.0f} ms "
        f"(median step {v['shared_median_ms']:,.0f})",
    ]
    if v["dense_ms"] is None:
        lines.append(f"counted bound on the speed-up over dense: {v['bound']:.2f}x")
    else:
        lines[1] += f", dense {v['dense_ms']:,.0f} ms (median step {v['dense_median_ms']:,.0f})"
        lines += [
            f"speed-up: {v['speedup']:.2f}x over all steps, median step "
            f"{v['median_speedup']:.2f}x; counted bound {v['bound']:.2f}x",
            f"losses differ by at most {v['max_loss_difference']:.1e}; parameters by at most "
            f"{v['max_parameter_difference']:.1e} (rms {v['rms_parameter_difference']:.1e}, after "
            f"moving by {v['rms_parameter_change']:.1e})",
        ]
    lines.append(
        "The first step includes warm-up: compilation on CUDA, first kernel calls, optimizer state."
    )
    return "\n".join(lines)
