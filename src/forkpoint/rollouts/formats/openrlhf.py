"""OpenRLHF: an Experience. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, before_first, made
from forkpoint.rollouts.formats.record import Record, group_of, spread, unpadded


def _openrlhf(record: Record) -> Iterator[Rollout]:
    """An Experience: the A entries of the action arrays belong to the last A tokens of the row."""
    record.refuse_media(*MEDIA)
    if record.has("loss_mask"):  # a field of SkyRL's Experience, which has the same other names
        raise record.fail(
            "loss_mask",
            "there is a loss_mask besides action_mask, which OpenRLHF's Experience has not; which "
            "tokens are trained is not clear. Leave it out, or make action_mask of the two.",
        )
    ids = record.ids("sequences")
    attended = record.mask("attention_mask", len(ids), "sequences")
    inside = unpadded(record, "attention_mask", attended, "either")
    actions = record.length("action_mask")
    if actions > len(ids):
        raise record.fail(
            "action_mask", f"action_mask has {actions} entries, but sequences has {len(ids)}."
        )
    trained = spread(
        record.mask("action_mask", actions, "action_mask"), len(ids) - actions, len(ids)
    )
    assert trained is not None
    if (trained & ~attended).any():
        at = int((trained & ~attended).argmax()) - (len(ids) - actions)
        raise record.fail("action_mask", f"action_mask[{at}] is 1 where padding lies.")

    old = record.first("action_log_probs", "rollout_log_probs")

    def action(name: str) -> Any:
        values = record.floats(name, actions, "action_mask")
        placed = spread(values, len(ids) - actions, len(ids))
        return None if placed is None else placed[inside]

    tokens = ids[inside]
    # Where there is no critic, returns are what advantages were made of, and train nothing.
    critic = record.has("values")
    yield made(
        record,
        {"token_ids": "sequences", "loss_mask": "action_mask", "advantage": "advantages",
         "old_logprobs": old, "reference_logprobs": "base_action_log_probs",
         "old_values": "values"},
        token_ids=tokens,
        loss_mask=trained[inside],
        advantage=action("advantages"),
        reward=record.number("rewards"),
        old_logprobs=action(old),
        reference_logprobs=action("base_action_log_probs"),
        returns=action("returns") if critic else None,
        old_values=action("values"),
        group_id=group_of(before_first(tokens, trained[inside])),
    )  # fmt: skip


OPENRLHF = Format(
    name="openrlhf",
    signatures=(frozenset({"sequences", "action_mask"}),),
    key=("sequences",),
    rollouts=_openrlhf,
    notes=(NO_TEMPERATURE,),
)
