"""slime: samples, and train data. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, made
from forkpoint.rollouts.formats.record import Record, group_of, spread


def _slime(record: Record) -> Iterator[Rollout]:
    """A Sample, or one of the train data: entries per token are the response's, at the end."""
    record.refuse_media(*MEDIA)
    ids = record.ids("tokens")
    length = "response_length" if record.has("response_length") else "response_lengths"
    count = record.number(length)
    if count is None or count != int(count) or not 0 <= count <= len(ids):
        raise record.fail(
            length,
            f"{length} is {short(record.values.get(length))}; it takes a whole number up to the "
            f"{len(ids)} tokens.",
        )
    responses = int(count)
    prompt = len(ids) - responses
    name = "loss_mask" if record.has("loss_mask") else "loss_masks"
    trained = np.ones(responses, bool)
    if record.has(name):
        trained = record.mask(name, responses, "the response")
    if record.values.get("remove_sample") is True:
        trained = np.zeros(responses, bool)
    if isinstance(record.values.get("reward"), dict):
        raise record.fail(
            "reward",
            f"reward is {short(record.values['reward'])}, several at once; write the one that "
            "is trained on.",
        )

    old = record.first("log_probs", "rollout_log_probs")

    def response(column: str) -> Any:
        return spread(record.floats(column, responses, "the response"), prompt, len(ids))

    advantage = response("advantages")
    if advantage is None and record.has("rewards"):  # train data's are normalised already
        advantage = record.number("rewards")
    # Where there is no critic, slime's returns are the rewards that advantages were made of.
    critic = record.has("values")
    yield made(
        record,
        {"token_ids": "tokens", "loss_mask": name, "advantage": "advantages",
         "old_logprobs": old, "reference_logprobs": "ref_log_probs", "old_values": "values"},
        token_ids=ids,
        loss_mask=spread(trained, prompt, len(ids)),
        advantage=advantage,
        reward=record.number("reward"),
        old_logprobs=response(old),
        reference_logprobs=response("ref_log_probs"),
        returns=response("returns") if critic else None,
        old_values=response("values"),
        group_id=record.text("group_index") or group_of(ids[:prompt]),
    )  # fmt: skip


SLIME = Format(
    name="slime",
    signatures=(
        frozenset({"tokens", "response_length"}),
        frozenset({"tokens", "response_lengths"}),
    ),
    key=("tokens",),
    rollouts=_slime,
    notes=(NO_TEMPERATURE,),
)
