"""Random forests of rollouts: groups, trees, prefixes, twins, single tokens, masks with holes."""

from dataclasses import dataclass, replace

import numpy as np
from fuzz_models import LONGEST, VOCABULARY, between, chance, one_of
from numpy.random import Generator

from forkpoint import Rollout, RolloutBatch

MOST_ROLLOUTS = 20
MOST_TOKENS = 320
TRAINED = (0.1, 0.5, 0.9, 1.0)


@dataclass
class Path:
    """A rollout while it is drawn."""

    tokens: list[int]
    prompt: int
    """Tokens of its prompt, at least one."""
    group: int


def draw_batch(random: Generator, *, pairs: bool = False, weighted: bool = True) -> RolloutBatch:
    """1 to 20 rollouts of together at most 320 tokens, the log-probs left out.

    pairs: whether the rollouts are to be pairs with a preference, a group each.
    weighted: whether they may have weights.
    """
    paths = _draw_paths(random)
    if pairs:
        paths = _as_pairs(paths)
    elif chance(random, 0.5):
        random.shuffle(paths)  # type: ignore[arg-type]
    temperatures = one_of(random, ((1.0,), (1.0,), (0.7,), (1.0, 0.7, 1.4)))
    grouped = pairs or chance(random, 0.8)
    mixed = grouped and not pairs and chance(random, 0.2)
    weights = one_of(random, ("none", "none", "token", "rollout")) if weighted else "none"
    rollouts = []
    for position, path in enumerate(paths):
        length = len(path.tokens)
        mask = _draw_mask(random, path, must_train=pairs)
        advantage: float | np.ndarray = float(random.normal())
        if pairs:  # of each pair one is preferred, whichever
            advantage = float((position % 2) ^ (path.group % 2))
        elif chance(random, 0.4):
            advantage = random.normal(size=length)
        weight: float | np.ndarray | None = None
        if weights != "none":
            weight = random.uniform(0, 2, length)
            weight = float(weight[0]) if weights == "rollout" else weight
        group = between(random, 0, 2) if mixed else path.group
        rollouts.append(
            Rollout(
                path.tokens,
                mask,
                advantage,
                weights=weight,
                temperature=one_of(random, temperatures),
                group_id=group if grouped else None,
            )
        )
    return RolloutBatch(rollouts)


def with_zeros(batch: RolloutBatch, random: Generator) -> RolloutBatch:
    """The batch with advantages or weights of 0: of whole groups, of rollouts, or of tokens."""
    name = "weights" if batch.weights is not None and chance(random, 0.3) else "advantage"
    kind = one_of(random, ("group", "group", "rollout", "token"))
    groups = random.random(len(batch)) < 0.5
    rollouts = []
    for rollout, group in zip(batch, batch.group_index.tolist(), strict=True):
        values = np.broadcast_to(getattr(rollout, name), len(rollout)).astype(float)
        which = random.random(len(rollout)) < 0.7
        if kind != "token":
            which[:] = groups[group] if kind == "group" else chance(random, 0.5)
        rollouts.append(replace(rollout, **{name: np.where(which, 0.0, values)}))
    return RolloutBatch(rollouts)


def with_logprobs(
    batch: RolloutBatch, own_T: np.ndarray, random: Generator, old: str, reference: str
) -> RolloutBatch:
    """The batch with old and reference log-probs, each "none", "near" a model's own, or "far"."""

    def drawn(kind: str) -> np.ndarray | None:
        if kind == "none":
            return None
        if kind == "near":
            return np.minimum(own_T + 0.2 * random.normal(size=own_T.shape), 0)
        return -4 * random.random(own_T.shape)

    olds, references = drawn(old), drawn(reference)
    return RolloutBatch(
        replace(
            r,
            old_logprobs=None if olds is None else olds[begin:end],
            reference_logprobs=None if references is None else references[begin:end],
        )
        for r, begin, end in zip(batch, batch.offsets, batch.offsets[1:], strict=False)
    )


def _draw_paths(random: Generator) -> list[Path]:
    """One to three parts, each a group, a tree, a thicket or strangers, within the limits."""
    vocabulary = one_of(random, (2, 3, VOCABULARY, VOCABULARY))
    paths: list[Path] = []
    for group in range(between(random, 1, 3)):
        part = one_of(random, (_group, _group, _tree, _tree, _thicket, _strangers))
        paths.extend(part(random, vocabulary, group))
    kept: list[Path] = []
    room = MOST_TOKENS
    for path in paths[:MOST_ROLLOUTS]:
        path.tokens = path.tokens[: min(LONGEST, room)]
        room -= len(path.tokens)
        if path.tokens:
            kept.append(path)
    return kept


def _piece(random: Generator, vocabulary: int, most: int) -> list[int]:
    """1 to `most` tokens, one of them or few more often than many."""
    most = one_of(random, (1, 3, most, most))
    return random.integers(0, vocabulary, between(random, 1, most)).tolist()


def _group(random: Generator, vocabulary: int, group: int) -> list[Path]:
    """A prompt of 1 to 40 tokens and 1 to 9 responses, some of them cut short or given twice."""
    prompt = _piece(random, vocabulary, 40)
    paths: list[Path] = []
    for _ in range(between(random, 1, 9)):
        tokens = prompt + _piece(random, vocabulary, 20)
        if paths and chance(random, 0.2):
            tokens = one_of(random, paths).tokens
            tokens = tokens[: between(random, 1, len(tokens))] if chance(random, 0.5) else tokens
        paths.append(Path(list(tokens), len(prompt), group))
    return paths


def _tree(random: Generator, vocabulary: int, group: int) -> list[Path]:
    """Leaves of a random tree up to five pieces deep; inner nodes may end a rollout too."""
    root = _piece(random, vocabulary, 16)
    paths: list[Path] = []
    todo = [(root, 0)]
    while todo:
        tokens, depth = todo.pop()
        branches = between(random, 1, 3) if depth == 0 else between(random, 0, 3)
        if depth == 4 or branches == 0 or chance(random, 0.15):
            paths.append(Path(list(tokens), len(root), group))
        if depth < 4 and len(todo) + len(paths) < 10:
            below = [(tokens + _piece(random, vocabulary, 10), depth + 1) for _ in range(branches)]
            todo.extend(below)
        elif depth < 4 and branches:
            paths.append(Path(list(tokens), len(root), group))
    return paths


def _thicket(random: Generator, vocabulary: int, group: int) -> list[Path]:
    """Each rollout grows out of an earlier one: forked off it, longer, shorter or the same."""
    lists = [_piece(random, vocabulary, 30)]
    for _ in range(between(random, 0, 9)):
        tokens = one_of(random, lists)
        kind = one_of(random, ("fork", "fork", "longer", "shorter", "same"))
        if kind in ("fork", "shorter"):
            tokens = tokens[: between(random, 1, len(tokens))]
        if kind in ("fork", "longer"):
            tokens = tokens + _piece(random, vocabulary, 12)
        lists.append(tokens)
    return [Path(list(tokens), between(random, 1, len(tokens)), group) for tokens in lists]


def _strangers(random: Generator, vocabulary: int, group: int) -> list[Path]:
    """Rollouts that share nothing but by chance, single tokens among them."""
    lists = [_piece(random, vocabulary, 25) for _ in range(between(random, 1, 4))]
    return [Path(tokens, between(random, 1, len(tokens)), group) for tokens in lists]


def _as_pairs(paths: list[Path]) -> list[Path]:
    """Neighbours become pairs, a group each; rollouts in which nothing can be trained are left."""
    paths = [path for path in paths if len(path.tokens) > 1]
    paths = paths[: len(paths) // 2 * 2]
    if not paths:
        paths = [Path([0, 1, 2], 2, 0), Path([0, 1, 1, 2], 2, 0)]
    return [Path(path.tokens, path.prompt, pair // 2) for pair, path in enumerate(paths)]


def _draw_mask(random: Generator, path: Path, *, must_train: bool) -> np.ndarray:
    """Responses are trained, most of them whole; some prompts are too, some rollouts not at all."""
    length = len(path.tokens)
    mask = np.arange(length) >= path.prompt
    kind = one_of(random, ("whole", "whole", "whole", "holes", "holes", "anywhere", "none"))
    if kind == "holes":
        mask &= random.random(length) < one_of(random, TRAINED)
    elif kind == "anywhere":
        mask = random.random(length) < one_of(random, TRAINED)
    elif kind == "none" and not must_train:
        mask[:] = False
    mask[0] = False
    if must_train and not mask.any():
        mask[between(random, 1, length - 1)] = True
    return mask
