"""Random programs' shapes: parents of microbatches in order of their forwards, -1 for none.

KINDS are alike within a kind, as shapes of ranks are that were placed to be balanced. WILD ones
have equal sizes and little else in common. `planned` ones are what the planner makes of generated
rollouts.
"""

import random
from collections.abc import Callable

import numpy as np

from forkpoint import Config, Plan, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.rollouts.synthetic import synthetic_rollouts

Shape = tuple[int, ...]


def flat(rng: random.Random) -> Shape:
    """3 to 6 groups: a prompt, and 3 or 4 microbatches of its responses."""
    parents: list[int] = []
    for _ in range(rng.randint(3, 6)):
        prompt = len(parents)
        parents += [-1] + [prompt] * rng.randint(3, 4)
    return tuple(parents)


def mixed(rng: random.Random) -> Shape:
    """One prompt with 4 to 16 microbatches of whole subtrees, the last of 1 in 20 cut in two."""
    parents = [-1] + [0] * rng.randint(4, 16)
    if rng.random() < 0.05:
        parents.append(len(parents) - 1)
    return tuple(parents)


def deep(rng: random.Random) -> Shape:
    """A dialogue 2 to 4 microbatches deep, each with up to 2 others that fork off."""
    parents: list[int] = []
    above = -1
    for _ in range(rng.randint(2, 4)):
        turn = len(parents)
        parents += [above] + [turn] * rng.randint(0, 2)
        above = turn
    return tuple(parents)


def together(rng: random.Random) -> Shape:
    """One of the above."""
    return rng.choice((flat, mixed, deep))(rng)


KINDS: dict[str, Callable[[random.Random], Shape]] = {
    "flat": flat,
    "mixed": mixed,
    "deep": deep,
    "together": together,
}


def wild_flat(rng: random.Random, count: int) -> Shape:
    """Groups of a prompt and 1 to 8 microbatches, `count` microbatches in all."""
    parents: list[int] = []
    while len(parents) < count:
        prompt = len(parents)
        parents += [-1] + [prompt] * rng.randint(1, 8)
    return tuple(parents[:count])


def wild_mixed(rng: random.Random, count: int) -> Shape:
    """Trees up to 3 deep with 1 to 4 leaves a node, and microbatches alone between them."""
    parents: list[int] = []
    while len(parents) < count:
        above = -1
        for _ in range(rng.choice((0, 0, 0, 1, 2, 3)) or 1):
            node = len(parents)
            parents.append(above)
            if rng.random() < 0.5:
                parents += [node] * rng.randint(1, 4)
            above = node
    return tuple(parents[:count])


def wild_deep(rng: random.Random, count: int) -> Shape:
    """Each microbatch is below the one before it, or up to two levels further up."""
    parents: list[int] = []
    path = [-1]
    for node in range(count):
        del path[rng.randint(max(1, len(path) - 2), len(path)) :]
        parents.append(path[-1])
        path.append(node)
    return tuple(parents)


WILD: dict[str, Callable[[random.Random, int], Shape]] = {
    "flat": wild_flat,
    "mixed": wild_mixed,
    "deep": wild_deep,
}


def plan_of(kind: str, seed: int) -> Plan:
    """A plan of generated rollouts.

    flat: 4 groups of 8 rollouts. deep, mixed: 2 dialogues, each with 8 rollouts that fork at turns.
    """
    if kind == "flat":
        rollouts = synthetic_rollouts(
            groups=4, rollouts_per_group=8, prompt_tokens=400, response_tokens=200, seed=seed
        )
        config = Config(sharing="group", boundary="across", max_microbatch_tokens=768)
    else:
        rollouts = dialogues(seed)
        boundary = "mixed" if kind == "mixed" else "across"
        config = Config(sharing="group", boundary=boundary, max_microbatch_tokens=2048)
    return make_plan(RolloutBatch(rollouts), config=config)


def planned(kind: str, seed: int) -> tuple[Shape, list[float]]:
    """The shape of such a plan, and the tokens of each microbatch."""
    found = plan_of(kind, seed).microbatches
    return tuple(m.parent for m in found), [float(m.tokens) for m in found]


def dialogues(seed: int) -> list[Rollout]:
    """Groups of rollouts of 6 turns of 200 to 600 tokens, each leaving an earlier one at a turn."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for group in range(2):
        found: list[list[np.ndarray]] = []
        for _ in range(8):
            turns = [rng.integers(9000, size=400)]
            if found:
                turns = found[rng.integers(len(found))][: int(rng.integers(1, 6))]
            added = [rng.integers(9000, size=int(rng.integers(200, 600))) for _ in range(6)]
            found.append(turns + added[len(turns) :])
        for turns in found:
            ids = np.concatenate(turns)
            mask = np.arange(len(ids)) >= 400
            rollouts.append(Rollout(ids, mask, 1.0, group_id=str(group)))
    return rollouts
