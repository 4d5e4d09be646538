"""SkyRL: the output of its generators. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, made
from forkpoint.rollouts.formats.record import Record, group_of, spread


def _skyrl(record: Record) -> Iterator[Rollout]:
    """A sample of a GeneratorOutput: entries per token are the response's."""
    record.refuse_media(*MEDIA)
    if record.number("is_last_step") == 0:
        raise record.fail(
            "is_last_step",
            "is_last_step is false: the record is a step of a trajectory, whose reward stands at "
            "its last step. Write each trajectory as one record.",
        )
    prompt, response = record.ids("prompt_token_ids"), record.ids("response_ids")
    ids = np.concatenate([prompt, response])

    def placed(name: str) -> Any:
        values = record.floats(name, len(response), "response_ids")
        return spread(values, len(prompt), len(ids))

    trained = record.mask("loss_masks", len(response), "response_ids")
    yield made(
        record,
        {"token_ids": "response_ids", "loss_mask": "loss_masks", "advantage": "rewards",
         "old_logprobs": "rollout_logprobs"},
        token_ids=ids,
        loss_mask=spread(trained, len(prompt), len(ids)),
        reward=_reward(record, len(response)),
        old_logprobs=placed("rollout_logprobs"),
        group_id=_group(record) or group_of(prompt),
    )  # fmt: skip


def _reward(record: Record, count: int) -> float | None:
    """The rollout's reward; of rewards per token it is the sum, as in SkyRL's statistics."""
    if not record.per_token("rewards"):
        return record.number("rewards")
    rewards = record.floats("rewards", count, "response_ids")
    assert rewards is not None
    finite = np.isfinite(rewards)
    if not finite.all():
        at = int(finite.argmin())
        raise record.fail("rewards", f"rewards[{at}] is {rewards[at]}; it takes finite numbers.")
    return float(rewards.sum())


def _group(record: Record) -> str | None:
    """The prompt's id of a TrajectoryID; None where there is none, or it is text of two ids."""
    given = record.values.get("trajectory_ids") if record.has("trajectory_ids") else None
    return Record(record.where, given).text("instance_id") if isinstance(given, Mapping) else None


SKYRL = Format(
    name="skyrl",
    signatures=(frozenset({"prompt_token_ids", "response_ids", "loss_masks"}),),
    key=("response_ids",),
    rollouts=_skyrl,
    notes=(NO_TEMPERATURE,),
)
