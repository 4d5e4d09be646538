"""Batches and rows of replays that reports are made of in tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forkpoint import Config, ModelShape, Plan, Rollout, RolloutBatch
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.records import ParameterDifference, ReplayStep, StepRecord
from forkpoint.plan import make_plan
from forkpoint.rollouts.synthetic import synthetic_rollouts

SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, value_dim=8, intermediate=64, vocab=61
)
FINGERPRINT = "f" * 16
CONFIGS = {
    "tree-across": Config(sharing="tree", boundary="across", max_microbatch_tokens=24),
    "group-in": Config(sharing="group", boundary="within"),
    "tree-mixed": Config(sharing="tree", boundary="mixed", max_microbatch_tokens=48),
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
        "phase_ms": {"prefix forward": 0.0, "leaf": 8.0, "prefix backward": 0.0},
        "events": ("forward leaf 0", "backward leaf 0"),
        "event_ms": (3.0, 5.0),
        "event_memory_bytes": None,
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
    return [
        ReplayStep(
            step=n,
            fingerprint=FINGERPRINT,
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


# Folders ------------------------------------------------------------------------------------------

FIXED: dict[str, Any] = {
    "batches": {"rollouts": 12, "digest": "abc"},
    "model": {
        "kind": "Model",
        "config": {"model_type": "llama", "num_hidden_layers": 2},
        "training": True,
        "checkpointed": False,
        "initial_parameters": "def",
    },
    "loss": "GRPO()",
    "optimizer": {"kind": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999]},
    "rate": {"schedule": "constant", "warmup_steps": 0, "steps": None},
    "max_grad_norm": None,
    "steps": 30,
    "baseline": False,
    "config": {"sharing": "group"},
    "runs_on": {
        "device": "cpu",
        "threads": 1,
        "torch": "2.13.0",
        "calibration": "",
        "memory_budget_bytes": None,
    },
}


def write_run(
    folder: Path,
    batch: RolloutBatch,
    count: int,
    *,
    baseline: bool = False,
    fixed: Mapping[str, Any] = FIXED,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a replay of 30 steps that has come to step `count`; no model is run."""
    plans = {"shared": make_plan(batch, SHAPE, CONFIGS["group-in"])}
    if baseline:
        plans["dense"] = make_plan(batch, SHAPE, CONFIGS["dense"])
    run = ReplayFolder(folder)
    run.open({**fixed, "baseline": baseline}, about or {"file": "some.jsonl"})
    run.add_plans(plans["shared"].fingerprint, batch, plans)
    for number, step in enumerate(steps([1e-9] * count), start=1):
        run.add_row(row_of(step, batch, plans, number))
    run.close()
    return folder


def row_of(
    step: ReplayStep, batch: RolloutBatch, plans: Mapping[str, Plan], number: int
) -> dict[str, Any]:
    """A row with the times and the losses of a step that was made up, on these plans."""
    shared, row = plans["shared"], step.to_dict()
    row |= {
        "step": number,
        "fingerprint": shared.fingerprint,
        "rollouts": len(batch),
        "logical_tokens": batch.logical_tokens,
        "unique_tokens": shared.unique_tokens,
        "dense_flops": shared.dense.step_flops(SHAPE),
    }
    for way in ("shared", "dense"):
        plan = plans.get(way)
        if plan is None:
            row[way] = row["difference"] = None
            continue
        row[way] |= {
            "events": plan.events(),
            "event_ms": [1.0] * len(plan.events()),
            "sharing": plan.sharing,
            "boundary": plan.boundary,
            "microbatches": len(plan.microbatches),
            "computed_tokens": plan.computed_tokens,
            "flops": plan.shared.step_flops(SHAPE),
            "predicted_peak_bytes": plan.predicted_peak_bytes,
        }
    return row


# Hostile text -------------------------------------------------------------------------------------


def renamed(batch: RolloutBatch, text: str) -> RolloutBatch:
    """The batch with ids that have this text in them."""
    return RolloutBatch(
        Rollout(
            *(r.token_ids, r.loss_mask, r.advantage),
            group_id=f"{text}{r.group_id}",
            rollout_id=f"{text}{r.rollout_id}",
        )
        for r in batch
    )


def filled(text: str) -> dict[str, Any]:
    """Arguments of write_run that put a text wherever a folder may hold any."""
    anything = {text: text, "list": [text, [text, {text: text}]], "object": {text: [text]}}
    return {
        "fixed": {
            **FIXED,
            "loss": text,
            "batches": anything,
            "optimizer": anything,
            "config": anything,
            "model": {
                **FIXED["model"],
                "kind": text,
                "config": {"model_type": text, text: text, "hidden_size": text},
                "initial_parameters": text,
            },
            "runs_on": {
                "device": text,
                "threads": 1,
                "torch": text,
                "calibration": text,
                "memory_budget_bytes": 2**30,
            },
        },
        "about": {
            **dict.fromkeys(("file", "command", "device"), text),
            "options": anything,
            "versions": {text: text, "torch": None},
            text: anything,
            "environment": {**dict.fromkeys(("device", "commit", "command"), text), text: anything},
        },
    }
