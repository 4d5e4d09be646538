"""Files of text and messages: completions of TRL, conversations, and pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forkpoint import RolloutBatch, RolloutError, load_rollouts, losses
from forkpoint.rollouts.traces import open_rollouts

FIXTURES = Path(__file__).parents[1] / "fixtures"
WORDS = ("<pad>", "<eos>", *"abcdefghij")
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    "{% if messages and messages[0].content == 'j' %}{{ raise_exception('no j') }}{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = template
    return made


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def words(ids: Any) -> str:
    return " ".join(WORDS[n] for n in ids)


@pytest.mark.parametrize(("kind", "end"), [("completions", ""), ("messages", "<eos>")])
def test_completions_that_trl_logged(kind: str, end: str) -> None:
    """Tables of TRL 1.16.0 with log_completions, of text and of messages."""
    reader = open_rollouts(FIXTURES / f"trl-{kind}.parquet", tokenizer=tokenizer())
    found = reader.read()
    assert (reader.format, reader.container) == ("chat", "parquet")
    assert words(found[0].token_ids) == f"a b c d e {end} e a {end}".replace("  ", " ").strip()
    assert words(found[0].token_ids[found[0].loss_mask]) == f"e a {end}".strip()
    assert [round(r.advantage, 2) for r in found[:3]] == [-0.41, -0.73, 1.14]  # type: ignore
    assert [len(group) for group in RolloutBatch(found).groups()] == [3, 3]
    assert len(reader.notes) == 2, "ids are made again, at an unknown temperature"


def test_answers_of_a_conversation_are_trained(tmp_path: Path) -> None:
    """Tools and users are context; answers of a prompt are no part of the completion."""
    turns = [message("user", "a"), message("assistant", "b c"), message("tool", "d")]
    answer = message("assistant", "e")
    path = written(
        tmp_path / "x.jsonl",
        {"messages": [*turns, answer], "group_id": "g"},
        {"prompt": turns, "completion": [answer], "reward": 2.5, "group_id": "g"},
        {"prompt": "a b", "completion": "c", "group_id": "h"},
    )
    every, last, plain = load_rollouts(path, tokenizer=tokenizer())
    assert words(every.token_ids) == words(last.token_ids) == "a <eos> b c <eos> d <eos> e <eos>"
    assert words(every.token_ids[every.loss_mask]) == "b c <eos> e <eos>"
    assert [rollout.group_id for rollout in (every, last, plain)] == ["g", "g", "h"]
    assert words(last.token_ids[last.loss_mask]) == "e <eos>" and last.extras == {"reward": 2.5}
    assert (
        words(plain.token_ids[plain.loss_mask]) == "c" and plain.advantage == every.advantage == 1
    )


def test_pairs_of_chosen_and_rejected(tmp_path: Path) -> None:
    """With a prompt, and without, where it is all that both begin with."""
    user = message("user", "a b")
    pair = {
        "chosen": [user, message("assistant", "c")],
        "rejected": [user, message("assistant", "d")],
    }
    records = ({"prompt": "a b", "chosen": " c", "rejected": " d"}, pair, pair)
    found = load_rollouts(written(tmp_path / "x.jsonl", *records), tokenizer=tokenizer())
    assert [words(r.token_ids[r.loss_mask]) for r in found] == [
        *("c", "d"),
        *("c <eos>", "d <eos>") * 2,
    ]
    batch = RolloutBatch(found)
    assert [len(group) for group in batch.groups()] == [2, 2, 2], "equal pairs stay apart"
    losses.SimPO(beta=1.0, gamma=0.5).check(batch)
    assert [r.advantage for r in found[:2]] == [1, -1]


def test_pairs_of_several_batches_are_apart(tmp_path: Path) -> None:
    """Those of two lines or items, at the same positions of each."""
    batches = [
        {"chosen": [f"{n} c", f"{n} d"], "rejected": [f"{n} e", f"{n} f"]} for n in ("a", "b")
    ]
    torch.save(batches, tmp_path / "x.pt")
    lines = written(tmp_path / "x, line 3.jsonl", *batches)
    for path, places in ((lines, ("line 1", "line 2")), (tmp_path / "x.pt", ("item 0", "item 1"))):
        batch = RolloutBatch(load_rollouts(path, tokenizer=tokenizer()))
        assert [len(group) for group in batch.groups()] == [2] * 4
        assert batch.group_ids[::2] == tuple(f"{at}, row {n}" for at in places for n in range(2))


IMAGE = [{"type": "image", "image": "a.png"}]


@pytest.mark.parametrize(
    ("record", "given", "said"),
    [
        ({"messages": [message("user", "a")]}, tokenizer(), "no message of the role assistant"),
        ({"messages": "a"}, tokenizer(), "takes text, or messages with role and content"),
        ({"messages": [["user"]]}, tokenizer(), "takes text, or messages with role and content"),
        ({"messages": [message("user", IMAGE)]}, tokenizer(), "which is not text"),
        ({"prompt": "a", "completion": None}, tokenizer(), "completion is None; it takes text"),
        ({"prompt": "a", "completion": "\ud800"}, tokenizer(), "completion has half of a surr"),
        ({"messages": [message("assistant", "a")] * 1025}, tokenizer(), "at most 1,024"),
        ({"messages": [message("user", "j"), message("assistant", "a")]}, tokenizer(), "no j"),
        ({"messages": [message("assistant", "a")]}, tokenizer(None), "has no chat template"),
        ({"messages": [message("assistant", "a")]}, None, "holds text and no token ids"),
        ({"prompt": [1, 2], "completion": [3]}, None, "prompt is .1, 2.; it .* in token_ids, or"),
        ({"prompt": "a", "completion": [[3]]}, tokenizer(), "completion is .*ids in token_ids"),
        (
            {"messages": [message(role, role[0]) for role in ("user", "assistant") * 2]},
            tokenizer("{{ messages[-1].content }}"),
            "the chat template changes the text before message",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_messages_that_are_refused(record: Any, given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=f"line 1: .*{said}"):
        load_rollouts(written(tmp_path / "x.jsonl", record), tokenizer=given)


def test_text_within_the_limit_on_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b " * 20_000})
    with pytest.raises(RolloutError, match="the tokens of a text takes"):
        load_rollouts(path, tokenizer=tokenizer(), memory_limit="8MB")
    assert len(load_rollouts(path, tokenizer=tokenizer(), memory_limit="20MB")) == 1
