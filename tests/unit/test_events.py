"""The literal order of work as the engine ran it, and what the model saw of it.

Batches are texts, a letter a token. A microbatch's text is what its forward read, and a rollout's
last token is not read.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import Config, Rollout, RolloutBatch, wrap
from forkpoint.losses import LogLikelihood, LossBatch, LossOutputs
from forkpoint.testing import ReadOnlyHook, tiny_model

pytestmark = pytest.mark.usefixtures("without_sample")

FLAT = (("abcdefxyz", "abcdefuvw", "abcdefqrs"),)
PAIRS = (("abcdxy", "abcduv"), ("lmnopq", "lmnors"))
TREE = (("abcdefghx", "abcdefghy", "abcdefiz", "abcdj", "ak"),)


def make_batch(groups: tuple[tuple[str, ...], ...]) -> RolloutBatch:
    return RolloutBatch(
        Rollout(
            [ord(letter) - ord("a") for letter in text],
            [position > 0 for position in range(len(text))],
            1.0,
            group_id=group,
        )
        for group, texts in enumerate(groups)
        for text in texts
    )


def squared(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """A loss of which nothing is known: joint over the batch."""
    return outputs.logprobs.sum() ** 2


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=1, dtype=torch.float32)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Events that the model itself sees: F or B, and the text of the microbatch that it runs."""
    seen: list[str] = []

    def forward(_: object, args: tuple[Tensor], output: Tensor) -> None:
        texts = (
            "".join(chr(ord("a") + token) for token in microbatch)
            for microbatch in args[0].tolist()
        )
        text = "|".join(texts)
        seen.append(f"F {text}")
        if output.requires_grad:
            output.register_hook(lambda _: seen.append(f"B {text}"))

    hook = model().get_input_embeddings().register_forward_hook(ReadOnlyHook(forward))
    try:
        yield seen
    finally:
        hook.remove()
        model().zero_grad()


def check(events: tuple[str, ...], seen: list[str], expected: str, texts: str) -> None:
    """The events are those expected, and what the model saw is what they say.

    `texts` are what the microbatches read, in the order of their first forwards.
    """
    assert " ".join(map(short, events)) == expected
    text_of = dict(enumerate(texts.split()))
    # Scores and recomputes are forwards of the model as well.
    assert seen == [
        f"{'B' if event.startswith('backward') else 'F'} {text_of[int(event.split()[-1])]}"
        for event in events
    ]


def short(event: str) -> str:
    """ "F1" for "forward leaf 1", and S, R, B for scores, recomputes and backwards."""
    operation, kind, number = event.split()
    assert operation in ("score", "forward", "recompute", "backward") and kind in ("prefix", "leaf")
    return f"{operation[0].upper()}{number}"


SCHEDULES = {
    "flat group, three leaves": (
        FLAT,
        Config(sharing="group", boundary="across", max_microbatch_tokens=5),
        "F0 F1 B1 F2 B2 F3 B3 B0",
        "abcde fqr fuv fxy",
    ),
    "two groups at once": (
        PAIRS,
        Config(sharing="group", boundary="across", max_microbatch_tokens=6),
        "F0 F1 B1 F2 B2 B0",
        "abclmn dudxop or",
    ),
    "three levels of forks, whole subtrees": (
        TREE,
        Config(sharing="tree", boundary="mixed", max_microbatch_tokens=4),
        "F0 B0 F1 F2 B2 F3 F4 B4 F5 B5 B3 B1",
        "a abc d de fghh fi",
    ),
    "a flat group whose prefix is computed again": (
        FLAT,
        Config(
            sharing="group", boundary="across", max_microbatch_tokens=5, activations="recompute"
        ),
        "F0 F1 B1 F2 B2 F3 B3 R0 B0",
        "abcde fqr fuv fxy",
    ),
    "nothing to run": ((("a", "b"),), Config(sharing="tree", boundary="across"), "", ""),
}


@pytest.mark.parametrize(
    ("groups", "config", "expected", "texts"), SCHEDULES.values(), ids=SCHEDULES.keys()
)
def test_step_and_score(
    groups: tuple[tuple[str, ...], ...], config: Config, expected: str, texts: str
) -> None:
    policy, batch = wrap(model(), config), make_batch(groups)
    with recorded() as seen:
        stats = policy.forward_backward(batch, LogLikelihood())
        # Where no token is trained one runs, to know which parameters get zero gradients.
        ran = seen if expected else [entry for entry in seen if not entry.endswith(" a")]
        check(stats.events, ran, expected, texts)
        assert stats.events == stats.plan.events()
    with recorded() as seen:
        scores = policy.score(batch)
        forwards = re.findall(r"F(\d+)", expected)
        check(scores.events, seen, " ".join(f"S{number}" for number in forwards), texts)


def test_replay_runs_all_forwards_and_then_the_step() -> None:
    config = Config(sharing="group", boundary="across", max_microbatch_tokens=5)
    with recorded() as seen:
        stats = wrap(model(), config).forward_backward(make_batch(FLAT), squared)
    expected = "S0 S1 S2 S3 F0 F1 B1 F2 B2 F3 B3 B0"
    check(stats.events, seen, expected, "abcde fqr fuv fxy")
