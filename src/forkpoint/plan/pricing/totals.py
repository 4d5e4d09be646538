"""Sums over the plans of many batches, in the memory of a few numbers. Imports no torch."""

from collections import Counter
from dataclasses import dataclass, field

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.runs import LeftOut


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
    microbatches: int = 0
    logical_tokens: int = 0
    unique_tokens: int = 0
    computed_tokens: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    dense_tokens: int = 0
    """Of nobody sharing, which leaves out the same."""
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
    _cost: float = 0.0
    _dense_cost: float | None = 0.0

    def add(self, plan: Plan) -> None:
        """Count one more batch, by its plan; all plans are made with the same settings."""
        self.batches += 1
        self.shape, self.rests_on = plan.shape, plan.rests_on
        self.rollouts += plan.rollouts
        self.microbatches += len(plan.microbatches)
        self.logical_tokens += plan.logical_tokens
        self.unique_tokens += plan.unique_tokens
        self.computed_tokens += plan.computed_tokens
        self.left_out += plan.left_out
        self.dense_tokens += plan.dense.tokens
        self.encoders.add(plan)
        self.checkpointing.update(microbatch.checkpointing for microbatch in plan.microbatches)
        self.kinds[f"{plan.sharing} + {plan.boundary}"] += 1
        if plan.predicted_ms is not None:
            self.predicted_ms = (self.predicted_ms or 0.0) + plan.predicted_ms
        if plan.predicted_peak_bytes is not None:
            peak = self.predicted_peak_bytes or 0
            self.predicted_peak_bytes = max(peak, plan.predicted_peak_bytes)
        self._cost += plan.cost
        dense = [c.cost for c in plan.candidates if c.sharing == "none" and c.cost is not None]
        if self._dense_cost is not None:
            self._dense_cost = self._dense_cost + min(dense) if dense else None

    @property
    def predicted_speedup(self) -> float | None:
        """Dense over the plans as the planner prices them: with padding, microbatches too short to
        fill a device and repeated forwards. None where dense was not looked at."""
        if not self._dense_cost or not self._cost:
            return None
        return self._dense_cost / self._cost
