"""The schema of a replay's folder, for all who read one: reports, and replays that resume.

Every field of every file has its type and its bounds here. Imports no torch.
"""

import math
from typing import Any, get_args

from forkpoint.apps.replay.experts import expert_loads, given_routes
from forkpoint.apps.replay.rates import Schedule
from forkpoint.config import Boundary, Sharing
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

SCHEMA = 1
MANIFEST, ROWS, PLANS = "manifest.json", "rows.jsonl", "plans.jsonl"
CHECKPOINT = "checkpoint.safetensors"
SHARDS = "checkpoint-"
"""How the folder of a checkpoint of several ranks begins; the number of its step follows."""
SHARDS_FACTS = "checkpoint.json"
MOST_FACTS_BYTES = 1 << 26
MOST_RANKS = 1 << 16

MOST_MANIFEST_BYTES = 1 << 24
MOST_LINE_BYTES = 1 << 26
"""Of one row, and of the plans of one batch. What JSON becomes in memory is up to 24 times that."""
MOST_ROWS_BYTES = 1 << 32
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
        "plans": record({"shared": plan_of, "dense": plan_of}, optional=("dense",)),
    }
)

# The facts beside a checkpoint -------------------------------------------------------------------

_WORD = whole(0, 2**32 - 1)
_CRC = whole(0, 2**32 - 1)
NOT_JSON = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}
"""How numbers that JSON lacks are written, where a number has to come back as it was."""


def plain_value(value: Any, field: str) -> Any:
    """A number, a boolean, text or null of an optimizer's state, as it was.

    A list of one of the names of NOT_JSON stands for that number.
    """
    if isinstance(value, list) and len(value) == 1 and value[0] in list(NOT_JSON):
        return NOT_JSON[value[0]]
    if isinstance(value, list | dict):
        raise refuse(field, value, "a number, true, false, text or null")
    return tree(value, field)


def _python_random(value: Any, field: str) -> tuple[int, tuple[int, ...], float | None]:
    """The state that `random.setstate` takes."""
    if not isinstance(value, list) or len(value) != 3:
        raise refuse(field, value, "a list of three entries, as random.getstate gives it")
    version = one_of(3)(value[0], f"{field}[0]")
    numbers = array(_WORD, length=625)(value[1], f"{field}[1]")
    whole(0, 624)(numbers[624], f"{field}[1][624]")
    return version, numbers, or_null(number())(value[2], f"{field}[2]")


def _numpy_random(value: Any, field: str) -> tuple[str, tuple[int, ...], int, int, float]:
    """The state that `numpy.random.set_state` takes."""
    if not isinstance(value, list) or len(value) != 5:
        raise refuse(field, value, "a list of five entries, as numpy.random.get_state gives it")
    return (
        one_of("MT19937")(value[0], f"{field}[0]"),
        array(_WORD, length=624)(value[1], f"{field}[1]"),
        whole(0, 624)(value[2], f"{field}[2]"),
        whole(0, 1)(value[3], f"{field}[3]"),
        number()(value[4], f"{field}[4]"),
    )


FACTS = record(
    {
        "schema": one_of(SCHEMA),
        "step": STEPS,
        "bytes": record({ROWS: whole(1, MOST_ROWS_BYTES), PLANS: whole(1)}),
        "crc": record({ROWS: _CRC, PLANS: _CRC}),
        "devices": mapping(text),
        "plain": mapping(plain_value),
        "python_random": _python_random,
        "numpy_random": _numpy_random,
        "crc32": mapping(_CRC),
    }
)

SHARDED_FACTS = record(
    {
        "schema": one_of(SCHEMA),
        "step": STEPS,
        "ranks": whole(1, MOST_RANKS),
        "bytes": record({ROWS: whole(1, MOST_ROWS_BYTES), PLANS: whole(1)}),
        "crc": record({ROWS: _CRC, PLANS: _CRC}),
        "plain": mapping(plain_value),
        "scalars": array(text),
        "local": array(text),
        "files": mapping(record({"bytes": whole(1), "crc": _CRC})),
        "generators": array(
            record(
                {
                    "torch": record({"cpu": text, "cuda": text}, optional=("cuda",)),
                    "python_random": _python_random,
                    "numpy_random": _numpy_random,
                }
            )
        ),
    }
)
"""Facts beside the shards of a checkpoint of several ranks."""
