"""Batches and rows of replays that reports are made of in tests."""

from collections.abc import Sequence
from typing import Any

from forkpoint import Config, ModelShape, RolloutBatch
from forkpoint.replay.records import ParameterDifference, ReplayStep, StepRecord
from forkpoint.synthetic import synthetic_rollouts

SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, value_dim=8, intermediate=64, vocab=61
)
CONFIGS = {
    "tree-across": Config(sharing="tree", boundary="across_rows", max_row_tokens=24),
    "group-in": Config(sharing="group", boundary="in_row"),
    "tree-mixed": Config(sharing="tree", boundary="mixed", max_row_tokens=48),
    "dense": Config(sharing="none"),
}


def made_up(groups: int = 3, rollouts_per_group: int = 4) -> RolloutBatch:
    return RolloutBatch(
        synthetic_rollouts(
            groups=groups,
            rollouts_per_group=rollouts_per_group,
            prompt_tokens=30,
            system_tokens=10,
            response_tokens=8,
            vocab_size=61,
        )
    )


def record(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "loss": 1.0,
        "gradient_norm": 2.0,
        "ms": 10.0,
        "phase_ms": {"A": 0.0, "B": 8.0, "C": 0.0},
        "events": ("F A0", "B A0"),
        "event_ms": (3.0, 5.0),
        "event_memory_bytes": None,
        "sharing": "group",
        "boundary": "in_row",
        "rows": 1,
        "computed_tokens": 40,
        "flops": 100.0,
        "peak_memory_bytes": None,
        "predicted_peak_bytes": 1000,
    }
    return StepRecord(**{**values, **changes})


def steps(means: Sequence[float], **changes: Any) -> list[ReplayStep]:
    return [
        ReplayStep(
            step=n,
            fingerprint="f",
            lr=0.1,
            rollouts=4,
            logical_tokens=90,
            unique_tokens=41,
            dense_flops=250.0,
            shared=record(ms=10.0 + n, **changes),
            dense=record(ms=30.0),
            difference=ParameterDifference(
                max=abs(mean) * 9, mean=mean, mean_absolute=abs(mean), rms=abs(mean), rms_change=0.1
            ),
        )
        for n, mean in enumerate(means, start=1)
    ]
