"""The demo's language and its rule, and what the demo calls a rise."""

import numpy as np
import pytest

from forkpoint.apps.demo.loop import rise
from forkpoint.apps.demo.task import (
    BLIND_REWARD,
    CONSONANTS,
    VOWELS,
    WORDS,
    dialect_of,
    make_prompt,
    reward,
    spell,
)


def ids(text: str) -> np.ndarray:
    return np.array([WORDS.index(word) for word in text.split()])


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("bala dara bele", "bala kata", 1.0),
        ("bala dara bele", "bele bolo tulu", 0.0),
        ("bulu bele tulu", "nuku bala puru", 2 / 3),
        ("bulu bele tulu", "bulu bili bolo bala", 1 / 4),
        ("bolo", "tolo", 1.0),
        ("bele bala", "bala", 1.0),  # as many of each: the first dialect counts
        ("bele bala", "bele", 0.0),
    ],
)
def test_the_rule(prompt: str, response: str, expected: float) -> None:
    assert reward(ids(prompt), ids(response)) == expected


def test_the_language() -> None:
    assert len(set(WORDS)) == len(WORDS) == len(VOWELS) * len(CONSONANTS)
    for token, word in enumerate(WORDS):
        assert {letter for letter in word if letter in VOWELS} == {
            VOWELS[dialect_of(np.array([token]))]
        }
    assert spell(ids("bala tulu")) == "bala tulu"


def test_prompts_are_mostly_of_one_dialect_and_all_dialects_come() -> None:
    random = np.random.default_rng(0)
    prompts = [make_prompt(1024, random) for _ in range(400)]
    shares = [reward(prompt, prompt) for prompt in prompts]
    # Half of the words are drawn from it, and a fifth of the other half falls to it.
    assert min(shares) > 0.5 and abs(np.mean(shares) - 0.6) < 0.01
    counts = np.bincount([dialect_of(prompt) for prompt in prompts], minlength=len(VOWELS))
    assert counts.min() > 400 * BLIND_REWARD * 0.7
    assert {int(prompt.max()) for prompt in prompts} == {len(WORDS) - 1}
    assert all(prompt.shape == (1024,) and prompt.min() == 0 for prompt in prompts)


def test_a_policy_that_does_not_read_the_prompt_gets_the_blind_reward() -> None:
    response = np.random.default_rng(1).integers(len(WORDS), size=24)
    prompts = [ids(f"b{v}l{v}") for v in VOWELS]
    assert np.mean([reward(prompt, response) for prompt in prompts]) == pytest.approx(BLIND_REWARD)


@pytest.mark.parametrize(
    ("rewards", "first", "last", "rose"),
    [
        ([0.2, 0.3, 0.5, 0.5, 0.5, 0.5, 0.8, 0.7], 0.25, 0.75, True),
        ([0.8, 0.7, 0.5, 0.5, 0.5, 0.5, 0.2, 0.3], 0.75, 0.25, False),
        ([0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.7], 0.3, 0.5, False),  # within the noise
        ([0.2] * 8, 0.2, 0.2, False),
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 0.1, 0.9, None),
        ([0.4], 0.4, 0.4, None),
    ],
)
def test_what_is_called_a_rise(
    rewards: list[float], first: float, last: float, rose: bool | None
) -> None:
    assert rise(rewards) == {
        "first_quarter_reward": pytest.approx(first),
        "last_quarter_reward": pytest.approx(last),
        "reward_rose": rose,
    }
