"""A made-up language with a rule that a program can check. Imports no torch.

The language has five dialects of twelve words each. A word is consonant, vowel, consonant, vowel
with one vowel twice, and all words of a dialect have the same vowel: `bala`, `bele`, `bili`, `bolo`
and `bulu` are one word in five dialects. A prompt is a long text mostly in one dialect, and

    the reward of a response is the share of its words that are of the dialect most frequent in its
    prompt.

Every dialect is as likely as another. So a policy that does not read the prompt is rewarded with
1/5 on average, whatever it says, and what is above shows that the prompt is read.
"""

import itertools

import numpy as np

from forkpoint.tree.forest import IntArray

VOWELS = "aeiou"
CONSONANTS = ("bl", "dr", "fn", "gm", "kt", "ld", "ms", "nk", "pr", "rv", "sb", "tl")
WORDS = tuple(f"{c[0]}{v}{c[1]}{v}" for v, c in itertools.product(VOWELS, CONSONANTS))
"""The vocabulary: token id n is the word WORDS[n]; dialect d has twelve in a row."""
BLIND_REWARD = 1 / len(VOWELS)
"""The mean reward of any policy whose responses do not depend on the prompt."""
OWN_WORDS = 0.5
"""The share of a prompt's words that are drawn from its dialect; the others are any words."""


def make_prompt(tokens: int, random: np.random.Generator) -> IntArray:
    """[tokens] token ids of a new prompt, whose dialect is drawn first."""
    own = int(random.integers(len(VOWELS))) * len(CONSONANTS)
    return np.where(
        random.random(tokens) < OWN_WORDS,
        own + random.integers(len(CONSONANTS), size=tokens),
        random.integers(len(WORDS), size=tokens),
    )


def dialect_of(token_ids: IntArray) -> int:
    """The dialect with the most words in a text, the first of them where several have."""
    return int(np.bincount(token_ids // len(CONSONANTS), minlength=len(VOWELS)).argmax())


def reward(prompt: IntArray, response: IntArray) -> float:
    """The rule: the share of the response's words that are of the prompt's dialect, 0 to 1."""
    return float((response // len(CONSONANTS) == dialect_of(prompt)).mean())


def spell(token_ids: IntArray) -> str:
    """The words of a text."""
    return " ".join(WORDS[token] for token in token_ids)
