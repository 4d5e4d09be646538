"""Sums over the plans of many batches, in the memory of a few numbers. Imports no torch."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from forkpoint.plan.entries import segment_entries
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import ModelShape, Work, bound_of, dense_work, forest_work
from forkpoint.plan.runs import LeftOut, labels_run, run_lengths, sort_running
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, build_forest


def work_by_sharing(
    batch: RolloutBatch, runs: IntArray | None = None, shape: ModelShape | None = None
) -> dict[str, Work]:
    """Tokens run, visible pairs and labelled tokens by who shares: "none", "group" or "tree".

    `runs`: int64 [N], how many edges of each rollout run, from its first; None: all.
    """
    runs = run_lengths(batch, whole=True) if runs is None else runs
    windows = shape.windows if shape else ()
    trained = int((batch.loss_mask & labels_run(batch.offsets, runs)).sum())
    found = {"none": dense_work(runs, trained, windows)}
    running = sort_running(batch, runs)
    for mode, order in (("group", running.grouped(batch.group_index)), ("tree", running)):
        forest = build_forest(order, len(batch))
        entries_S = segment_entries(forest, batch)
        found[mode] = forest_work(forest, int(entries_S.sum()), windows)
    return found


@dataclass
class EncoderTotals:
    """Runs and FLOPs of encoders of images and video, summed over plans, and those of dense
    training."""

    places: int = 0
    """Images and videos of all rollouts: runs of the encoder in dense training."""
    forwards: int = 0
    backwards: int = 0
    flops: float = 0.0
    """Of one forward and backward for each distinct medium of a batch; 0 without its sizes."""
    dense_flops: float = 0.0
    """Of one for each image or video of all rollouts."""
    decoder_flops: float = 0.0
    """Of forward and backward of the language model, in the plans."""
    dense_decoder_flops: float = 0.0

    def add(self, plan: Plan) -> None:
        """Count one more batch."""
        forwards, backwards = plan.encoder_runs
        self.places += sum(medium.rollouts for medium in plan.media)
        self.forwards += forwards
        self.backwards += backwards
        encoder = plan.capabilities.encoder
        if encoder is not None:
            each = [encoder.step_flops(medium) for medium in plan.media]
            self.flops += sum(x for x, m in zip(each, plan.media, strict=True) if m.readers)
            pairs = zip(each, plan.media, strict=True)
            self.dense_flops += sum(x * medium.rollouts for x, medium in pairs)
        if plan.shape is not None:
            self.decoder_flops += plan.shared.step_flops(plan.shape)
            self.dense_decoder_flops += plan.dense.step_flops(plan.shape)

    @property
    def share(self) -> float | None:
        """The encoder's part of a step's FLOPs; None where its sizes are not known."""
        if not self.flops:
            return None
        return self.flops / (self.flops + self.decoder_flops)

    @property
    def bound(self) -> float | None:
        """FLOPs of dense training over those of the plans, with encoders; None where the encoder's
        sizes are not known."""
        if not self.flops:
            return None
        dense = self.dense_flops + self.dense_decoder_flops
        return dense / (self.flops + self.decoder_flops)


@dataclass
class Totals:
    """Sums over plans, one a batch: what an epoch of optimizer steps runs, and what it saves.

    Fields not described here are sums of those of the plans.
    """

    shape: ModelShape | None = None
    batches: int = 0
    rollouts: int = 0
    groups: int = 0
    microbatches: int = 0
    forking: int = 0
    """Microbatches that others read tokens of."""
    logical_tokens: int = 0
    unique_tokens: int = 0
    """Distinct (path, token) pairs of each whole batch."""
    group_tokens: int = 0
    """The same of each group."""
    trained_tokens: int = 0
    computed_tokens: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    work: dict[str, Work] = field(default_factory=dict)
    """Of `work_by_sharing`, with what the plans leave out left out."""
    encoders: EncoderTotals = field(default_factory=EncoderTotals)
    checkpointing: Counter[str] = field(default_factory=Counter)
    """How many microbatches have each policy."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How many batches each "sharing + boundary" was taken for."""
    predicted_ms: float | None = None
    """Of all steps; None without a calibration."""
    predicted_peak_bytes: int | None = None
    """The largest of any batch; None without a model's shape."""
    rests_on: str = ""
    cost: float = 0.0
    """Of the plans as the planner prices them, in `cost_unit`."""
    cost_unit: str = ""
    unlimited_cost: float | None = None
    """Of the plans that would be made if memory had no limit; None where none were made."""
    _dense_cost: float | None = 0.0

    def add(self, batch: RolloutBatch, plan: Plan, unlimited: Plan | None = None) -> None:
        """Count one more batch and its plan; all plans are made with the same settings.

        `unlimited`: the plan of the batch if memory had no limit.
        """
        self.batches += 1
        self.shape, self.rests_on = plan.shape, plan.rests_on
        self.rollouts += plan.rollouts
        self.groups += int(batch.group_index.max(initial=-1)) + 1
        self.trained_tokens += batch.trained_tokens
        whole = sort_running(batch, run_lengths(batch, whole=True)).grouped(batch.group_index)
        firsts = np.stack([batch.group_index, batch.token_ids[batch.offsets[:-1]]])
        self.group_tokens += int(whole.new_edges.sum()) + np.unique(firsts, axis=1).shape[1]
        for mode, work in work_by_sharing(batch, plan.run_lengths, plan.shape).items():
            self.work[mode] = self.work[mode] + work if mode in self.work else work
        self.microbatches += len(plan.microbatches)
        self.forking += sum(bool(microbatch.children) for microbatch in plan.microbatches)
        self.logical_tokens += plan.logical_tokens
        self.unique_tokens += plan.unique_tokens
        self.computed_tokens += plan.computed_tokens
        self.left_out += plan.left_out
        self.encoders.add(plan)
        self.checkpointing.update(microbatch.checkpointing for microbatch in plan.microbatches)
        self.kinds[f"{plan.sharing} + {plan.boundary}"] += 1
        if plan.predicted_ms is not None:
            self.predicted_ms = (self.predicted_ms or 0.0) + plan.predicted_ms
        if plan.predicted_peak_bytes is not None:
            peak = self.predicted_peak_bytes or 0
            self.predicted_peak_bytes = max(peak, plan.predicted_peak_bytes)
        self.cost, self.cost_unit = self.cost + plan.cost, plan.cost_unit
        if unlimited is not None:
            self.unlimited_cost = (self.unlimited_cost or 0.0) + unlimited.cost
        dense = [c.cost for c in plan.candidates if c.sharing == "none" and c.cost is not None]
        if self._dense_cost is not None:
            self._dense_cost = self._dense_cost + min(dense) if dense else None

    def bound(self, mode: str = "tree") -> float:
        """Dense over `mode`, in FLOPs where there is a shape, else in tokens.

        The ratio of "tree" is the bound of the rollouts: the largest speed-up that sharing can give
        to the model's computation. A plan's limits do not enter it.
        """
        return bound_of(self.work["none"], self.work[mode], self.shape)

    @property
    def predicted_speedup(self) -> float | None:
        """Dense over the plans as the planner prices them: with padding, microbatches too short to
        fill a device and repeated forwards. None where dense was not looked at."""
        if not self._dense_cost or not self.cost:
            return None
        return self._dense_cost / self.cost
