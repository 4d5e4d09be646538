"""Generated groups of rollouts, for demonstrations and self-tests. Imports no torch."""

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import Rollout

MOST_NOISE = 0.6
"""Largest share of the tokens of a response that are random instead of copied."""


def synthetic_rollouts(
    *,
    groups: int,
    rollouts_per_group: int,
    prompt_tokens: int,
    response_tokens: int,
    system_tokens: int = 0,
    vocab_size: int = 8192,
    seed: int = 0,
) -> list[Rollout]:
    """Make rollouts of an invented task: quote a passage of the prompt.

    Equal arguments give equal rollouts. A prompt has `prompt_tokens`, and all groups share the
    first `system_tokens`. A response has half to one and a half times `response_tokens`. It copies
    a passage of the prompt, with random tokens in between. Its reward is the share of copied
    tokens, and its advantage is the reward normalised within the group. There are no old
    log-probs, because training is on-policy.

    Raises ConfigError for a count below 1, and for more system tokens than prompt tokens.
    """
    counts = (groups, rollouts_per_group, prompt_tokens, response_tokens, vocab_size)
    if min(counts) < 1 or not 0 <= system_tokens <= prompt_tokens:
        raise ConfigError(
            f"The counts of groups, rollouts_per_group, prompt_tokens, response_tokens and "
            f"vocab_size are {counts}, and system_tokens is {system_tokens}; counts are at least 1 "
            "and system_tokens from 0 to prompt_tokens."
        )
    random = np.random.default_rng(seed)
    system = random.integers(vocab_size, size=system_tokens)
    rollouts: list[Rollout] = []
    for group in range(groups):
        rest = random.integers(vocab_size, size=prompt_tokens - system_tokens)
        prompt = np.concatenate([system, rest])
        responses, rewards = [], []
        for _ in range(rollouts_per_group):
            length = int(
                random.integers(max(1, response_tokens // 2), response_tokens * 3 // 2 + 1)
            )
            begin = int(random.integers(prompt_tokens))
            copied = prompt[(begin + np.arange(length)) % prompt_tokens]
            noise = random.random(length) < random.uniform(0, MOST_NOISE)
            responses.append(np.where(noise, random.integers(vocab_size, size=length), copied))
            rewards.append(float(1 - noise.mean()))
        advantages = normalised(np.array(rewards))
        for n, response in enumerate(responses):
            rollouts.append(
                Rollout(
                    token_ids=np.concatenate([prompt, response]),
                    loss_mask=np.repeat([0, 1], [prompt_tokens, len(response)]),
                    advantage=float(advantages[n]),
                    group_id=f"g{group}",
                    rollout_id=f"g{group}-r{n}",
                    extras={"reward": rewards[n]},
                )
            )
    return rollouts


def normalised(rewards: np.ndarray) -> np.ndarray:
    """Advantages of one group: [n] rewards minus their mean, divided by their standard deviation;
    0 for equal rewards."""
    if (rewards == rewards[0]).all():  # whose mean may differ from them by rounding
        return np.zeros(len(rewards))
    spread = rewards.std()
    return (rewards - rewards.mean()) / (spread if spread > 0 else 1.0)
