"""Calibrations with round numbers, and batches of one group to price by them."""

from dataclasses import replace

import numpy as np

import plan_shapes
from forkpoint import Rollout, RolloutBatch
from forkpoint.plan.pricing.calibration import Calibration, Curve, Link

SHAPE = replace(plan_shapes.SHAPE, layers=4, windows=())
LINK = Link(
    ranks=2,
    backend="gloo",
    gather_bytes_per_ms=1e6,
    gather_latency_ms=0.5,
    send_bytes_per_ms=2e6,
    send_latency_ms=0.25,
)


def line(per_token: float, *, backward: float = 2.0) -> Curve:
    """Time in proportion to tokens."""
    forward = (per_token, per_token * 4096)
    return Curve((1.0, 4096.0), forward, (backward * forward[0], backward * forward[1]))


def flat(value: float) -> Curve:
    return Curve((1.0, 1e9), (value, value), (value, value))


def made_up(**changes: object) -> Calibration:
    """Blocks of 1 us a token forward and 2 backward, and all else as good as free."""
    free = line(1e-12)
    values: dict = {
        "device": "none",
        "versions": {"torch": "0"},
        "compiled": False,
        "shape": SHAPE,
        "measured_layers": (1, 3),
        "block": line(1e-3),
        "rest": free,
        "head": free,
        "causal": flat(1e12),
        "rectangle": flat(1e12),
        "part": free,
        "out_bytes_per_ms": 1e12,
        "back_bytes_per_ms": 1e12,
        "kept_bytes": {"none": (100.0, 0.0), "selective": (50.0, 0.0), "full": (10.0, 0.0)},
        "working_bytes": (0.0, 0.0),
        "seconds": 1.0,
    }
    return Calibration(**{**values, **changes})


def group(prompt: int, response: int, count: int, *, trained: bool = True) -> RolloutBatch:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100, prompt).tolist()
    mask = [0] * prompt + [int(trained)] * response
    return RolloutBatch(
        Rollout([*shared, n, *rng.integers(0, 100, response - 1).tolist()], mask, 1.0, group_id="g")
        for n in range(count)
    )
