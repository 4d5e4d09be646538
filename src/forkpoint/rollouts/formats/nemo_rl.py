"""NeMo RL: train data of GRPO and PPO. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, before_first, made
from forkpoint.rollouts.formats.record import Record, group_of


def _nemo_rl(record: Record) -> Iterator[Rollout]:
    """Train data of GRPO or PPO: padded on the right to input_lengths, entries at their tokens."""
    record.refuse_media(*MEDIA)
    name = "input_ids" if record.has("input_ids") else "token_ids"
    ids, length = record.ids(name), record.number("input_lengths")
    if length is None or length != int(length) or not 0 < length <= len(ids):
        raise record.fail(
            "input_lengths",
            f"input_lengths is {short(record.values.get('input_lengths'))}; it takes a whole "
            f"number from 1 to the {len(ids)} entries of {name}.",
        )
    end = int(length)
    mask = "token_mask" if record.has("token_mask") else "token_loss_mask"
    trained = record.mask(mask, len(ids), name)
    if trained[end:].any():
        at = end + int(trained[end:].argmax())
        raise record.fail(mask, f"{mask}[{at}] is 1 beyond input_lengths, which is {end}.")
    sample = "sample_mask" if record.has("sample_mask") else "sample_loss_mask"
    kept = record.number(sample)
    if kept not in (None, 0.0, 1.0):
        raise record.fail(sample, f"{sample} is {kept}; it takes 0 and 1.")
    old = record.first("prev_logprobs", "generation_logprobs")

    def entries(column: str) -> Any:
        values = record.floats(column, len(ids), name)
        return None if values is None else values[:end]

    # Shifted already: entry i of values is of the state in which token i was chosen.
    critic = record.has("values")
    yield made(
        record,
        {"token_ids": name, "loss_mask": mask, "advantage": "advantages",
         "old_logprobs": old, "reference_logprobs": "reference_policy_logprobs",
         "old_values": "values"},
        token_ids=ids[:end],
        loss_mask=trained[:end] & (kept != 0.0),
        advantage=entries("advantages")
        if record.per_token("advantages")
        else record.number("advantages"),
        reward=record.number("rewards"),
        old_logprobs=entries(old),
        reference_logprobs=entries("reference_policy_logprobs"),
        returns=entries("returns") if critic else None,
        old_values=entries("values"),
        group_id=group_of(before_first(ids[:end], trained[:end])),
    )  # fmt: skip


NEMO_RL = Format(
    name="nemo-rl",
    signatures=(
        frozenset({"input_ids", "input_lengths", "token_mask"}),
        frozenset({"token_ids", "input_lengths", "token_loss_mask"}),
    ),
    key=("input_ids", "token_ids"),
    rollouts=_nemo_rl,
    notes=(NO_TEMPERATURE,),
)
