"""`forkpoint plan`: what would run for a file of rollouts, and what sharing saves on it.

Imports no torch, unless the file is one of torch's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import DisallowNone, arg

from forkpoint.apps.cli.losses import LossName, coupling, zero_rollouts
from forkpoint.apps.cli.options import (
    Device,
    File,
    Flag,
    Limit,
    Memory,
    Planning,
    Positive,
    Reading,
    WholeNumber,
    recorded_batches,
    show_source,
    streamed_batches,
    whole_number,
)
from forkpoint.apps.cli.output import Output
from forkpoint.apps.cli.plan_text import (
    LABEL,
    distribution_table,
    distributions,
    mode_table,
    modes,
    plan_lines,
)
from forkpoint.apps.cli.ranks import Ranks
from forkpoint.errors import ConfigError, ForkpointError
from forkpoint.parallel.placement.paths import Rates
from forkpoint.parallel.placement.place import check_ranks
from forkpoint.plan import Estimate, ModelShape, Totals, make_plan
from forkpoint.plan import Plan as MadePlan
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import PlannedPrompt, cannot_exchange
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.traces import RolloutFile

AnyModel = DisallowNone[
    Annotated[
        Path | None,
        arg(metavar="NAME|DIR|CONFIG.json", help_behavior_hint="(default: count tokens only)"),
    ]
]
WhichBatch = Annotated[int | None, WholeNumber, arg(help_behavior_hint="(default: none)")]
Rollouts = Annotated[int | None, whole_number(1), arg(help_behavior_hint="(default: by tokens)")]


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Batch of one optimizer step, within which tokens may be shared.

    The batches of a trace are those that were recorded, unless one of these is given.

    Attributes:
        batch_rollouts: This many rollouts of the file, in its order.
        batch_tokens: Rollouts of the file, in its order, until there are this many tokens and the
            last one's group ends, or twice as many.
    """

    batch_rollouts: Rollouts = None
    batch_tokens: Positive = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show what would run for a file of rollouts and what sharing saves, batch by batch.

    A file of up to --batch-tokens is one batch. A larger one is read as a stream of them, in the
    memory of one; every batch is planned, and what the plans add up to is shown. Runs no model: it
    needs neither weights nor a GPU.

    Attributes:
        file: Rollouts, as a trainer or forkpoint writes them, or the folder of a trace.
        model: A model by its name (Qwen/Qwen3-8B, llama3-8b, ...), its folder or its config.json;
            with it FLOPs and bytes are counted, not only tokens.
        loss: The loss it is for. Losses that couple the tokens of a rollout (gspo, gmpo) or the
            rollouts of a pair (dpo, simpo) can cost another forward.
        all_logprobs: Run rollouts that the loss gives no gradient as well, such as those of groups
            whose advantages are all 0; so does a loss with a KL divergence or an entropy bonus.
        details: Show the whole plan as well: its microbatches and its tree, what was looked at, and
            how rollouts share.
        batch: Show the plan of batch N, counted from 0: its microbatches and its tree.
        ranks: Show what a step costs on N data-parallel ranks, with the rollouts placed by
            forkpoint, by token counts and in the order of the file. The ranks wait for each other
            in every forward and backward, as with sharded weights.
        limit: Read only the first N rollouts of the file.
        json: Print one line of JSON and nothing else.
    """

    file: File
    model: AnyModel = None
    loss: LossName = "grpo"
    all_logprobs: Flag = False
    details: Flag = False
    batch: WhichBatch = None
    ranks: WhichBatch = None
    limit: Limit = None
    json: Flag = False
    reading: Reading = field(default_factory=Reading)
    batching: Batching = field(default_factory=Batching)
    planning: Planning = field(default_factory=Planning)
    memory: Memory = field(default_factory=Memory)
    device: Device = field(default_factory=Device)

    def run(self) -> int:
        out = Output(json_only=self.json)
        shape = self.memory.shape(self.model)
        device = self.device.memory(self.model, shape)
        source = self.reading.open(self.file, self.limit)
        measured = self.planning.calibration
        calibration = None if measured is None else Calibration.load(measured)
        estimate, totals, shown = Estimate(shape), Totals(), None
        ranks = self._ranks(shape, calibration)
        with out.waiting("planning"):
            for batch in self._batches(source):
                make = partial(
                    self._plan,
                    rewarded=source.rewarded,
                    number=totals.batches,
                    shape=shape,
                    calibration=calibration,
                    device=device,
                )
                plan = make(batch)
                estimate.add(batch, plan.run_lengths)
                if totals.batches == (self.batch or 0):
                    shown = plan
                totals.add(plan)
                if ranks is not None:
                    ranks.add(batch, plan, make)
        if shown is None:
            batches, most = "one batch", "0"
            if totals.batches > 1:
                batches = f"{totals.batches} batches"
                most = f"a whole number from 0 to {totals.batches - 1}"
            raise ConfigError(
                f"batch is {self.batch}, and {self.file} is read as {batches}; it takes {most}."
            )
        show_source(source, out)
        out.show(*plan_lines(shown, totals, estimate.groups, self.file, self.model, device))
        out.show(*(ranks.lines(LABEL) if ranks else ()))
        self._show_details(out, shown, totals.batches > 1, estimate)
        facts = {"device_memory": device and _device_facts(device, totals)}
        facts |= {"ranks": ranks.facts() if ranks else None}
        out.result(self._result(shown, totals, estimate) | facts)
        return 0

    def _ranks(self, shape: ModelShape | None, calibration: Calibration | None) -> Ranks | None:
        if self.ranks is None:
            return None
        check_ranks(self.ranks)
        return Ranks(
            self.ranks,
            Rates.of(shape, calibration),
            # Losses of pairs need both rollouts on one rank.
            self.loss in ("dpo", "simpo"),
            self.planning.max_microbatch_tokens,
            not cannot_exchange(self.planning.config()),
            calibration,
        )

    def _show_details(self, out: Output, plan: MadePlan, several: bool, of: Estimate) -> None:
        """The tables that were asked for; `several`: whether there are several batches."""
        if self.batch is not None or (self.details and not several):
            if several:
                out.show(f"batch {self.batch}:")
            out.show(plan.explain(width=out.width))
        if self.details:
            out.show(mode_table(of, self.file.name), distribution_table(of))

    def _plan(
        self,
        batch: RolloutBatch,
        number: int,
        shape: ModelShape | None,
        calibration: Calibration | None,
        device: DeviceMemory | None,
        *,
        rewarded: bool,
        prompts: tuple[PlannedPrompt, ...] | None = None,
    ) -> MadePlan:
        """The plan of a batch; errors of batches that are not the first say which it is.

        `rewarded`: whether rollouts have rewards in the place of advantages, so that it is not
        known which give no gradient.
        """
        zero = None
        if not rewarded and not self.all_logprobs:
            zero = zero_rollouts(self.loss, batch)
        try:
            if shape is not None:
                batch.check_vocabulary(shape.vocab)
            return make_plan(
                batch,
                shape,
                self.planning.config(),
                coupling=coupling(self.loss, batch),
                calibration=calibration,
                measured_budget_bytes=None if device is None else device.budget_bytes,
                prompts=prompts,
                runs=run_lengths(batch, zero),
            )
        except ForkpointError as error:
            if not number:
                raise
            raise type(error)(f"{self.file}, batch {number}: {error}") from None

    def _batches(self, source: RolloutFile) -> Iterator[RolloutBatch]:
        given = self.batching
        if given.batch_rollouts is not None and given.batch_tokens != Batching().batch_tokens:
            raise ConfigError(
                f"batch_rollouts is {given.batch_rollouts} and batch_tokens {given.batch_tokens}; "
                "a batch is of so many rollouts, or of so many tokens. Leave one of the two out."
            )
        if source.trace is not None and self.limit is None and given == Batching():
            return recorded_batches(source)
        if given.batch_rollouts is not None:
            return streamed_batches(source, partial(by_rollouts, count=given.batch_rollouts))
        return streamed_batches(source, partial(by_tokens, tokens=given.batch_tokens))

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
            "plans": dict(totals.kinds.most_common()),
            "bound": totals.bound,
            "bound_unit": "tokens" if plan.shape is None else "flops",
            "predicted_speedup": totals.predicted_speedup,
            "predicted_peak_bytes": totals.predicted_peak_bytes,
            "predicted_ms": totals.predicted_ms,
            "batch": self.batch or 0,
            "max_microbatch_tokens": plan.max_microbatch_tokens,
            "sharing": plan.sharing,
            "boundary": plan.boundary,
            "reason": plan.reason,
            "candidates": [asdict(candidate) for candidate in plan.candidates],
            "modes": modes(estimate),
            "distributions": distributions(estimate),
        }


def _device_facts(device: DeviceMemory, totals: Totals) -> dict[str, Any]:
    """Memory of the device in the JSON line."""
    return {
        "bytes": device.total_bytes,
        "weights_bytes": device.weights_bytes,
        "gradients_bytes": device.gradients_bytes,
        "optimizer_bytes": device.optimizer_bytes,
        "left_bytes": device.left_bytes,
        "fits": device.fits(totals.predicted_peak_bytes or 0),
    }


def by_rollouts(rollouts: Iterable[Rollout], count: int) -> Iterator[RolloutBatch]:
    """Batches of `count` rollouts, the last of what is left."""
    held: list[Rollout] = []
    for rollout in rollouts:
        held.append(rollout)
        if len(held) == count:
            yield RolloutBatch(held)
            held = []
    if held:
        yield RolloutBatch(held)


def by_tokens(rollouts: Iterable[Rollout], tokens: int) -> Iterator[RolloutBatch]:
    """Batches of at least `tokens` that end where a group does, or have twice as many."""
    held: list[Rollout] = []
    total, last = 0, None
    for rollout in rollouts:
        if total >= tokens:
            group = _group(rollout)
            if group != last or total >= 2 * tokens:
                yield RolloutBatch(held)
                held, total = [], 0
        held.append(rollout)
        total += len(rollout)
        if total >= tokens:
            last = _group(rollout)
    if held:
        yield RolloutBatch(held)


def _group(rollout: Rollout) -> str | bytes:
    """Key of a rollout's group, as in a batch."""
    if rollout.group_id is not None:
        return rollout.group_id
    mask = rollout.loss_mask
    return rollout.token_ids[: mask.argmax() if mask.any() else len(mask)].tobytes()
