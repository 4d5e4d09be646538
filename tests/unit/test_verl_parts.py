"""Parts of the integration for verl that need no verl: options, groups, and placing of rollouts."""

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.integrations.verl.groups import RankPart, sharing_message
from forkpoint.integrations.verl.settings import CONFIG_KEYS, VARIABLE, Settings, load_settings
from forkpoint.integrations.verl.trainers import place_groups
from forkpoint.plan import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch

ROOT = Path(__file__).parents[2]


def loaded(folder: Path, text: str) -> Settings:
    path = folder / "forkpoint.toml"
    path.write_text(text)
    return load_settings({VARIABLE: str(path)})


def test_without_a_file_there_are_the_defaults(tmp_path: Path) -> None:
    assert load_settings({}) == load_settings({VARIABLE: ""}) == Settings()
    assert loaded(tmp_path, "") == Settings()


def test_options_are_those_of_the_file(tmp_path: Path) -> None:
    text = """
decomposition = "joint"
[config]
sharing = "tree"
max_microbatch_tokens = 4096
memory_budget = "none"
"""
    config = Config(sharing="tree", max_microbatch_tokens=4096, memory_budget=None)
    assert loaded(tmp_path, text) == Settings(config=config, decomposition="joint")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharing = 'tree'", "sharing is not known; allowed are config, decomposition."),
        ("[config]\nshare = 'tree'", "config.share is not known; allowed are sharing, boundary"),
        ("config = 3", "config is 3; it takes a table, [config]."),
        ("[config]\nsharing = 'all'", "table [config]: sharing is 'all'; allowed are 'auto'"),
        ("decomposition = 'rows'", "decomposition is 'rows'; allowed are 'auto', 'joint'."),
        ("a = ", "names, is not valid TOML"),
    ],
)
def test_what_is_not_allowed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, text)
    assert message in str(found.value)
    assert "forkpoint.toml" in str(found.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({VARIABLE: str(tmp_path / "none.toml")})


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "start" / "verl.md").read_text(encoding="utf-8")
    for name in [*(f.name for f in fields(Settings)), *CONFIG_KEYS]:
        assert f"`{name}`" in page, name


# Prompts whose rollouts do not come together ------------------------------------------------------


def part(*numbers: int, prompt: int = 40) -> RankPart:
    """A rank that has one rollout of each of these prompts' numbers."""
    rollouts = [
        Rollout([n + 1] * prompt + [100 + row] * 3, [0] * prompt + [1] * 3, 1.0)
        for row, n in enumerate(numbers)
    ]
    batch = RolloutBatch(rollouts)
    return RankPart.of(batch, make_plan(batch, config=Config(sharing="tree")))


def test_groups_together_say_nothing() -> None:
    # The second rank alone shares nothing.
    assert sharing_message([part(0, 0, 0, 1, 1, 1), part(2)]) is None


def test_groups_on_several_ranks_name_the_setting() -> None:
    parts = [part(0, 1, 1), part(1, 2, 3)]
    message = sharing_message(parts)
    assert message is not None and "1 of 4 prompts" in message
    assert "actor_rollout_ref.actor.use_prefix_grouper=true" in message


def test_prompts_that_are_exchanged_say_nothing() -> None:
    assert sharing_message([replace(part(0, 0, 1, 1), exchanged=True) for _ in range(2)]) is None


def test_short_prompts_are_told() -> None:
    message = sharing_message([part(0, 0, prompt=1)])
    # The last tokens of both do not count: 3 tokens of each, and nothing of 1 token is shared.
    assert message is not None and "of its 6 tokens run" in message


# Whole groups on ranks ----------------------------------------------------------------------------


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
