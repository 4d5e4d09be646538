"""TRL: batches of GRPOTrainer, and samples of AsyncGRPO. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, before_first, made
from forkpoint.rollouts.formats.record import Record, group_of, spread, unpadded


def _trl(record: Record) -> Iterator[Rollout]:
    """A batch of GRPOTrainer: no group id, rows shuffled."""
    record.refuse_media(*MEDIA)
    prompts, completions = record.ids("prompt_ids"), record.ids("completion_ids")
    shown = record.mask("prompt_mask", len(prompts), "prompt_ids")
    kept = record.mask("completion_mask", len(completions), "completion_ids")
    prompt = prompts[unpadded(record, "prompt_mask", shown, "left")]
    inside = unpadded(record, "completion_mask", kept, "right")
    tokens = np.concatenate([prompt, completions[inside]])
    trained = kept
    if record.has("tool_mask"):
        trained = kept & record.mask("tool_mask", len(completions), "completion_ids")

    def completion(name: str) -> Any:
        values = record.floats(name, len(completions), "completion_ids")
        return None if values is None else spread(values[inside], len(prompt), len(tokens))

    ratio = "importance_sampling_ratio"
    single = not record.per_token(ratio) or record.length(ratio) == 1
    yield made(
        record,
        {"token_ids": "completion_ids", "loss_mask": "completion_mask", "advantage": "advantages",
         "old_logprobs": "old_per_token_logps", "reference_logprobs": "ref_per_token_logps",
         "weights": ratio},
        token_ids=tokens,
        loss_mask=spread(trained[inside], len(prompt), len(tokens)),
        advantage=completion("advantages")
        if record.per_token("advantages")
        else record.number("advantages"),
        old_logprobs=completion("old_per_token_logps"),
        reference_logprobs=completion("ref_per_token_logps"),
        weights=record.number(ratio) if single else completion(ratio),
        group_id=group_of(prompt),
    )  # fmt: skip


def _trl_async(record: Record) -> Iterator[Rollout]:
    """A RolloutSample of AsyncGRPO: entries stand at their tokens."""
    ids = record.ids("input_ids")
    trained = record.mask("completion_mask", len(ids), "input_ids")
    yield made(
        record,
        {"token_ids": "input_ids", "loss_mask": "completion_mask", "old_logprobs": "old_log_probs"},
        token_ids=ids,
        loss_mask=trained,
        advantage=record.number("advantage"),
        old_logprobs=record.floats("old_log_probs", len(ids), "input_ids"),
        group_id=record.text("group_id") or group_of(before_first(ids, trained)),
    )


_BATCH = frozenset({"prompt_ids", "prompt_mask", "completion_ids", "completion_mask"})
TRL = Format(
    name="trl",
    signatures=(_BATCH,),
    without=frozenset({"completion_logprobs"}),  # prime-rl's
    key=("completion_ids",),
    rollouts=_trl,
    notes=(NO_TEMPERATURE,),
)
TRL_ASYNC = Format(
    name="trl-async",
    signatures=(frozenset({"input_ids", "completion_mask", "old_log_probs", "advantage"}),),
    key=("input_ids",),
    rollouts=_trl_async,
    notes=(NO_TEMPERATURE,),
)
