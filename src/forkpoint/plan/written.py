"""Plans from their JSON: a strict schema, and what a plan's parts must agree in.

A plan decides which tokens are trained, so nothing of one is believed: every field has a type and
bounds, the forest is a forest in which each rollout is one path, each segment lies in one
microbatch, microbatches nest, and places in microbatches and in the cache are those that the
planner gives.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import numpy as np

from forkpoint.config import (
    Activations,
    Boundary,
    Checkpointing,
    Gather,
    LeafLayout,
    Sharing,
    Split,
)
from forkpoint.errors import ConfigError, PlanError
from forkpoint.plan.cache import allocate_cache
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.contents import READ_VERSIONS, Candidate, PlanContents
from forkpoint.plan.pricing.cost import ModelShape, Work
from forkpoint.plan.pricing.sizes import MOST_LAYERS
from forkpoint.plan.program import ENDS, IDLE, OPERATIONS, Instruction, Program
from forkpoint.plan.program_checks import REMEDY, check_program
from forkpoint.plan.runs import LeftOut
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import (
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
from forkpoint.tree import Microbatch, segment_widths
from forkpoint.tree.forest import Forest, IntArray

P = TypeVar("P", bound=PlanContents)

MOST_TOKENS = 2**40
"""Of a batch. Products of two positions are then counted without overflow."""
MOST_POSITION = 2**31 - 1
MOST_SIZE = 2**31
MOST_COUNT = 2**100
"""Of pairs of tokens."""

TOKENS = whole(0, MOST_TOKENS)
INDICES = whole_numbers(0, MOST_TOKENS)
INDICES_OR_NONE = whole_numbers(-1, MOST_TOKENS)
BYTES = or_null(whole(0, 2**62))
FINGERPRINT = text_like("[0-9a-f]{16}", "16 digits of 0-9 and a-f")


def _pairs(value: Any, field: str) -> dict[int, int]:
    count = whole(0, MOST_COUNT)
    if not isinstance(value, dict) or not all(key.isdecimal() and len(key) < 12 for key in value):
        raise SchemaError(f"{field} is no object of windows and counts of pairs")
    return {int(key): count(entry, f"{field}.{key}") for key, entry in value.items()}


FOREST = record(
    {
        "order": INDICES,
        "parent": INDICES_OR_NONE,
        "start": whole_numbers(0, MOST_POSITION),
        "length": whole_numbers(1, MOST_POSITION),
        "owner_begin": INDICES,
        "owner_end": INDICES,
        "leaf": INDICES_OR_NONE,
    }
)
ROW = record(
    {
        "index": TOKENS,
        "parent": whole(-1, MOST_TOKENS),
        "segments": INDICES,
        "segment_begin": INDICES,
        "width": TOKENS,
        "cache_begin": INDICES_OR_NONE,
        "children": INDICES,
        "run_tokens": TOKENS,
        "tokens": TOKENS,
        "state_index": INDICES_OR_NONE,
        "activations": one_of(*get_args(Activations)),
        "checkpointing": one_of(*get_args(Checkpointing)),
        "keeps_logits": flag,
        "labelled": TOKENS,
        "padding": TOKENS,
        "trunk": one_of("", "sent", "received"),
    }
)
INSTRUCTION = row_of(
    whole(0, 1), one_of(*OPERATIONS), TOKENS, whole(IDLE, MOST_TOKENS), one_of(*ENDS), flag, flag
)
CAPABILITIES = record(
    {
        "leaves_early": flag,
        "checkpoints": array(one_of(*get_args(Checkpointing))),
        "length_multiple": whole(1, MOST_TOKENS),
    }
)
WORK = record({"tokens": TOKENS, "pairs": _pairs, "labelled": TOKENS})
SIZE, NONE_OR_MORE = whole(1, MOST_SIZE), whole(0, 2**62)
SHAPE = record(
    {
        "layers": whole(1, MOST_LAYERS),
        **dict.fromkeys(("hidden", "heads", "kv_heads", "head_dim", "value_dim", "vocab"), SIZE),
        "intermediate": NONE_OR_MORE,
        "windows": whole_numbers(0, MOST_SIZE),
        "attention_parameters": or_null(NONE_OR_MORE),
        "attention_activations": NONE_OR_MORE,
        "recurrent_layers": whole(0, MOST_LAYERS),
        **dict.fromkeys(("recurrent_parameters", "recurrent_activations"), NONE_OR_MORE),
        **dict.fromkeys(("state_elements", "tail_elements"), NONE_OR_MORE),
        "expert_layers": whole(0, MOST_LAYERS),
        **dict.fromkeys(("expert_activations", "router_bytes"), NONE_OR_MORE),
        "dtype_bytes": one_of(1, 2, 4, 8),
        **dict.fromkeys(("checkpointed", "compiled"), flag),
    },
    # Plans of version 9 counted none of these.
    optional=("expert_layers", "expert_activations", "router_bytes"),
)
LEFT_OUT = record(
    dict.fromkeys(("rollouts", "groups", "rollout_tokens", "tail_tokens"), whole(0, MOST_TOKENS))
)
COST = number(0, 1e60)
CANDIDATE = record(
    {"sharing": text, "boundary": text, "cost": or_null(COST), "refused": or_null(text)}
)
PLAN = record(
    {
        "version": one_of(*READ_VERSIONS),
        "sharing": one_of(*get_args(Sharing)),
        "boundary": one_of(*get_args(Boundary)),
        "leaf_layout": one_of(*get_args(LeafLayout)),
        "max_microbatch_tokens": whole(1, MOST_TOKENS),
        "forest": FOREST,
        "microbatches": array(ROW),
        "program": array(INSTRUCTION),
        "cache_tokens": TOKENS,
        "cache_states": TOKENS,
        "rollouts": whole(1, MOST_TOKENS),
        "logical_tokens": whole(1, MOST_TOKENS),
        "unique_tokens": whole(1, MOST_TOKENS),
        "labelled": TOKENS,
        "dense": WORK,
        "shared": WORK,
        "fingerprint": FINGERPRINT,
        "capabilities": CAPABILITIES,
        "left_out": LEFT_OUT,
        **dict.fromkeys(("counts_first", "last_tokens"), flag),
        "shape": or_null(SHAPE),
        "cost": COST,
        "cost_unit": one_of("ms", "FLOPs", "tokens"),
        "predicted_ms": or_null(COST),
        "predicted_peak_bytes": BYTES,
        "memory_budget_bytes": BYTES,
        "rests_on": text,
        "candidates": array(CANDIDATE),
        "reason": text,
        "gather": one_of("", *get_args(Gather)),
        "gather_reason": text,
        "split": one_of("", *get_args(Split)),
        "split_reason": text,
    },
    optional=("left_out",),
)


def read_plan(given: Any, kind: type[P]) -> P:
    """The plan that JSON values describe.

    Raises:
        PlanError: the values are no plan, one of another version, or one whose parts disagree.
    """
    if not isinstance(given, Mapping) or given.get("version") not in READ_VERSIONS:
        found = given.get("version") if isinstance(given, Mapping) else type(given).__name__
        raise PlanError(
            f"this JSON has version {short(found)} and this forkpoint reads plans of version "
            f"{', '.join(map(str, READ_VERSIONS[:-1]))} and {READ_VERSIONS[-1]}; make the plan "
            "again."
        )
    try:
        return plan_of(given, "", kind)
    except SchemaError as error:
        raise PlanError(f"this plan is damaged: {error}. Make the plan again.") from None


def plan_of(given: Any, field: str, kind: type[P]) -> P:
    """The check of a field that holds a plan. Raises SchemaError for what is none."""
    values = PLAN(given, field)
    try:
        plan = kind(**_values(values))
        _check_forest(plan)
        _check_microbatches(plan)
        _check_counts(plan)
        check_program(plan)
        _check_places(plan)
    except (SchemaError, ConfigError, PlanError) as error:
        said = str(error).removeprefix("this plan is damaged: ").removesuffix(REMEDY)
        said = said.rstrip(". ")
        raise SchemaError(f"{field}: {said}" if field else said) from None
    return plan


def _values(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan from what the schema gives back."""
    values = {name: value for name, value in given.items() if name != "version"}
    values["forest"] = Forest(**values["forest"])
    values["microbatches"] = tuple(_microbatch(microbatch) for microbatch in values["microbatches"])
    instructions = (Instruction(*instruction) for instruction in values["program"])
    values["program"] = Program(tuple(instructions))
    able = values["capabilities"]
    values["capabilities"] = Capabilities(**{**able, "checkpoints": tuple(able["checkpoints"])})
    values["left_out"] = LeftOut(**values.get("left_out", {}))
    values["candidates"] = tuple(Candidate(**c) for c in values["candidates"])
    for name in ("dense", "shared"):
        values[name] = Work(**values[name])
    if values["shape"] is not None:
        values["shape"] = shape_of(values["shape"])
    return values


def shape_of(values: dict[str, Any]) -> ModelShape:
    """The shape that SHAPE gave the fields of. Raises ConfigError where they do not agree."""
    return ModelShape(**{**values, "windows": tuple(values["windows"].tolist())})


def _microbatch(given: dict[str, Any]) -> Microbatch:
    values: dict[str, Any] = {
        name: tuple(value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    return Microbatch(**values)


def _require(held: Any, message: str) -> None:
    if not held:
        raise SchemaError(message)


def _check_forest(plan: PlanContents) -> None:
    """Every rollout is the path of one segment, and no segment has other owners."""
    forest, rollouts = plan.forest, plan.rollouts
    segments, owners = len(forest), len(forest.order)
    for name in ("start", "length", "owner_begin", "owner_end"):
        found = len(getattr(forest, name))
        _require(
            found == segments,
            f"forest.{name} has {found} entries and forest.parent {segments}, one for each segment",
        )
    _require(
        len(forest.leaf) == rollouts,
        f"forest.leaf has {len(forest.leaf)} entries, and there are {rollouts} rollouts",
    )
    ends = np.flatnonzero(forest.leaf >= 0)
    _require(
        np.array_equal(np.sort(forest.order), ends),
        "forest.order does not have each rollout that runs once",
    )
    parent, number_of = forest.parent, np.arange(segments)
    _require((parent < number_of).all(), "in the forest, a segment comes before its parent")
    below = parent >= 0
    above = parent[below]
    start = np.zeros(segments, np.int64)
    start[below] = forest.start[above] + forest.length[above]
    _require(
        np.array_equal(start, forest.start),
        "in the forest, a segment does not start where its parent ends",
    )
    begin, end = forest.owner_begin, forest.owner_end
    _require(
        (begin < end).all()
        and (end <= owners).all()
        and (begin[above] <= begin[below]).all()
        and (end[below] <= end[above]).all(),
        "in the forest, a segment has no owners, or has some that its parent has not",
    )
    leaf = forest.leaf[forest.order]
    place = np.arange(owners)
    _require(
        (leaf < segments).all() and ((begin[leaf] <= place) & (place < end[leaf])).all(),
        "in the forest, a rollout ends in a segment that is not its own",
    )
    through = np.bincount(leaf, minlength=segments)
    for segment in range(segments - 1, -1, -1):
        if parent[segment] >= 0:
            through[parent[segment]] += through[segment]
    _require(
        np.array_equal(through, end - begin),
        "in the forest, the rollouts through a segment are not its owners",
    )


def _check_microbatches(plan: PlanContents) -> None:
    """Each segment lies in one microbatch, and microbatches nest in visiting order."""
    forest, microbatches = plan.forest, plan.microbatches
    placed = sorted(segment for microbatch in microbatches for segment in microbatch.segments)
    _require(
        placed == list(range(len(forest))),
        f"its microbatches hold {len(placed)} segments and its forest has {len(forest)}, each "
        f"of which "
        "lies in one microbatch",
    )
    children: dict[int, list[int]] = {}
    opened: list[int] = []
    last = np.arange(len(microbatches))
    for index, microbatch in enumerate(microbatches):
        _require(microbatch.index == index, f"microbatches[{index}].index is {microbatch.index}")
        while opened and opened[-1] != microbatch.parent:
            opened.pop()
        _require(
            microbatch.parent == -1 or opened,
            f"microbatches[{index}].parent is {microbatch.parent}, which is no microbatch "
            f"that is open there",
        )
        opened.append(index)
        children.setdefault(microbatch.parent, []).append(index)
    for index in range(len(microbatches) - 1, -1, -1):
        if microbatches[index].parent >= 0:
            last[microbatches[index].parent] = max(last[microbatches[index].parent], last[index])
    microbatch_of = {
        segment: microbatch.index for microbatch in microbatches for segment in microbatch.segments
    }
    for microbatch in microbatches:
        found = list(microbatch.children)
        _require(
            found == children.get(microbatch.index, []),
            f"microbatches[{microbatch.index}].children are not the microbatches that have it "
            f"for their parent",
        )
        _check_layout(forest, microbatch)
        seen: set[int] = set()
        for segment in microbatch.segments:
            parent = int(forest.parent[segment])
            owner = microbatch_of.get(parent, microbatch.index)
            _require(
                parent in seen
                if owner == microbatch.index and parent >= 0
                else owner <= microbatch.index,
                f"microbatches[{microbatch.index}] holds segment {segment} before the one "
                f"that it follows",
            )
            _require(
                last[owner] >= microbatch.index,
                f"microbatches[{microbatch.index}] holds segment {segment}, whose parent is "
                f"in a microbatch that is not "
                "open there",
            )
            seen.add(segment)


def _check_layout(forest: Forest, microbatch: Microbatch) -> None:
    """Segments lie back to back, as `segment_begin` and the microbatch's sizes say."""
    where = f"microbatches[{microbatch.index}]"
    _require(microbatch.segments, f"{where}.segments is empty")
    for name in ("segment_begin", "cache_begin", "state_index"):
        found = len(getattr(microbatch, name))
        _require(
            found == len(microbatch.segments),
            f"{where}.{name} has {found} entries, and the microbatch "
            f"{len(microbatch.segments)} segments",
        )
    lengths = forest.length[list(microbatch.segments)]
    places = segment_widths(forest, microbatch)
    begins: IntArray = np.cumsum([0, *places])
    _require(
        list(microbatch.segment_begin) == begins[:-1].tolist()
        and (microbatch.run_tokens - microbatch.padding, microbatch.tokens)
        == (int(begins[-1]), int(lengths.sum()))
        and not (microbatch.width and microbatch.padding)
        and (
            not microbatch.width or (microbatch.width >= lengths.max() and not microbatch.children)
        ),
        f"{where}: segment_begin, places, tokens and width are not those of its segments",
    )


def _check_places(plan: PlanContents) -> None:
    """Prefix cache lies in the cache where the planner puts it."""
    microbatches, places, states = allocate_cache(plan.forest, plan.microbatches, plan.program)
    _require(
        (plan.cache_tokens, plan.cache_states) == (places, states)
        and all(
            (a.cache_begin, a.state_index) == (b.cache_begin, b.state_index)
            for a, b in zip(plan.microbatches, microbatches, strict=True)
        ),
        "cache_begin, state_index, cache_tokens and cache_states are not those of its microbatches",
    )


def _check_counts(plan: PlanContents) -> None:
    """Counts agree with the forest, and pairs are counted for every window."""
    forest = plan.forest
    dense, away = int(plan.run_lengths.sum()), plan.left_out
    given = dense + away.tokens + (0 if plan.last_tokens else plan.rollouts)
    for name, found, wanted in (
        ("logical_tokens", plan.logical_tokens, given),
        ("dense.tokens", plan.dense.tokens, dense),
        ("shared.tokens", plan.shared.tokens, plan.computed_tokens),
        ("shared.labelled", plan.shared.labelled, plan.labelled),
    ):
        _require(found == wanted, f"{name} is {found}, and its forest has {wanted}")
    still = int((plan.run_lengths == 0).sum())
    _require(
        away.groups <= away.rollouts <= min(still, away.rollout_tokens),
        f"left_out has {away.rollouts} rollouts in {away.groups} groups with "
        f"{away.rollout_tokens} tokens, and {still} rollouts have no edge in the forest",
    )
    # An edge has an entry for each temperature of its rollouts.
    paths = forest.length * forest.multiplicity
    _require(
        plan.labelled <= plan.dense.labelled <= dense,
        "more edges have labels than there are",
    )
    _require(
        plan.unique_tokens <= plan.logical_tokens,
        f"unique_tokens is {plan.unique_tokens}, and logical_tokens {plan.logical_tokens}",
    )
    labelled = sum(microbatch.labelled for microbatch in plan.microbatches)
    _require(
        labelled == plan.labelled
        and all(m.labelled <= paths[list(m.segments)].sum() for m in plan.microbatches),
        f"its microbatches have {labelled} labels, and it has {plan.labelled}",
    )
    windows = {0, *(plan.shape.windows if plan.shape else ())}
    for name in ("dense", "shared"):
        pairs = getattr(plan, name).pairs
        _require(
            pairs.keys() == windows,
            f"{name}.pairs has the windows {sorted(pairs)}, and the model {sorted(windows)}",
        )
