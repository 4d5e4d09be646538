"""Which rank gets which rollouts, so that those of a prompt are together and ranks run as much."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Rows by rank, as many on each, and the prompts whose rows are on several ranks."""

    ranks: list[list[int]]
    split: list[Hashable]


def place_groups(
    prompts: Sequence[Hashable],
    prompt_tokens: Sequence[int],
    response_tokens: Sequence[int],
    ranks: int,
) -> Placement:
    """Give each rank as many rows, prompts whole as far as that allows.

    The prompts that run most tokens are placed first, each on the rank that has the fewest so far
    among those with room for all of its rows; a prompt's own tokens count once. Rows that are left,
    of prompts that fit on no rank, fill the ranks. On each rank prompts then stand in the order in
    which they came, with their rows back to back, so that lengths do not decide who meets in a
    mini-batch.

    Args:
        prompts: by row, which prompt it has.
        prompt_tokens, response_tokens: by row.
        ranks: how many; the number of rows is a multiple of it.

    Raises ValueError where it is not.
    """
    count = len(prompts)
    if count % ranks:
        raise ValueError(f"{count} rows cannot be placed evenly on {ranks} ranks")
    room = [count // ranks] * ranks
    tokens = [0] * ranks
    placed: list[list[list[int]]] = [[] for _ in range(ranks)]
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)

    def cost(rows: list[int]) -> int:
        return max(prompt_tokens[row] for row in rows) + sum(response_tokens[row] for row in rows)

    def give(rank: int, rows: list[int]) -> None:
        placed[rank].append(rows)
        room[rank] -= len(rows)
        tokens[rank] += cost(rows)

    left: list[tuple[Hashable, list[int]]] = []
    for prompt, rows in sorted(groups.items(), key=lambda group: -cost(group[1])):
        fitting = [rank for rank in range(ranks) if room[rank] >= len(rows)]
        if fitting:
            give(min(fitting, key=lambda rank: (tokens[rank], rank)), rows)
        else:
            left.append((prompt, rows))
    for _, rows in left:
        while rows:
            # The most room first, so that a prompt is on few ranks.
            rank = max(range(ranks), key=lambda rank: (room[rank], -tokens[rank]))
            part, rows = rows[: room[rank]], rows[room[rank] :]
            give(rank, part)
    return Placement(
        [[row for rows in sorted(parts) for row in rows] for parts in placed],
        [prompt for prompt, _ in left],
    )
