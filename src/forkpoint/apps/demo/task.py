"""A made-up language with a rule that a program can check. Imports no torch.

The language has five dialects of twelve words each. A word is consonant, vowel, consonant, vowel
with one vowel twice, and all words of a dialect have the same vowel: `bala`, `bele`, `bili`, `bolo`
and `bulu` are one word in five dialects. A prompt is a long text mostly in one dialect, and

    the reward of a response is the share of its words that are of the dialect most frequent in its
    prompt.

All dialects have equal probability. So the mean reward of a policy that ignores the prompt is 1/5,
and a higher reward shows that the policy reads the prompt.
"""

import itertools

import numpy as np

from forkpoint.tree.forest import IntArray

VOWELS = "aeiou"
CONSONANTS = ("bl", "dr", "fn", "gm", "kt", "ld", "ms", "nk", "pr", "rv", "sb", "tl")
WORDS = tuple(f"{c[0]}{v}{c[1]}{v}" for v, c in itertools.product(VOWELS, CONSONANTS))
"""The vocabulary: token id n is the word WORDS[n]. Each dialect has twelve consecutive words."""
BLIND_REWARD = 1 / len(VOWELS)
"""Mean reward of a policy whose responses do not depend on the prompt."""
OWN_WORDS = 0.5
"""Part of a prompt's words that are drawn from its dialect. Other words are drawn from all
dialects."""


def make_prompt(tokens: int, random: np.random.Generator) -> IntArray:
    """Draw a dialect and a prompt in it: token ids [tokens]."""
    own = int(random.integers(len(VOWELS))) * len(CONSONANTS)
    return np.where(
        random.random(tokens) < OWN_WORDS,
        own + random.integers(len(CONSONANTS), size=tokens),
        random.integers(len(WORDS), size=tokens),
    )


def dialect_of(token_ids: IntArray) -> int:
    """The dialect with the most words in a text, the first one if several have equally many."""
    return int(np.bincount(token_ids // len(CONSONANTS), minlength=len(VOWELS)).argmax())


def reward(prompt: IntArray, response: IntArray) -> float:
    """Reward of a response: the part of its words in the prompt's dialect, from 0 to 1."""
    return float((response // len(CONSONANTS) == dialect_of(prompt)).mean())


def spell(token_ids: IntArray) -> str:
    """Words of token ids."""
    return " ".join(WORDS[token] for token in token_ids)
