"""Placing rollouts on ranks: partitions, determinism, costs, and when groups are split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forkpoint
from cpu_time import relative_to_additions
from forkpoint import ConfigError, PlanError, Rollout, RolloutBatch, losses
from forkpoint.parallel.placement.items import Priced, by_tokens, greedy, in_order
from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.parallel.placement.place import place_paths
from forkpoint.parallel.placement.slots import Cutter, lockstep_cost
from forkpoint.plan import MODELS, ModelShape
from forkpoint.plan.pricing.calibration import Curve
from forkpoint.tree.forest import IntArray, build_forest
from made_calibrations import SHAPE as CALIBRATED
from made_calibrations import made_up
from strategies import batches

SHAPE = ModelShape.from_config(MODELS["qwen3-0.6b"])
TOKEN = Rates.of(None)


def rollout(ids: list[int], group: int = 0, prompt: int = 1) -> Rollout:
    return Rollout(ids, [int(i >= prompt) for i in range(len(ids))], 1.0, group_id=group)


def group(number: int, prompt: int, responses: list[int]) -> list[Rollout]:
    """Rollouts with a prompt of their own, none of whose responses begin alike."""
    shared = [10_000 + number] * prompt
    return [
        rollout([*shared, *[20_000 + i] * length], number, prompt)
        for i, length in enumerate(responses)
    ]


class Zero(losses.Loss):
    """Declares all rollouts to be zero."""

    decomposition = "joint"

    def zero_rollouts(self, batch: RolloutBatch) -> np.ndarray:
        return np.ones(len(batch), bool)


class ZeroOverRanks(Zero):
    """On other ranks some may not be."""

    across_ranks = True


def test_rollouts_that_a_loss_declares_to_be_zero_cost_nothing() -> None:
    batch = group(0, 3, [5, 5]) + group(1, 3, [5, 5])
    every = forkpoint.place(batch, ranks=2, model=None)
    assert len(every[0]) == 2
    assert forkpoint.place(batch, ranks=2, model=None, loss=Zero()) == [[0, 1, 2, 3], []]
    assert forkpoint.place(batch, ranks=2, model=None, loss=ZeroOverRanks()) == every


def cost_of(priced: Priced, rollouts: list[int], batch: RolloutBatch) -> int:
    """Tokens to run of some rollouts, counted from their tokens alone."""
    paths = {tuple(batch[i].token_ids[:end].tolist()) for i in rollouts for end in range(2, 99)}
    return sum(len(path) > 1 for path in paths)


@given(
    batch=batches(max_rollouts=14, max_tokens=9),
    ranks=st.integers(1, 6),
    whole=st.booleans(),
    tokens=st.sampled_from([4, 99]),
)
@settings(max_examples=12, deadline=None)
def test_each_rollout_is_on_one_rank(
    batch: RolloutBatch, ranks: int, whole: bool, tokens: int
) -> None:
    arguments = {"ranks": ranks, "model": None, "whole_groups": whole}
    found = forkpoint.place(batch, **arguments, max_microbatch_tokens=tokens)
    assert len(found) == ranks
    assert sorted(i for own in found for i in own) == list(range(len(batch)))
    assert all(own == sorted(own) for own in found)
    again = RolloutBatch(list(batch))
    assert forkpoint.place(again, **arguments, max_microbatch_tokens=tokens) == found
    if whole:
        for own in batch.groups():
            assert sum(bool(set(own.tolist()) & set(rank)) for rank in found) == 1


@given(batch=batches(max_rollouts=14, max_tokens=9), ranks=st.integers(2, 5), whole=st.booleans())
@settings(max_examples=20, deadline=None)
def test_no_worse_than_knowing_less(batch: RolloutBatch, ranks: int, whole: bool) -> None:
    paths = Paths.of_batch(batch)
    priced = Priced.of(paths, paths.forest(), TOKEN)
    rank = place_paths(paths, paths.forest(), TOKEN, ranks, whole_groups=whole)
    naive = [
        in_order(batch.group_index, ranks, whole_groups=whole),
        by_tokens(batch.group_index, batch.lengths, ranks),
    ]
    capacity = 16_384
    costs = [lockstep_cost(priced, other, ranks, capacity) for other in naive]
    assert lockstep_cost(priced, rank, ranks, capacity) <= min(costs)


@given(batch=batches(max_rollouts=14, max_tokens=9), ranks=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_costs_count_each_shared_token_once(batch: RolloutBatch, ranks: int) -> None:
    paths = Paths.of_batch(batch)
    priced = Priced.of(paths, paths.forest(), TOKEN)
    unit = priced.rates.unit_cost
    placed = greedy(priced.items(batch.group_index), ranks)
    rank = placed.rank[placed.items.item]
    expected = [
        cost_of(priced, np.flatnonzero(rank == number).tolist(), batch) for number in range(ranks)
    ]
    found = placed.load * unit
    assert np.allclose(found, expected, rtol=0, atol=1e-6)
    assert np.allclose(priced.items(rank, ranks).whole * unit, expected, rtol=0, atol=1e-6)


@given(
    batch=batches(max_rollouts=14, max_tokens=9),
    ranks=st.integers(1, 4),
    capacity=st.integers(1, 12),
)
@settings(max_examples=25, deadline=None)
def test_pieces_are_those_of_the_ranks_own_forest(
    batch: RolloutBatch, ranks: int, capacity: int
) -> None:
    paths = Paths.of_batch(batch)
    priced = Priced.of(paths, paths.forest(), TOKEN)
    items = priced.items(batch.group_index)
    of_item = np.arange(len(items)) % ranks
    rank = of_item[items.item]
    every = np.arange(ranks)
    pieces = Cutter(priced, priced.items(rank, ranks), capacity).pieces(every, every)
    single = Cutter(priced, items, capacity).pieces(of_item, np.arange(len(items)))
    for number in range(ranks):
        order = paths.order.take(np.flatnonzero(rank[paths.order.rollouts] == number))
        forest = build_forest(order, len(batch))
        size = forest.subtree_edges()
        # Segments of the whole forest are never longer than those of a part of it, so that what
        # fits of a part's segment in one piece can be pieces of several.
        fits = size <= capacity
        tops = fits & ~((forest.parent >= 0) & fits[forest.parent])
        expected = sorted(size[tops].tolist())
        found = sorted(pieces.tokens[pieces.row == number].tolist())
        assert sorted(single.tokens[single.row == number].tolist()) == found
        assert sum(found) >= sum(expected)


def test_a_group_is_split_only_where_that_is_cheaper() -> None:
    others = [r for number in (1, 2, 3) for r in group(number, 10, [100, 100])]
    # Running its prompt twice costs 20 tokens, and balances 800.
    cheap = [*group(0, 20, [200] * 4), *others]
    found = forkpoint.place(cheap, ranks=4, model=None)
    assert sum(any(i < 4 for i in own) for own in found) > 1
    whole = forkpoint.place(cheap, ranks=4, model=None, whole_groups=True)
    assert sum(any(i < 4 for i in own) for own in whole) == 1
    # Running a prompt of 3,000 tokens twice costs more than it balances.
    dear = [*group(0, 3_000, [20] * 4), *others]
    found = forkpoint.place(dear, ranks=4, model=None)
    assert sum(any(i < 4 for i in own) for own in found) == 1


def test_groups_that_a_loss_couples_stay_whole() -> None:
    """Pairs of rollouts with long responses and few tokens in common, which other losses split."""
    pairs = [
        Rollout([1, *[10 * n + m] * 40], [0, *[1] * 40], advantage=m - 0.5, group_id=f"pair {n}")
        for n in range(2)
        for m in range(2)
    ]
    arguments = {"ranks": 4, "model": None}
    for loss in (losses.DPO(beta=0.1), losses.SimPO(beta=2.0, gamma=0.5)):
        found = forkpoint.place(pairs, loss=loss, **arguments)
        assert sorted(found) == [[], [], [0, 1], [2, 3]]
    assert [] not in forkpoint.place(pairs, loss=losses.GRPO(), **arguments)


def test_the_price_of_what_parts_share() -> None:
    batch = RolloutBatch(group(0, 600, [200] * 4))
    paths = Paths.of_batch(batch)
    priced = Priced.of(paths, paths.forest(), TOKEN)
    half = priced.total // 2
    assert priced.split(half).max() == 3, "1,400 less 700 is above the 599 tokens of the prompt"
    assert priced.split(priced.total * 3 // 4).max() == 0


def test_rollouts_of_one_token_and_more_ranks_than_rollouts() -> None:
    rollouts = [Rollout([5], [0], 0.0), Rollout([5], [0], 0.0), rollout([5, 6, 7])]
    found = forkpoint.place(rollouts, ranks=5, model=SHAPE)
    assert sorted(i for own in found for i in own) == [0, 1, 2]
    assert forkpoint.place(rollouts[:2], ranks=2, model=None) == [[0, 1], []]
    assert forkpoint.place(rollouts, ranks=1, model=None) == [[0, 1, 2]]


def test_costs_are_flops_with_a_model() -> None:
    """Attention makes one long rollout cost more than as many tokens in short ones."""
    lengths = np.asarray([40_000, 20_000])
    cost = Rates.of(SHAPE).cost(lengths, np.zeros(2, np.int64))
    assert cost[0] > 2.5 * cost[1]
    flops = SHAPE.linear_parameters * 6 * 40_000
    pairs = 40_000 * 40_001 // 2
    flops += 3.5 * 2 * SHAPE.heads * 2 * SHAPE.head_dim * SHAPE.layers * pairs
    assert cost[0] == pytest.approx(flops, rel=1e-12)


@pytest.fixture(scope="module")
def ten_thousand() -> Paths:
    draw = np.random.default_rng(0)
    # As agents' rollouts: some are ten times as long as others, and all have a beginning in common.
    lengths = np.rint(np.exp(draw.uniform(np.log(40), np.log(600), size=10_000))).astype(int)
    groups = np.arange(10_000) // 4
    prompts = [[7] * 80 + draw.integers(2, 1_000, size=60).tolist() for _ in range(2_500)]
    batch = RolloutBatch(
        rollout([*prompts[g], *draw.integers(2, 1_000, size=length).tolist()], int(g), 140)
        for g, length in zip(groups, lengths, strict=True)
    )
    return Paths.of_batch(batch)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 2_000], ids=["one microbatch", "several"])
def test_ten_thousand_rollouts_on_512_ranks(ten_thousand: Paths, tokens: int | None) -> None:
    """Within the time of 40 million additions once the forest is built: 1 to 2.5 s by machine."""
    paths = ten_thousand
    forest, rates = paths.forest(), Rates.of(SHAPE)
    placed: list[IntArray] = []

    def place() -> None:
        placed.append(place_paths(paths, forest, rates, 512, max_microbatch_tokens=tokens))

    assert relative_to_additions(place) < 4
    rank = placed[0]
    priced = Priced.of(paths, forest, rates)
    load = priced.items(rank, 512).whole
    assert load.max() < 1.05 * load.mean()


def test_a_calibration_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    made_up().save(path)
    with pytest.raises(PlanError, match="name the model"):
        forkpoint.place([rollout([1, 2])], ranks=2, model=None, calibration=path)
    with pytest.raises(ConfigError, match="measured for another model"):
        forkpoint.place([rollout([1, 2])], ranks=2, model=SHAPE, calibration=path)
    rates = Rates.of(CALIBRATED, made_up())
    # Blocks take 1 us a token forward and 2 backward in each of 4 layers, and nothing else does.
    assert rates.token == pytest.approx(4 * 3e-3, rel=1e-3)
    milliseconds = rates.cost(np.asarray([1_000_000]), np.asarray([0]))
    assert milliseconds[0] == pytest.approx(12_000, rel=1e-2)
    # Attention to a window is as fast as that of segments of its length.
    windowed = replace(CALIBRATED, windows=(0, 8, 8, 0))
    causal = Curve((8.0, 8192.0), (1.0, 4.0), (2.0, 8.0))
    pairs = Rates.of(windowed, made_up(causal=causal)).pair
    assert pairs == {0: 2 * (1 / 4 + 1 / 8), 8: 2 * (1 + 1 / 2)}
    rollouts = [r for number in range(6) for r in group(number, 5 + number, [9, 30])]
    # A configuration has no dtype; the calibration has.
    config = MODELS["qwen3-0.6b"]
    made_up(shape=ModelShape.from_config(config, dtype_bytes=4)).save(tmp_path / "float32.json")
    for model, file in ((CALIBRATED, path), (config, tmp_path / "float32.json")):
        found = forkpoint.place(rollouts, ranks=3, model=model, calibration=file)
        assert sorted(i for own in found for i in own) == list(range(12))


def test_costs_beyond_64_bits_are_balanced() -> None:
    large = ModelShape(
        layers=80, hidden=1 << 24, heads=64, kv_heads=8, head_dim=1 << 14, value_dim=1 << 14,
        intermediate=1 << 28, vocab=1000,
    )  # fmt: skip
    lengths = (25, 21, 32, 76, 65, 83)
    rollouts = [rollout([*range(n, n + length)]) for n, length in enumerate(lengths)]
    assert Rates.of(large).rounded_cost(np.array([83]), np.array([82])) > 2.0**63
    assert forkpoint.place(rollouts, ranks=2, model=large) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("tokens", [0, 4.5, True, "4096", float("nan"), 2**70])
def test_limits_that_a_config_refuses(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="max_microbatch_tokens is "):
        forkpoint.place([rollout([1, 2])], ranks=2, model=None, max_microbatch_tokens=tokens)
