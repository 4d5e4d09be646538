"""Plans and model shapes from JSON that others may have changed, for reports and calibrations.

Every field has the type that its dataclass says, whole numbers are bounded, and indices point at
something. Nothing else of a plan is checked: it is drawn, and cannot be trained from.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import ENDS, IDLE, OPERATIONS, Instruction, Program
from forkpoint.rollouts.schema import (
    Check,
    SchemaError,
    array,
    flag,
    number,
    one_of,
    or_null,
    record,
    row_of,
    text,
    text_like,
    whole,
    whole_numbers,
)
from forkpoint.tree.forest import Forest, IntArray

MOST_TOKENS = 2**40
"""Of a batch. Products of two positions are then counted without overflow."""
BYTES = or_null(whole(0, 2**62))
FINGERPRINT = text_like("[0-9a-f]{16}", "16 digits of 0-9 and a-f")
MOST_COUNT = 2**100
"""Of pairs of tokens."""
MOST_COST = 1e60


def plan_of(given: Any, field: str) -> Plan:
    """The plan that `Plan.to_dict` gave. Raises SchemaError for anything else."""
    plan: Plan = check_of(Plan)(given, field)
    for held, what in (
        (_is_forest(plan.forest, plan.rollouts), "its forest is not one of its rollouts"),
        (_has_microbatches(plan), "its microbatches do not hold each segment once"),
        (_has_program(plan), "its program is not one of its microbatches"),
        (
            all(work.pairs.keys() >= {0, *_windows(plan)} for work in (plan.dense, plan.shared)),
            "it does not count pairs for every window",
        ),
    ):
        if not held:
            raise SchemaError(f"{field}: {what}")
    return plan


@cache
def check_of(kind: Any) -> Check:
    """The check of a value of a type; of a dataclass, one of each field."""
    simple: dict[Any, Check] = {
        str: text,
        bool: flag,
        int: whole(-1, 2**62),
        float: number(0, MOST_COST),
        IntArray: whole_numbers(-1, MOST_TOKENS),
        tuple[int, ...]: _integers,
        dict[int, int]: _pairs,
        Program: _program,
    }
    if kind in simple:
        return simple[kind]
    if is_dataclass(kind):
        return _object(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return one_of(*arguments)
    if origin is tuple:
        return array(check_of(arguments[0]))
    if origin is UnionType and arguments[1] is NoneType:
        return or_null(check_of(arguments[0]))
    raise AssertionError(f"there is no check of {kind}")


def _object(kind: Any) -> Check:
    hints, found = get_type_hints(kind), fields(kind)
    # Files of earlier versions lack fields that came later.
    late = [f.name for f in found if (f.default, f.default_factory) != (MISSING, MISSING)]
    check = record({f.name: check_of(hints[f.name]) for f in found}, optional=late)

    def checked(value: Any, field: str) -> Any:
        values = check(value, field)
        try:
            return kind(**values)
        except ConfigError as error:  # of a shape whose sizes do not agree
            raise SchemaError(f"{field}: {str(error).rstrip('.')}") from None

    return checked


def _integers(value: Any, field: str) -> tuple[int, ...]:
    return tuple(check_of(IntArray)(value, field).tolist())


def _pairs(value: Any, field: str) -> dict[int, int]:
    count = whole(0, MOST_COUNT)
    if not isinstance(value, Mapping) or not all(k.isdecimal() and len(k) < 12 for k in value):
        raise SchemaError(f"{field} is no object of windows and counts of pairs")
    return {int(key): count(entry, f"{field}.{key}") for key, entry in value.items()}


def _program(value: Any, field: str) -> Program:
    hints = get_type_hints(Instruction)
    hints |= {"operation": Literal[OPERATIONS], "ends_at": Literal[ENDS]}
    instruction = row_of(*(check_of(hint) for hint in hints.values()))
    return Program(tuple(Instruction(*row) for row in array(instruction)(value, field)))


def _windows(plan: Plan) -> tuple[int, ...]:
    return plan.shape.windows if plan.shape else ()


def _is_forest(forest: Forest, rollouts: int) -> bool:
    """Segments come after their parents, and each rollout that runs ends in one of them."""
    segments, owners = len(forest), len(forest.order)
    columns = forest.start, forest.length, forest.owner_begin, forest.owner_end
    return (
        all(len(column) == segments for column in columns)
        and len(forest.leaf) == rollouts
        and bool((forest.parent < np.arange(segments)).all())
        and bool((forest.length > 0).all() and (forest.start >= 0).all())
        and bool((forest.leaf < segments).all())
        and bool(((forest.owner_begin >= 0) & (forest.owner_begin < forest.owner_end)).all())
        and bool((forest.owner_end <= owners).all())
        and np.array_equal(np.sort(forest.order), np.flatnonzero(forest.leaf >= 0))
    )


def _has_microbatches(plan: Plan) -> bool:
    microbatches = plan.microbatches
    return sorted(s for m in microbatches for s in m.segments) == list(
        range(len(plan.forest))
    ) and all(
        m.index == index
        and m.parent < index
        and bool(m.segments)
        and len(m.segments) == len(m.cache_begin) == len(m.segment_begin) == len(m.state_index)
        for index, m in enumerate(microbatches)
    )


def _has_program(plan: Plan) -> bool:
    return all(
        i.microbatch == IDLE if i.exchanges else i.microbatch < len(plan.microbatches)
        for i in plan.program.instructions
    )
