"""Rows of replays that reports are made of in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.records import ParameterDifference, ReplayStep, StepRecord


def record(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "loss": 1.0,
        "gradient_norm": 2.0,
        "ms": 10.0,
        "phase_ms": {"prefix forward": 0.0, "leaf": 8.0, "prefix backward": 0.0},
        "events": ("forward leaf 0", "backward leaf 0"),
        "event_ms": (3.0, 5.0),
        "sharing": "group",
        "boundary": "within",
        "microbatches": 1,
        "computed_tokens": 40,
        "flops": 100.0,
        "peak_memory_bytes": None,
        "predicted_peak_bytes": 1000,
    }
    return StepRecord(**{**values, **changes})


def steps(means: Sequence[float], **changes: Any) -> list[ReplayStep]:
    """Steps with these mean differences of parameters."""
    return [
        ReplayStep(
            step=n,
            fingerprint="f" * 16,
            lr=0.1,
            rollouts=4,
            logical_tokens=90,
            unique_tokens=41,
            left_out_tokens=0,
            dense_flops=250.0,
            shared=record(ms=10.0 + n, **changes),
            dense=record(ms=30.0),
            difference=ParameterDifference(
                max=abs(mean) * 9, mean=mean, mean_absolute=abs(mean), rms=abs(mean), rms_change=0.1
            ),
        )
        for n, mean in enumerate(means, start=1)
    ]


FIXED: dict[str, Any] = {
    "batches": {"rollouts": 12, "digest": "abc"},
    "model": {
        "kind": "Model",
        "config": {"model_type": "llama", "num_hidden_layers": 2},
        "initial_parameters": "def",
    },
    "loss": "GRPO()",
    "optimizer": {"kind": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999]},
    "steps": 30,
    "baseline": True,
    "config": {"sharing": "group"},
    "runs_on": {"device": "cpu", "torch": "2.13.0", "memory_budget_bytes": None},
}


def write_run(
    folder: Path,
    count: int,
    *,
    fixed: Mapping[str, Any] = FIXED,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a replay of 30 steps that has come to step `count`; no model is run."""
    run = ReplayFolder(folder)
    run.open(fixed, about or {"file": "some.jsonl"})
    for step in steps([1e-9] * count):
        run.add_row(asdict(step))
    run.close()
    return folder


def filled(text: str) -> dict[str, Any]:
    """Arguments of write_run that put a text wherever a folder may hold any."""
    anything = {text: text, "list": [text, [text, {text: text}]], "object": {text: [text]}}
    model = {"model_type": text, text: text, "hidden_size": text}
    return {
        "fixed": {
            **FIXED,
            **dict.fromkeys(("batches", "optimizer", "config"), anything),
            "loss": text,
            "model": {"kind": text, "config": model, "initial_parameters": text},
            "runs_on": {"device": text, "torch": text, "memory_budget_bytes": 2**30},
        },
        "about": {
            **dict.fromkeys(("file", "command"), text),
            "options": anything,
            text: anything,
            "environment": {"device": text, text: anything},
        },
    }
