"""The schema of a replay's folder, for all who read one: reports, and replays that resume.

Every field of every file has its type and its bounds here. Imports no torch.
"""

import math
from typing import Any, get_args

from forkpoint.apps.replay.experts import expert_loads, given_routes
from forkpoint.apps.replay.rates import Schedule
from forkpoint.config import Boundary, Sharing
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import PHASES
from forkpoint.plan.written import BYTES, FINGERPRINT, MOST_TOKENS, plan_of
from forkpoint.rollouts.schema import (
    SchemaError,
    array,
    flag,
    mapping,
    number,
    number_or_nan,
    one_of,
    or_null,
    record,
    refuse,
    text,
    tree,
    whole,
)


def _plan(given: Any, field: str) -> Plan:
    """The check of a field that holds a plan."""
    return plan_of(given, field, Plan)


SCHEMA = 1
MANIFEST, ROWS, PLANS = "manifest.json", "rows.jsonl", "plans.jsonl"
CHECKPOINT = "checkpoint-"
"""How the name of a checkpoint's folder begins; its step follows."""
STATE = "state.json"
"""The file of a checkpoint that holds everything but tensors."""

MOST_MANIFEST_BYTES = 1 << 24
MOST_LINE_BYTES = 1 << 26
"""Of one row, of the plans of one batch, of a checkpoint's state. In memory, JSON takes up to 24
times that."""
MOST_STEPS = 2**31
MOST_NUMBER = 1e30
"""Of a loss's options and a step's scale: torch makes float32 of them, which holds 3e38."""
MOST_WHOLE_NUMBER = 2**53
"""Of these where they are whole: torch takes no more than 64 bits of them."""

TOKENS = whole(0, MOST_TOKENS)
SOME_TOKENS = whole(1, MOST_TOKENS)
# Times divide each other.
STEP_MS = number(1e-9, 1e12)
MS = number(0, 1e12)
FLOPS = number(0, 1e60)
STEPS = whole(1, MOST_STEPS)
SIZE_OR_NAN = number_or_nan(0)


def is_too_large(value: object) -> bool:
    """Whether a loss cannot compute with a number; infinities are for the loss to judge."""
    if isinstance(value, int):
        return abs(value) > MOST_WHOLE_NUMBER
    return isinstance(value, float) and MOST_NUMBER < abs(value) != math.inf


# The manifest ------------------------------------------------------------------------------------

_ENVIRONMENT = record(
    {"device": text, "versions": mapping(text), "commit": text, "command": text},
    optional=("device", "versions", "commit", "command"),
    others=tree,
)
ABOUT = record(
    {
        "command": text,
        "file": text,
        "device": text,
        "options": mapping(tree),
        "versions": mapping(or_null(text)),
        "environment": _ENVIRONMENT,
    },
    optional=("command", "file", "device", "options", "versions", "environment"),
    others=tree,
)
FIXED = record(
    {
        "batches": mapping(tree),
        "model": record(
            {
                "kind": text,
                "config": or_null(mapping(tree)),
                "training": flag,
                "checkpointed": flag,
                "initial_parameters": text,
            }
        ),
        "loss": text,
        "optimizer": mapping(tree),
        "rate": record(
            {
                "schedule": one_of(*get_args(Schedule)),
                "warmup_steps": whole(),
                "steps": or_null(STEPS),
            }
        ),
        "max_grad_norm": or_null(number(0, above=True)),
        "steps": STEPS,
        "baseline": flag,
        "config": mapping(tree),
        "runs_on": record(
            {
                "device": text,
                "threads": whole(1),
                "torch": text,
                "calibration": text,
                "memory_budget_bytes": or_null(whole(1)),
            }
        ),
        # Of a replay on several ranks, however many they are.
        "sharded": flag,
        # Of a replay with a router loss, and of one that counts experts.
        "router": mapping(tree),
        "expert_counts": flag,
    },
    optional=("sharded", "router", "expert_counts"),
)
MANIFEST_FIELDS = record({"schema": one_of(SCHEMA), "fixed": FIXED, "about": ABOUT})

# Rows --------------------------------------------------------------------------------------------

_RECORD = record(
    {
        "loss": number_or_nan(),
        "gradient_norm": number_or_nan(0),
        "ms": STEP_MS,
        "phase_ms": record(dict.fromkeys(PHASES, MS)),
        "events": array(text),
        "event_ms": array(MS),
        "event_memory_bytes": or_null(array(whole(-(2**62), 2**62))),
        "sharing": one_of(*get_args(Sharing)),
        "boundary": one_of(*get_args(Boundary)),
        "microbatches": TOKENS,
        "computed_tokens": TOKENS,
        "flops": FLOPS,
        "peak_memory_bytes": BYTES,
        "predicted_peak_bytes": BYTES,
        "router_loss": number_or_nan(),
        "experts": expert_loads,
        "routes": given_routes,
    },
    # Of mixtures of experts alone.
    optional=("router_loss", "experts", "routes"),
)


def step_record(value: Any, field: str) -> dict[str, Any]:
    """The fields of a StepRecord; each event has its time and, if measured, its memory."""
    found = _RECORD(value, field)
    for name in ("event_ms", "event_memory_bytes"):
        if found[name] is not None and len(found[name]) != len(found["events"]):
            raise SchemaError(
                f"{field}.{name} has {len(found[name])} entries and {field}.events "
                f"{len(found['events'])}; they have one for each event"
            )
    return found


_SHARE = record(
    {
        **dict.fromkeys(("rollouts", "logical_tokens", "unique_tokens"), TOKENS),
        **dict.fromkeys(("computed_tokens", "microbatches"), TOKENS),
        **dict.fromkeys(("dense_flops", "flops"), FLOPS),
        "left_out_tokens": TOKENS,
    },
    optional=("left_out_tokens",),
)
STEP = record(
    {
        "step": STEPS,
        "fingerprint": FINGERPRINT,
        "lr": number(),
        "rollouts": SOME_TOKENS,
        "logical_tokens": SOME_TOKENS,
        "unique_tokens": SOME_TOKENS,
        "dense_flops": FLOPS,
        "shared": step_record,
        "dense": or_null(step_record),
        "difference": or_null(
            record(
                {
                    **dict.fromkeys(("max", "mean_absolute", "rms", "rms_change"), SIZE_OR_NAN),
                    "mean": number_or_nan(),
                }
            )
        ),
        "left_out_tokens": TOKENS,
        "others": array(_SHARE),
    },
    optional=("left_out_tokens", "others"),
)

# Plans -------------------------------------------------------------------------------------------


PLANNED = record(
    {
        "fingerprint": FINGERPRINT,
        "rollout_ids": array(text),
        "group_ids": array(or_null(text)),
        "trained_tokens": TOKENS,
        "plans": record({"shared": _plan, "dense": _plan}, optional=("dense",)),
    }
)

# What a checkpoint holds beside its tensors -------------------------------------------------------


def _plain(value: Any, field: str) -> Any:
    """A value of an optimizer's state that is no tensor; NaN and infinities are allowed."""
    if isinstance(value, list | dict):
        raise refuse(field, value, "a number, true, false, text or null")
    return value


CHECKPOINT_STATE = record(
    {
        "schema": one_of(SCHEMA),
        "step": STEPS,
        "bytes": record({ROWS: whole(1), PLANS: whole(1)}),
        "files": mapping(text),
        "states": mapping(record({"device": text, "shape": array(whole())})),
        "plain": mapping(_plain),
        "generators": array(mapping(lambda value, _: value)),
    }
)
