"""verl: DataProto, and the text that its trainer logs. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.formats.base import MEDIA, NO_TEMPERATURE, Format, made
from forkpoint.rollouts.formats.record import Record, group_of, spread, unpadded


def _verl(record: Record) -> Iterator[Rollout]:
    """DataProto: prompts padded on the left, responses on the right."""
    record.refuse_media(*MEDIA)
    prompts, responses = record.ids("prompts"), record.ids("responses")
    ids, width = record.ids("input_ids"), len(prompts)
    if len(ids) != width + len(responses):
        raise record.fail(
            "input_ids",
            f"input_ids has {len(ids)} entries, but prompts and responses have "
            f"{width} + {len(responses)}.",
        )
    attended = record.mask("attention_mask", len(ids), "input_ids")
    inside_prompt = unpadded(record, "attention_mask", attended[:width], "left")
    inside = unpadded(record, "attention_mask", attended[width:], "right")
    both = np.concatenate([prompts, responses])
    differ = attended & (both != ids)
    if differ.any():
        at = int(differ.argmax())
        raise record.fail(
            "input_ids", f"input_ids[{at}] is {ids[at]}, but prompts and responses have {both[at]}."
        )
    mask, trained = _trained(record, attended, width)
    outside = trained & ~attended[width:]
    if outside.any():
        raise record.fail(mask, f"{mask}[{int(outside.argmax())}] is 1 where padding lies.")
    tokens, prompt = ids[attended], inside_prompt.stop - inside_prompt.start
    _check_positions(record, attended)

    old = record.first("old_log_probs", "rollout_log_probs")

    def response(name: str) -> Any:
        values = record.floats(name, len(responses), "responses")
        return None if values is None else spread(values[inside], prompt, len(tokens))

    rewards = record.first("token_level_rewards", "token_level_scores", "rm_scores")
    given = record.floats(rewards, len(responses), "responses")
    # Where there is no critic, verl's returns are the advantages once more.
    critic = record.has("values")
    yield made(
        record,
        {"token_ids": "input_ids", "loss_mask": mask, "advantage": "advantages",
         "old_logprobs": old, "reference_logprobs": "ref_log_prob",
         "weights": "rollout_is_weights", "old_values": "values", "group_id": "uid"},
        token_ids=tokens,
        loss_mask=spread(trained[inside], prompt, len(tokens)),
        advantage=response("advantages"),
        reward=None if given is None else float(given[inside].sum()),
        old_logprobs=response(old),
        reference_logprobs=response("ref_log_prob"),
        weights=response("rollout_is_weights"),
        returns=response("returns") if critic else None,
        old_values=response("values"),
        group_id=record.text("uid") or group_of(tokens[:prompt]),
    )  # fmt: skip


def _trained(
    record: Record, attended: NDArray[np.bool_], width: int
) -> tuple[str, NDArray[np.bool_]]:
    """Which tokens of the response are trained, and the field that says so.

    Before there was response_mask, turns of tools were in loss_mask, over prompt and response;
    without either all of the response is trained, which is what verl then makes of the attention
    mask.
    """
    if record.has("response_mask"):
        return "response_mask", record.mask("response_mask", len(attended) - width, "responses")
    if record.has("loss_mask"):
        return "loss_mask", record.mask("loss_mask", len(attended), "input_ids")[width:]
    return "attention_mask", attended[width:]


def _check_positions(record: Record, attended: np.ndarray) -> None:
    """Positions count the tokens of the rollout from 0; others are not what would be trained."""
    if not record.has("position_ids"):
        return
    given = record.values["position_ids"]
    listed = isinstance(given, list) and given and isinstance(given[0], list | np.ndarray)
    if listed or (isinstance(given, np.ndarray) and given.ndim > 1):
        raise record.fail(
            "position_ids",
            f"position_ids has {len(given)} rows for a sample; positions of several axes (mRoPE) "
            "are not read.",
        )
    positions = record.row("position_ids", "iuf", "whole numbers")
    wanted = np.cumsum(attended) - 1
    if len(positions) != len(attended) or (positions[attended] != wanted[attended]).any():
        raise record.fail(
            "position_ids", "position_ids do not count the tokens that attention_mask has, from 0."
        )


def _verl_text(record: Record) -> Iterator[Rollout]:
    """A line of the text that is logged with rollout_data_dir: ids are made by a tokenizer."""
    texts: list[str] = []
    for name in ("input", "output"):
        text = record.text(name)
        if text is None:
            raise record.fail(name, f"there is no {name}.")
        texts.append(text)
    if record.tokenizer is None:
        raise record.fail(
            "input",
            "the record holds text and no token ids. Give the model's tokenizer.json (tokenizer=, "
            "--tokenizer) to have the text tokenized again, which is good enough to see what "
            "sharing saves; for exact work dump the DataProto, which has the ids.",
        )
    prompt, response = (record.tokenizer(text) for text in texts)
    yield made(
        record,
        {"token_ids": "input", "advantage": "score"},
        token_ids=prompt + response,
        loss_mask=[0] * len(prompt) + [1] * len(response),
        reward=record.number("score"),
        group_id=record.text("uid") or group_of(texts[0]),
    )


VERL = Format(
    name="verl",
    signatures=(
        frozenset({"prompts", "responses", "response_mask"}),
        frozenset({"prompts", "responses", "attention_mask"}),
    ),
    key=("responses",),
    rollouts=_verl,
)
VERL_TEXT = Format(
    name="verl-text",
    signatures=(frozenset({"input", "output", "score"}),),
    key=("input",),
    rollouts=_verl_text,
    text=True,
    notes=(
        "The file holds text: token ids were made again by the tokenizer given, without the "
        "special tokens that verl leaves out of the text. Savings are near; losses are not exact.",
        NO_TEMPERATURE,
    ),
)
