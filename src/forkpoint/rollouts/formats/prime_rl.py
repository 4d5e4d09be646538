"""prime-rl: training samples, as one row of tokens or as prompt and completion, and microbatches.

Imports no torch.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.formats.base import MEDIA, Format, before_first, made
from forkpoint.rollouts.formats.record import Record, Row, group_of

PADDING_ID = 1
"""Token that prime-rl pads microbatches with, whatever the tokenizer's own padding is."""
_FLOATS = ("advantages", "inference_logprobs", "temperatures", "ref_logprobs", "rl_weights")


def _prime_rl(record: Record) -> Iterator[Rollout]:
    record.refuse_media(*MEDIA)
    if record.has("inference_logprobs"):
        yield from _microbatch(record)
    elif record.has("completion_ids"):
        yield _two_parts(record)
    else:
        ids = record.ids("token_ids")
        trained = record.mask("mask", len(ids), "token_ids")
        yield _sample(record, "token_ids", "mask", "logprobs", ids, trained)


def _sample(
    record: Record, ids_name: str, mask_name: str, old_name: str, ids: Any, trained: Any
) -> Rollout:
    """A sample whose entries all stand at their tokens."""
    name = "advantages" if record.has("advantages") else "advantage"
    advantage = (
        record.floats(name, len(ids), ids_name) if record.per_token(name) else record.number(name)
    )
    temperature = _temperature(record, trained)
    return made(
        record,
        {"token_ids": ids_name, "loss_mask": mask_name, "advantage": name,
         "old_logprobs": old_name, "reference_logprobs": "ref_logprobs", "weights": "rl_weights"},
        token_ids=ids,
        loss_mask=trained,
        advantage=advantage,
        reward=record.number("reward"),
        old_logprobs=record.floats(old_name, len(ids), ids_name),
        reference_logprobs=record.floats("ref_logprobs", len(ids), ids_name),
        weights=record.floats("rl_weights", len(ids), ids_name),
        group_id=record.text("group_id") or group_of(before_first(ids, trained)),
        **({} if temperature is None else {"temperature": temperature}),
    )  # fmt: skip


def _two_parts(record: Record) -> Rollout:
    """A sample of prompt and completion, whose log-probs and temperatures are the completion's."""
    prompt, completion = record.ids("prompt_ids"), record.ids("completion_ids")
    masks = [
        record.mask("prompt_mask", len(prompt), "prompt_ids"),
        record.mask("completion_mask", len(completion), "completion_ids"),
    ]
    values: dict[str, Any] = {
        **{name: record.values.get(name) for name in ("advantage", "reward", "temperature")},
        "ref_logprobs": record.values.get("ref_logprobs"),
    }
    for name in ("logprobs", "temperatures"):
        entries = record.floats(f"completion_{name}", len(completion), "completion_ids")
        if entries is not None:
            values[name] = np.concatenate([np.zeros(len(prompt)), entries])
    whole = Record(record.where, values)
    made_of = _sample(
        whole,
        *("completion_ids", "completion_mask", "logprobs"),
        np.concatenate([prompt, completion]),
        np.concatenate(masks),
    )
    record.rewarded = whole.rewarded
    return made_of


def _microbatch(record: Record) -> Iterator[Rollout]:
    """Samples packed into one row: they begin where positions begin again at 0; padding ends it."""
    ids = record.ids("input_ids")
    positions = record.ids("position_ids")
    if len(positions) != len(ids) or not len(ids) or positions[0] != 0:
        raise record.fail(
            "position_ids",
            f"position_ids has {len(positions)} entries and begins with {short(positions[:1])}; it "
            f"takes one for each of the {len(ids)} tokens, from 0.",
        )
    starts = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
    jumps = np.flatnonzero((np.diff(positions) != 1) & (positions[1:] != 0))
    if len(jumps):
        at = int(jumps[0]) + 1
        raise record.fail(
            "position_ids",
            f"position_ids[{at}] is {positions[at]} after {positions[at - 1]}; positions count on, "
            "or begin again at 0.",
        )
    columns: dict[str, Any] = {"input_ids": ids}
    for name in ("loss_mask", *_FLOATS):
        if record.per_token(name):
            kinds, what = ("biuf", "0 and 1") if name == "loss_mask" else ("iuf", "numbers")
            columns[name] = record.row(name, kinds, what)
            if len(columns[name]) != len(ids):
                raise record.fail(
                    name, f"{name} has {len(columns[name])} entries, but input_ids has {len(ids)}."
                )
    for begin, end in itertools.pairwise(starts):
        part = Row({name: value[begin:end] for name, value in columns.items()}, record.values)
        sample = Record(f"{record.where}, tokens {begin} to {end - 1}", part)
        own = sample.ids("input_ids")
        trained = sample.mask("loss_mask", len(own), "input_ids")
        if begin > 0 and end == len(ids) and _is_padding(sample, own, trained):
            return
        yield _sample(sample, "input_ids", "loss_mask", "inference_logprobs", own, trained)


def _is_padding(record: Record, ids: Any, trained: Any) -> bool:
    """Whether the last part of a microbatch only fills it up to a multiple of some length.

    It stands where a sample would, with positions of its own: tokens of id 1 of which none is
    trained and none has a log-prob, which is no rollout of a model.
    """
    if trained.any() or (ids != PADDING_ID).any():
        return False
    logprobs = record.floats("inference_logprobs", len(ids), "input_ids")
    return logprobs is not None and not logprobs.any()


def _temperature(record: Record, trained: Any) -> float | None:
    """The one temperature of the trained tokens; those of others are not used."""
    values = record.floats("temperatures", len(trained), "the sample")
    if values is None or not trained.any():
        return None
    used = values[trained]
    if (used != used[0]).any():
        raise record.fail(
            "temperatures",
            f"temperatures has {short(used[0])} and {short(used[used != used[0]][0])} on trained "
            "tokens; a rollout has one.",
        )
    return float(used[0])


PRIME_RL = Format(
    name="prime-rl",
    signatures=(
        frozenset({"token_ids", "mask", "logprobs"}),
        frozenset({"prompt_ids", "completion_ids", "completion_mask", "completion_logprobs"}),
        frozenset({"input_ids", "loss_mask", "inference_logprobs", "position_ids"}),
    ),
    key=("token_ids", "completion_ids", "input_ids"),
    rollouts=_prime_rl,
)
