"""The files of a replay's folder, and the types and bounds of their fields. Imports no torch.

Those of rows are in `records`.
"""

import math
from typing import Any, get_args

from forkpoint.apps.replay.rates import Schedule
from forkpoint.plan.written import FINGERPRINT, MOST_TOKENS, plan_of
from forkpoint.rollouts.schema import (
    array,
    flag,
    mapping,
    number,
    one_of,
    or_null,
    record,
    refuse,
    text,
    tree,
    whole,
)

SCHEMA = 1
MANIFEST, ROWS, PLANS = "manifest.json", "rows.jsonl", "plans.jsonl"
CHECKPOINT = "checkpoint-"
"""How the name of a checkpoint's folder begins; its step follows."""
STATE = "state.json"
"""The file of a checkpoint that holds everything but tensors."""

TOKENS = whole(0, MOST_TOKENS)
MOST_MANIFEST_BYTES = 1 << 24
MOST_LINE_BYTES = 1 << 26
"""Of one row, of the plans of one batch, of a checkpoint's state. In memory, JSON takes up to 24
times that."""
MOST_STEPS = 2**31
MOST_NUMBER = 1e30
"""Of a loss's options and a step's scale: torch makes float32 of them, which holds 3e38."""
MOST_WHOLE_NUMBER = 2**53
"""Of these where they are whole: torch takes no more than 64 bits of them."""

STEPS = whole(1, MOST_STEPS)


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

# Plans -------------------------------------------------------------------------------------------


PLANNED = record(
    {
        "fingerprint": FINGERPRINT,
        "rollout_ids": array(text),
        "group_ids": array(or_null(text)),
        "trained_tokens": TOKENS,
        "plans": record({"shared": plan_of, "dense": plan_of}, optional=("dense",)),
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
