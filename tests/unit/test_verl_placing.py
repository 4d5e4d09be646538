"""Rollouts that verl's newer trainers place on ranks: whole groups, and as much for each."""

import random

import pytest

from forkpoint.integrations.verl.trainers import place_groups


def placed(sizes: list[int], ranks: int, *, seed: int = 0, shuffled: bool = True):
    """Prompts of those many rows with random lengths, and where they are placed."""
    rng = random.Random(seed)
    rows = [(number, 10 * (number + 1)) for number, size in enumerate(sizes) for _ in range(size)]
    if shuffled:
        rng.shuffle(rows)
    prompts = [prompt for prompt, _ in rows]
    heads = [head for _, head in rows]
    tails = [rng.randint(1, 50) for _ in rows]
    return prompts, heads, tails, place_groups(prompts, heads, tails, ranks)


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 1), (8, 2)])
def test_equal_groups_stay_whole_and_ranks_run_as_much(ranks: int, seed: int) -> None:
    prompts, heads, tails, found = placed([4] * 32, ranks, seed=seed)
    assert sorted(row for rows in found.ranks for row in rows) == list(range(128))
    assert not found.split
    runs = []
    for rows in found.ranks:
        assert len(rows) == 128 // ranks
        here = {prompts[row] for row in rows}
        assert len(here) == 32 // ranks  # all rows of each
        runs.append(sum(heads[prompts.index(p)] for p in here) + sum(tails[row] for row in rows))
    assert max(runs) <= 1.1 * min(runs)


def test_rows_of_a_prompt_stand_together_in_the_order_in_which_prompts_came() -> None:
    prompts, _, _, found = placed([3] * 8, 2)
    for rows in found.ranks:
        here = [prompts[row] for row in rows]
        firsts = list(dict.fromkeys(here))
        assert here == [p for p in firsts for _ in range(3)]
        assert firsts == sorted(firsts, key=prompts.index)


@pytest.mark.parametrize("seed", range(3))
def test_as_few_groups_are_split_as_there_is_room_for(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    sizes = [rng.randint(1, 9) for _ in range(20)]
    sizes.append(-sum(sizes) % ranks or ranks)
    prompts, _, _, found = placed(sizes, ranks, seed=seed)
    assert sorted(row for rows in found.ranks for row in rows) == list(range(len(prompts)))
    assert len({len(rows) for rows in found.ranks}) == 1
    homes = {p: sum(p in {prompts[r] for r in rows} for rows in found.ranks) for p in {*prompts}}
    assert {p for p, n in homes.items() if n > 1} <= set(found.split)
    assert len(found.split) < ranks


def test_one_group_alone_is_cut_into_runs() -> None:
    _, _, _, found = placed([8], 4, shuffled=False)
    assert sorted(found.ranks) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found.split == [0]


def test_rows_that_cannot_be_even_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be placed evenly on 2 ranks"):
        placed([5], 2)
