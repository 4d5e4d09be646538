"""Sums over the plans of many batches. Imports no torch."""

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
    batch: RolloutBatch, runs: IntArray, shape: ModelShape | None
) -> dict[str, Work]:
    """Work of a batch for each kind of sharing: "none", "group" and "tree".

    `runs`: int64 [N], number of edges of each rollout that run, from its first.
    """
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
    """Runs and FLOPs of encoders of images and video, summed over plans, with those of dense
    training."""

    places: int = 0
    """Number of images and videos of all rollouts. Dense training encodes each one."""
    forwards: int = 0
    backwards: int = 0
    flops: float = 0.0
    """FLOPs of a forward and backward for each distinct medium of a batch; 0 if the encoder's sizes
    are unknown."""
    dense_flops: float = 0.0
    """FLOPs of a forward and backward for each image or video of all rollouts."""
    decoder_flops: float = 0.0
    """FLOPs of forward and backward of the language model in the plans."""
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
        """The encoder's part of a step's FLOPs; None if its sizes are unknown."""
        if not self.flops:
            return None
        return self.flops / (self.flops + self.decoder_flops)

    @property
    def bound(self) -> float | None:
        """FLOPs of dense training divided by FLOPs of the plans, with encoders; None if the
        encoder's sizes are unknown."""
        if not self.flops:
            return None
        dense = self.dense_flops + self.dense_decoder_flops
        return dense / (self.flops + self.decoder_flops)


@dataclass
class Totals:
    """Sums over the plans of batches, such as those of an epoch.

    Fields without a description are sums over the plans.
    """

    shape: ModelShape | None = None
    batches: int = 0
    rollouts: int = 0
    groups: int = 0
    microbatches: int = 0
    forking: int = 0
    """Number of microbatches that other microbatches read."""
    logical_tokens: int = 0
    unique_tokens: int = 0
    """Number of tokens, with each token that rollouts of the batch share counted once."""
    group_tokens: int = 0
    """Number of tokens, with each token that rollouts of one group share counted once."""
    trained_tokens: int = 0
    computed_tokens: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    work: dict[str, Work] = field(default_factory=dict)
    """Result of `work_by_sharing`, without tokens that the plans leave out."""
    encoders: EncoderTotals = field(default_factory=EncoderTotals)
    checkpointing: Counter[str] = field(default_factory=Counter)
    """Number of microbatches for each checkpointing policy."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of batches for each chosen "sharing + boundary"."""
    predicted_ms: float | None = None
    """Predicted time of all steps in milliseconds; None without a calibration."""
    predicted_peak_bytes: int | None = None
    """Largest peak of any batch; None without a model shape."""
    cost: float = 0.0
    """Predicted cost of the plans, in `cost_unit`."""
    cost_unit: str = ""
    unlimited_cost: float | None = None
    """Predicted cost of plans without a limit of memory; None if none were made."""
    _dense_cost: float | None = 0.0

    def add(self, batch: RolloutBatch, plan: Plan, unlimited: Plan | None = None) -> None:
        """Count a batch and its plan. All plans must have the same settings.

        `unlimited`: the plan of the batch without a limit of memory.
        """
        self.batches += 1
        self.shape = plan.shape
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
        """Dense work divided by the work of `mode`, in FLOPs if there is a shape, else in tokens.

        The ratio for "tree" is the bound of the rollouts: the largest speed-up that sharing can
        give to the model's computation, without limits of memory.
        """
        return bound_of(self.work["none"], self.work[mode], self.shape)

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted cost of dense training divided by that of the plans, with padding, short
        microbatches and repeated forwards. None if dense was not compared."""
        if not self._dense_cost or not self.cost:
            return None
        return self._dense_cost / self.cost
