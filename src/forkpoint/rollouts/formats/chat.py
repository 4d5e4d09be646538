"""Samples with text or messages: TRL's completions, prompts with completions, pairs. Imports no
torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from forkpoint.rollouts.batch import group_of, short
from forkpoint.rollouts.fields import is_number
from forkpoint.rollouts.formats.record import Made, Record, RecordError, make
from forkpoint.rollouts.formats.trainers import NO_TEMPERATURE, TEXT_NOTE, Rollouts, format_of

MOST_MESSAGES = 1024
"""Largest number of messages of one sample. The template is rendered once for each answer."""


class Piece(NamedTuple):
    """Part of a sample's text, and whether its tokens are trained."""

    text: str
    trained: bool


@format_of(
    "chat",
    "prompt completion",
    "messages",
    "chosen rejected",
    key="completion messages chosen",
    without="input_ids token_ids prompt_ids tokens sequences",
    text=True,
    notes=(TEXT_NOTE, NO_TEMPERATURE),
)
def _chat(record: Record) -> Rollouts:
    """Reader of a prompt with its completion, a conversation, or a chosen and a rejected one.

    Completions of text, and messages of the assistant outside of the prompt, are trained. Without
    advantage and reward, the advantage is 1, or -1 for the rejected one.
    """
    prompt = record.get("prompt")
    if record.has("chosen"):
        chosen, rejected = record.get("chosen"), record.get("rejected")
        if prompt is None:
            prompt, chosen, rejected = _parted(record, chosen, rejected)
        for name, sample, advantage in (("chosen", chosen, 1.0), ("rejected", rejected, -1.0)):
            yield _sample(record, name, prompt, sample, group_id=record.place, advantage=advantage)
        return
    name = record.first("completion", "messages")
    given = None if record.has("advantage") or record.has("reward") else 1.0
    group = record.text(record.first("group_id", "step"))
    if group is not None and not record.has("group_id"):
        group = f"{group}: {group_of(repr(prompt))}"  # several steps of TRL may have equal prompts
    yield _sample(record, name, prompt, record.get(name), group_id=group, advantage=given)


def _sample(record: Record, name: str, prompt: Any, sample: Any, **given: Any) -> Made:
    for key, value in (("prompt", prompt), (name, sample)):
        first = value
        while isinstance(first, list | tuple | np.ndarray) and len(first):
            first = first[0]
        if is_number(first):
            raise record.fail(
                key,
                f"{key} is {short(value)}; it takes text, or messages with role and content. Write "
                "token ids in token_ids, or in prompt_ids and completion_ids with their masks.",
            )
    if record.tokenize is None:
        raise record.fail(
            name,
            "the record holds text and no token ids. Give the model's tokenizer (tokenizer=, "
            "--tokenizer). For messages, give its folder or its name on the Hub.",
        )
    if isinstance(sample, str) and isinstance(prompt, str | None) and name != "messages":
        pieces = [Piece(prompt or "", False), Piece(sample, True)]
    else:
        pieces = _pieces(record, name, prompt, sample)
    ids: list[int] = []
    mask: list[bool] = []
    for piece in pieces:
        found = record.encode(name, piece.text) if piece.text else []
        ids += found
        mask += [piece.trained] * len(found)
    return make(
        record,
        {"advantage": "advantage", "reward": "reward"},
        ids=np.array(ids, np.int64),
        trained=np.array(mask, np.bool_),
        names=(name, name),
        **given,
    )


def _pieces(record: Record, name: str, prompt: Any, sample: Any) -> list[Piece]:
    """The text of messages, cut before and after each trained answer."""
    messages = _messages(record, name, sample)
    given = _messages(record, "prompt", [] if prompt is None else prompt)
    messages, first = [*given, *messages], len(given)
    if len(messages) > MOST_MESSAGES:
        raise record.fail(
            name,
            f"there are {len(messages):,} messages; a sample has at most {MOST_MESSAGES:,}. Leave "
            "the record out (on_error='skip').",
        )
    answers = [n for n, m in enumerate(messages) if n >= first and m.get("role") == "assistant"]
    if not answers:
        raise record.fail(
            name,
            f"{name} has no message of the role assistant to train, among {len(messages):,}. Add "
            "one, or leave the record out (on_error='skip').",
        )
    pieces: list[Piece] = []
    done = ""
    for n in answers:
        before = _rendered(record, name, messages[:n], answers=True)
        after = _rendered(record, name, messages[: n + 1], answers=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise record.fail(
                name,
                f"the chat template changes the text before message {n}, so the tokens of turns "
                "are unknown. Write token ids, or use a template that keeps earlier turns.",
            )
        pieces += [Piece(before[len(done) :], False), Piece(after[len(before) :], True)]
        done = after
    return pieces


def _messages(record: Record, name: str, messages: Any) -> list[dict[str, Any]]:
    """Messages without null values, which parquet adds. Raises RecordError for other values."""
    if not isinstance(messages, list | tuple) or any(
        not isinstance(message, dict) or not isinstance(message.get("role"), str)
        for message in messages
    ):
        raise record.fail(
            name,
            f"{name} is {short(messages)}; it takes text, or messages with role and content. A "
            "prompt and its completion are both text or both messages.",
        )
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else [content]:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text and not isinstance(part, str | None):
                raise record.fail(
                    name,
                    f"{name} has {short(part)}, which is not text. This format is read for text "
                    "only.",
                )
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _rendered(record: Record, name: str, messages: Sequence[Any], *, answers: bool) -> str:
    assert record.tokenize is not None
    if not messages:  # which transformers refuses
        return ""
    if record.tokenize.render is None:
        raise record.fail(
            name,
            f"{name} holds messages, and the tokenizer has no chat template. Give the model's "
            "tokenizer of transformers (tokenizer=), or its folder or name on the Hub "
            "(--tokenizer).",
        )
    try:
        return record.tokenize.render(messages, answers, record.get("tools"))
    except MemoryError:
        raise
    except Exception as error:  # any error, because templates raise their own
        reason = short(f"{type(error).__name__}: {error}")
        raise RecordError(
            f"{record.where}: the chat template refuses the messages of {name}: {reason}. Correct "
            "them, or give the template that they were made with.",
            name,
        ) from None


def _parted(record: Record, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Split a chosen and a rejected conversation into the common prompt and the rest of each."""
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        chosen = _messages(record, "chosen", chosen)
        rejected = _messages(record, "rejected", rejected)
    pairs = zip(chosen, rejected, strict=False)
    least = min(len(chosen), len(rejected))
    # Compared as text, because values of a file may be arrays.
    count = next((n for n, (one, other) in enumerate(pairs) if repr(one) != repr(other)), least)
    return chosen[:count], chosen[count:], rejected[count:]
