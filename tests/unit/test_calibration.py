"""Plans priced by made-up calibrations: what is chosen is what the numbers say. Needs no torch."""

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, ConfigError, Plan, PlanError, Rollout, RolloutBatch
from forkpoint.config import AUTO
from forkpoint.plan import make_plan, planner
from forkpoint.plan.builder import Builder
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.predict import cache_bytes, drop_activations, microbatches_to_drop, peak_bytes
from forkpoint.plan.pricing import meters
from forkpoint.plan.pricing.calibration import (
    FOLDER_VARIABLE,
    Calibration,
    Curve,
    calibration_path,
    find_calibration,
)
from forkpoint.plan.pricing.meters import CountedMeter, MeasuredMeter, Meter, meter_of
from forkpoint.tree import full_table
from made_calibrations import SHAPE, flat, group, line, made_up
from strategies import batches


def test_milliseconds_of_one_row_by_hand() -> None:
    measured = made_up(
        rest=flat(5.0), head=line(1e-2), causal=Curve((1.0, 2.0), (1e4, 1e4), (4e3, 4e3))
    )
    batch = group(51, 50, 1)
    plan = make_plan(batch, SHAPE, Config(sharing="none"), calibration=measured)
    forward = 4 * 100 * 1e-3 + 4 * 5050 / 1e4 + 5 + 50 * 1e-2
    backward = 4 * 100 * 2e-3 + 4 * 5050 / 4e3 + 5 + 50 * 2e-2
    assert plan.predicted_ms == pytest.approx(forward + backward)
    assert (plan.cost, plan.cost_unit) == (plan.predicted_ms, "ms")
    assert plan.predicted_peak_bytes == 100 * 4 * 100
    curve = Curve((2.0, 8.0), (1.0, 3.0), (4.0, 6.0))
    assert [curve.rate(size, backward=True) for size in (1, 4, 9)] == [4, 5, 6]
    meter = meter_of(plan, made_up(out_bytes_per_ms=10.0, back_bytes_per_ms=20.0))
    assert (meter.copy(40, out=True), meter.copy(40, out=False)) == (4, 2)


def test_wide_launches_and_blocks_that_read_a_cache_have_prices_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meters, "WIDE_PAIRS", 8 * 50 * 50)
    issued = {"host_block_ms": (1.0, 2.0), "host_launch_ms": (2.0, 3.0)}
    measured = made_up(rectangle=flat(1e4), wide=(4e4, 1e4), **issued)
    for count, rates in ((7, (1e4, 1e4)), (8, (4e4, 1e4))):
        config = Config(sharing="group", boundary="across")
        plan = make_plan(group(51, 50, count), SHAPE, config, calibration=measured)
        meter = meter_of(plan, measured)
        assert isinstance(meter, MeasuredMeter)
        prompt, leaf = plan.microbatches
        for way, rate in enumerate(rates):
            pairs = count * 50 * prompt.tokens
            assert meter._attention_ms(leaf, backward=bool(way)) == pytest.approx(4 * pairs / rate)
            assert meter.host(prompt, backward=bool(way)) == 4 * issued["host_block_ms"][way]
            # It reads the cache by one further launch.
            each = issued["host_block_ms"][way] + issued["host_launch_ms"][way]
            assert meter.host(leaf, backward=bool(way)) == 4 * each
        unknown = meter_of(plan, made_up(host_block_ms=(1.0, 2.0)))
        assert unknown.host(leaf, backward=True) == 4 * 2.0


@pytest.mark.parametrize("more", [None, (0.5, 1.0)])
def test_each_further_launch_takes_time_of_the_host(more: tuple[float, float] | None) -> None:
    issued = {"host_block_ms": (1.0, 2.0), "host_rest_ms": (7.0, 8.0), "host_later_launch_ms": more}
    measured = made_up(host_launch_ms=(2.0, 3.0), **issued)
    # Prompt, first turn and second turn: the last two read what is above them by a launch a level.
    rows = [[1] * 20 + [2 + i] * 20 + [5 + i + 2 * j] * 20 for i in (0, 1) for j in (0, 1)]
    mask = np.arange(60) >= 20
    batch = RolloutBatch([Rollout(row, mask, 1.0, group_id="g") for row in rows])
    config = Config(sharing="group", boundary="within")
    plan = make_plan(batch, SHAPE, config, calibration=measured)
    (microbatch,) = plan.microbatches
    launches = len(full_table(plan.forest, microbatch, plan.cache_of).launches)
    assert launches >= 3
    each = more or (2.0, 3.0)  # without a measurement as long as the first
    forward, backward = (
        first + (launches - 2) * later for first, later in zip((2.0, 3.0), each, strict=True)
    )
    meter = meter_of(plan, measured)
    assert meter.host(microbatch, backward=False) == 4 * (1 + forward) + 7
    assert meter.host(microbatch, backward=True) == 4 * (2 + backward) + 8
    windowed = replace(SHAPE, windows=(0, 8, 0, 8))
    measured = replace(measured, shape=windowed)
    plan = make_plan(batch, windowed, config, calibration=measured)
    # Layers with a window gather keys for one launch.
    host = meter_of(plan, measured).host(plan.microbatches[0], backward=False)
    assert host == 4 * 1 + 2 * forward + 7


def test_the_host_prepares_a_step_and_writes_and_reads_prefix_caches() -> None:
    issued = {"host_block_ms": (10.0, 20.0), "host_rest_ms": (7.0, 8.0)}
    batch, config = group(51, 50, 1), Config(sharing="none")
    free = make_plan(batch, SHAPE, config, calibration=made_up(**issued))
    measured = made_up(**issued, host_step_ms=(5.0, 0.5))
    plan = make_plan(batch, SHAPE, config, calibration=measured)
    assert free.predicted_ms == 4 * 30 + 15
    assert plan.predicted_ms == free.predicted_ms + 5 + 4 * 0.5
    by_token = replace(measured, host_token_ms=0.25)
    found = make_plan(batch, SHAPE, config, calibration=by_token)
    assert found.predicted_ms == plan.predicted_ms + 0.25 * plan.logical_tokens
    # Where the device decides, it waits as long.
    slow = {"block": line(10.0)}
    plans = (
        make_plan(batch, SHAPE, config, calibration=replace(each, **slow))
        for each in (made_up(**issued), measured)
    )
    without, with_it = (each.predicted_ms for each in plans)
    assert without and with_it == pytest.approx(without + 7)

    measured = made_up(**issued, host_write_ms=(1.0, 2.0), host_read_ms=(3.0, 4.0))
    config = Config(sharing="group", boundary="across")
    plan = make_plan(group(51, 50, 3), SHAPE, config, calibration=measured)
    prompt, leaf = plan.microbatches
    meter = meter_of(plan, measured)
    found = [meter.host(row, backward=way) for row in (prompt, leaf) for way in (False, True)]
    assert found == [47 + 4 * 1, 88 + 4 * 2, 47 + 4 * 3, 88 + 4 * 4]


def test_few_queries_or_keys_take_as_long_as_the_others_are_many() -> None:
    """Blocks of queries walk all keys forward, and blocks of keys all queries backward."""
    config = Config(sharing="group", boundary="within")
    batch = group(101, 30, 2)
    plain = made_up(rectangle=flat(1e4), part=flat(2.0))
    walked = replace(plain, walk_ms=(0.01, 0.05))
    (row,) = make_plan(batch, SHAPE, config, calibration=plain).microbatches
    plan = make_plan(batch, SHAPE, config, calibration=walked)
    queries, keys = 30, 100  # the prompt and the first response are one causal sequence
    for measured, expected in (
        (plain, [2 + queries * keys / 1e4] * 2),
        (walked, [2 + keys * 0.01, 2 + queries * 0.05]),
        (replace(walked, walk_ms=(1e-5, 1e-5)), [2 + queries * keys / 1e4] * 2),
    ):
        meter = meter_of(plan, measured)
        assert isinstance(meter, MeasuredMeter)
        for way in (0, 1):
            assert meter._layer_ms(row, 0, bool(way)) == pytest.approx(expected[way])


def test_the_host_issues_long_sequences_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "LONG_TOKENS", 50)
    measured = made_up(host_long_ms=(2.0, 3.0))
    plan = make_plan(group(51, 50, 3), SHAPE, Config(sharing="none"), calibration=measured)
    (row,) = plan.microbatches
    meter = meter_of(plan, measured)
    assert [meter.host(row, backward=way) for way in (False, True)] == [4 * 3 * 2, 4 * 3 * 3]
    monkeypatch.setattr(meters, "LONG_TOKENS", 101)
    assert meter_of(plan, measured).host(row, backward=True) == 0


def test_long_sequences_are_priced_as_padded() -> None:
    """To a multiple of 512 tokens, where each has a call of its own."""
    plan = make_plan(group(2, 2299, 1), SHAPE, Config(sharing="none"))
    (row,) = plan.microbatches
    assert row.tokens == 2300
    for host_long_ms, tokens in (((0.0, 0.0), 2300), ((0.0, 0.5), 2560)):
        measured = made_up(causal=flat(1e4), host_long_ms=host_long_ms)
        meter = meter_of(plan, measured)
        assert isinstance(meter, MeasuredMeter)
        expected = 2300 * 2301 / 2 / 1e4 * (tokens / 2300) ** 2
        assert meter._layer_ms(row, 0, False) == pytest.approx(expected)


def test_a_row_without_labels_ends_in_its_last_layer() -> None:
    measured = made_up(causal=flat(1e4))
    plan = make_plan(
        group(51, 50, 1, trained=False), SHAPE, Config(sharing="none"), calibration=measured
    )
    attention = SHAPE.linear_parameters / 4 - 3 * 64 * 128
    started = 0.75 * attention * 4 / SHAPE.linear_parameters
    expected = (3 + started) * 100 * 3e-3 + 2 * 3 * 5050 / 1e4
    assert plan.predicted_ms == pytest.approx(expected)


@pytest.mark.parametrize(("windows", "gathered"), [((0,) * 4, 0), ((0, 0, 16, 16), 15 + 32 * 24)])
def test_short_sequences_take_memory_of_their_own(windows: tuple[int, ...], gathered: int) -> None:
    shape = replace(SHAPE, windows=windows)
    calibration = made_up(shape=shape, working_bytes=(0.0, 3.0))
    plan = make_plan(
        group(prompt=16, response=9, count=32),
        shape,
        Config(sharing="group", boundary="within"),
        capabilities=Capabilities(runs_ahead=True),
        calibration=calibration,
    )
    (microbatch,) = plan.microbatches
    assert (len(microbatch.segments), microbatch.tokens) == (33, 15 + 32 * 9)
    meter = MeasuredMeter(calibration, plan)
    padding = 33 * 128 * shape.heads * shape.head_dim * 4
    heads = 2 * shape.kv_heads + shape.heads
    keys = gathered * heads * (shape.head_dim + shape.value_dim) * shape.dtype_bytes
    assert meter.working_bytes(microbatch) == 3 * microbatch.tokens + padding + keys
    on_cpu = replace(plan, capabilities=Capabilities())
    assert MeasuredMeter(calibration, on_cpu).working_bytes(microbatch) == 3 * microbatch.tokens


def test_kept_logits_are_not_computed_again() -> None:
    """The head's backward was measured with a forward's product in it."""
    measured = made_up(head=line(1e-2, backward=3.0))
    batch = group(500, 500, 2)
    config = Config(sharing="group", boundary="across", head_logits="recompute")
    again = make_plan(batch, SHAPE, config, calibration=measured)
    kept = make_plan(batch, SHAPE, replace(config, head_logits="keep"), calibration=measured)
    assert again.cost - kept.cost == pytest.approx(2 * 500 * 1e-2)


@pytest.mark.parametrize(
    ("bandwidth", "budget", "activations"),
    [(1e12, 10**9, "keep"), (1e12, 4_000_000, "offload"), (1e2, 4_000_000, "recompute")],
    ids=["it fits", "copies are fast", "copies are slow"],
)
def test_activations_is_what_costs_less_within_the_budget(
    bandwidth: float, budget: int, activations: str
) -> None:
    measured = made_up(out_bytes_per_ms=bandwidth, back_bytes_per_ms=bandwidth)
    config = Config(
        sharing="group", boundary="across", max_microbatch_tokens=2000, memory_budget=budget
    )
    plan = make_plan(group(2001, 1000, 4), SHAPE, config, calibration=measured)
    assert [row.activations for row in plan.microbatches if row.children] == [activations]
    assert plan.predicted_peak_bytes <= budget
    kept = plan.with_microbatches(replace(row, activations="keep") for row in plan.microbatches)
    assert ("recompute prefix 0" in plan.events()) == (activations == "recompute")
    assert kept.events() == tuple(e for e in plan.events() if not e.startswith("recompute"))


def test_offloading_must_save_more_than_other_plans() -> None:
    able = Capabilities(checkpoints=("none",))
    planned = {
        budget: make_plan(
            group(500, 500, 3),
            SHAPE,
            Config(sharing="group", memory_budget=budget),
            calibration=made_up(),
            capabilities=able,
        )
        for budget in (1_000_000, 1_300_000)
    }
    tight, free = planned.values()
    (moved,) = (c for c in tight.candidates if c.boundary == "across")
    assert tight.boundary == "within" and moved.cost is not None
    assert 0.952 < moved.cost / tight.cost < 0.96 and "to host memory" in str(moved.refused)
    (within,) = (c for c in free.candidates if c.boundary == "within")
    assert free.boundary == "across" and within.cost is not None
    assert 0.952 < free.cost / within.cost < 0.96 and within.refused is None


@pytest.mark.parametrize(
    ("activations", "host_layers", "cost", "chosen"),
    [
        ("recompute", 0, 99.0, True),
        ("recompute", 0, 99.1, False),
        ("offload", 0, 96.0, False),
        ("offload", 0, 94.0, True),
        ("keep", 2, 96.0, False),
        ("keep", 2, 94.0, True),
    ],
)
def test_what_a_plan_must_save_to_be_chosen(
    activations: str, host_layers: int, cost: float, chosen: bool
) -> None:
    config = Config(sharing="group", boundary="across")
    plan = replace(make_plan(group(500, 500, 3), SHAPE, config, calibration=made_up()), cost=100.0)
    first, *others = plan.microbatches
    microbatches = (replace(first, activations=activations), *others)
    other = replace(plan, microbatches=microbatches, host_layers=host_layers, cost=cost)
    assert planner._chosen([plan, other]) is (other if chosen else plan)


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("budget", [6_000_000, 12_000_000])
def test_shorter_microbatches_keep_all_logits_if_that_costs_less(budget: int, is_set: bool) -> None:
    """A token keeps 400 bytes, and its logits take 600."""
    batch, shape, able = (
        group(500, 400, 60),
        replace(SHAPE, vocab=300),
        Capabilities(runs_ahead=True),
    )
    measured = made_up(shape=shape, head=line(1e-3))
    config = Config(memory_budget=budget if is_set else "auto")
    longest = Builder(batch, shape, config, None, measured, able, budget)
    longer = [longest.build("group", boundary) for boundary in ("within", "mixed", "across")]
    options: dict[str, Any] = {"calibration": measured, "capabilities": able}
    plan = make_plan(batch, shape, config, budget_bytes=budget, **options)
    assert plan.fits and all(m.keeps_logits for m in plan.microbatches if m.num_loss_entries)
    assert plan.cost < min(p.cost for p in longer if p.fits) / 1.01
    assert plan.max_microbatch_tokens < min(p.max_microbatch_tokens for p in longer)


def test_a_plan_is_compared_with_dense_that_fits() -> None:
    """Dense within microbatches costs less than the chosen plan, but does not fit."""
    plan = make_plan(group(100, 30, 4), SHAPE, budget_bytes=300_000)
    dense = {c.boundary: c for c in plan.candidates if c.sharing == "none"}
    assert plan.fits and dense["within"].refused and dense["within"].cost < plan.cost
    ratio = dense["mixed"].cost / plan.cost
    assert ratio > 2 and plan.reason == f"predicted {ratio:.2f}x faster than dense"


def test_lengths_are_searched_further_if_none_fits() -> None:
    batch = RolloutBatch(
        Rollout(range(length), [0] * 50 + [1] * (length - 50), 1.0) for length in (350, 550, 300)
    )
    options: dict[str, Any] = {
        "config": Config(sharing="none", boundary="across"),
        "calibration": made_up(),
        "capabilities": Capabilities(runs_ahead=True),
        "budget_bytes": 150_000,
    }
    assert not Builder(batch, SHAPE, **options).build("none", "across").fits
    assert make_plan(batch, SHAPE, **options).fits


@pytest.mark.parametrize("measured", [False, True])
def test_the_simpler_plan_is_chosen_within_the_noise_of_prices(measured: bool) -> None:
    plan = make_plan(group(500, 500, 3), SHAPE, calibration=made_up() if measured else None)
    dense = replace(plan, sharing="none", cost=100.0)
    for faster, chosen in ((0.4, "none"), (2.5, "none" if measured else "group"), (3.5, "group")):
        shared = replace(plan, sharing="group", cost=100.0 / (1 + faster / 100))
        assert planner._chosen([dense, shared]).sharing == chosen


def forked_responses(length: int) -> RolloutBatch:
    """Eight responses to a prompt of `length` tokens. Four of them have equal first tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 100, length).tolist()
    firsts = [[n] for n in range(4)] + [[9, 9, 9, n] for n in range(4)]
    ids = [prompt + first + rng.integers(0, 100, 50).tolist() for first in firsts]
    return RolloutBatch(
        Rollout(each, [0] * length + [1] * (len(each) - length), 1.0, group_id="g") for each in ids
    )


@pytest.mark.parametrize(("length", "ms"), [(40, 4.0), (500, 8.0)])
def test_short_forks_are_left_out_where_their_launches_cost_more(length: int, ms: float) -> None:
    """The prompt is shared, however short it is."""
    batch, ahead = forked_responses(length), Capabilities(runs_ahead=True)

    def planned(launch_ms: float, sharing: Any = AUTO, able: Capabilities = ahead) -> Plan:
        measured = made_up(
            block=line(1e-2), host_block_ms=(1.0, 1.0), host_launch_ms=(launch_ms, launch_ms)
        )
        config = Config(sharing=sharing, boundary="within")
        return make_plan(batch, SHAPE, config, calibration=measured, capabilities=able)

    every = planned(0.0)
    assert (every.sharing, every.least_segment) == ("group", 0)
    fewer = planned(ms)
    assert (fewer.sharing, fewer.least_segment) == ("group", 64)
    assert fewer.computed_tokens == every.computed_tokens + 3 * 3
    tables = (full_table(p.forest, p.microbatches[0], p.cache_of) for p in (every, fewer))
    assert [len(table.launches) for table in tables] == [3, 2]
    assert fewer.cost < planned(ms, "group").cost
    assert "forks fewer than 64 tokens below another are left out" in fewer.explain()
    for asked in ("group", "tree"):
        assert planned(ms, asked).least_segment == 0, "all is shared that was asked for"
    assert planned(ms, able=Capabilities()).least_segment == 0


@pytest.mark.parametrize(
    ("launch_ms", "sharing"), [(0.2, "group"), (0.4, "group"), (0.5, "none"), (0.9, "none")]
)
def test_a_plan_that_is_faster_only_on_a_fast_host_is_not_chosen(
    launch_ms: float, sharing: str
) -> None:
    """Dense takes the device 6.2 ms. The host takes 0.8 ms and 8 launches for a plan that
    shares."""
    measured = made_up(host_block_ms=(0.1, 0.1), host_launch_ms=(launch_ms, launch_ms))
    config, batch = Config(boundary="within"), group(101, 30, 4)
    plan = make_plan(batch, SHAPE, config, calibration=measured)
    assert plan.sharing == sharing
    (one,) = (c for c in plan.candidates if c.sharing == "group")
    dense = min(c.cost for c in plan.candidates if c.sharing == "none" and c.cost)
    faster = bool(one.cost and one.cost < 0.97 * dense)
    assert faster == (launch_ms < 0.9)
    fast_host = "plans that share cost less than dense only on a fast host"
    assert (plan.reason == fast_host) == (faster and sharing == "none")
    assert (one.refused == planner.NEEDS_FAST_HOST) == (plan.reason == fast_host)
    asked = make_plan(batch, SHAPE, replace(config, sharing="group"), calibration=measured)
    assert asked.sharing == "group" and asked.predicted_ms == one.cost
    on_device = replace(measured, host_block_ms=(0.0, 0.0), host_launch_ms=(0.0, 0.0))
    assert make_plan(batch, SHAPE, config, calibration=on_device).sharing == "group"


@pytest.mark.parametrize(("ahead", "sharing"), [(True, "group"), (False, "none")])
def test_short_forks_are_left_out_where_they_need_a_fast_host(ahead: bool, sharing: str) -> None:
    measured = made_up(block=line(1e-2), host_block_ms=(0.5, 1.0), host_launch_ms=(2.0, 4.0))
    able, config = Capabilities(runs_ahead=ahead), Config(boundary="within")
    plan = make_plan(forked_responses(20), SHAPE, config, calibration=measured, capabilities=able)
    assert (plan.sharing, plan.least_segment) == (sharing, 64 if ahead else 0)
    (one,) = (c for c in plan.candidates if c.sharing == "group")
    assert one.refused == (None if ahead else planner.NEEDS_FAST_HOST)
    assert not ahead or one.cost == plan.cost


def test_a_slower_host_takes_longer_for_everything() -> None:
    names = {f.name: f for f in fields(Calibration) if f.name.startswith("host_")}
    measured = made_up(
        **{n: 2.0 if n == "host_token_ms" else (1.0, 3.0) for n in names}, walk_ms=(5.0, 7.0)
    )
    slower = measured.with_slower_host(1.5)
    for name in names:
        wanted = 3.0 if name == "host_token_ms" else (1.5, 4.5)
        assert getattr(slower, name) == wanted, name
    same = {n: getattr(measured, n) for n in names}
    assert replace(slower, **same) == measured
    assert made_up().with_slower_host(2.0) == made_up()


def as_defined(plan: Plan, meter: Meter, budget: int) -> list[str]:
    """Activations as `microbatches_to_drop` chooses it, row by row, by its definition."""
    room = budget - cache_bytes(plan)
    kept = [meter.kept_bytes(row) for row in plan.microbatches]
    ways = [row.activations for row in plan.microbatches]
    for row in plan.microbatches:
        above, parent = [], row.parent
        while parent >= 0:
            above += [parent] if ways[parent] == "keep" else []
            parent = plan.microbatches[parent].parent
        over = sum(kept[r] for r in above) + kept[row.index] + meter.working_bytes(row) - room
        for index in reversed(above):
            if over > 0:
                ways[index] = "recompute"
                over -= kept[index]
    return ways


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    batches(),
    st.integers(1, 12),
    st.sampled_from(["mixed", "across"]),
    st.floats(0.05, 1.1),
    st.sets(st.integers(0, 20)),
)
def test_rows_are_let_go_as_defined(batch, tokens, boundary, share, moved) -> None:
    config = Config(sharing="tree", boundary=boundary, max_microbatch_tokens=tokens)
    plan = make_plan(batch, SHAPE, config)
    rows = (
        replace(r, activations="offload") if r.children and r.index in moved else r
        for r in plan.microbatches
    )
    plan = plan.with_microbatches(rows)
    meter = CountedMeter(plan)
    budget = int(peak_bytes(plan, meter) * share)
    fitted = drop_activations(plan, microbatches_to_drop(plan, meter, budget), "recompute")
    assert [row.activations for row in fitted.microbatches] == as_defined(plan, meter, budget)


# Files --------------------------------------------------------------------------------------------


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for text, schema in (("[]", "None"), ('{"schema": 2}', "2"), ('{"schema": true}', "True")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"has schema {schema}"):
            Calibration.load(path)


DAMAGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "a list for a curve": (lambda v: v.update(block=[1, 2]), "block"),
    "figures missing": (lambda v: v["head"].update(forward=[1.0]), "takes one length"),
    "sizes that descend": (lambda v: v["block"].update(at=[9, 1]), "do not ascend"),
    "a rate of 0": (lambda v: v["causal"].update(forward=[0.0, 0.0]), "causal is 0"),
    "a policy missing": (lambda v: v["kept_bytes"].pop("selective"), "kept_bytes has"),
    "bytes without end": (lambda v: v.update(working_bytes=[0, 1e308]), "working_bytes is 1e"),
    "kept without end": (lambda v: v["kept_bytes"].update(full=[1e308, 0]), "kept_bytes is 1e"),
    "layers without end": (lambda v: v["shape"].update(layers=10**15, windows=[]), "layers"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    path = tmp_path / "calibration.json"
    made_up().save(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Calibration.load(path)


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    made_up().save(path)
    whole = path.read_text(encoding="utf-8")

    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        made_up(seconds=2.0).save(path)
    assert path.read_text(encoding="utf-8") == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A link to it shows this without rights in /dev."""
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    made_up().save(link)
    assert link.is_symlink() and list(tmp_path.iterdir()) == [link]


def test_another_model_is_refused() -> None:
    other = replace(SHAPE, hidden=128, dtype_bytes=4)
    with pytest.raises(ConfigError, match=r"hidden 64 \(the model has 128\), dtype_bytes 2"):
        make_plan(group(9, 3, 2), other, calibration=made_up())
    deeper = replace(SHAPE, layers=9, windows=(0,) * 9)
    assert make_plan(group(9, 3, 2), deeper, calibration=made_up()).predicted_ms


def test_another_device_and_other_blocks_are_refused() -> None:
    measured = made_up()
    measured.check_device("none", compiled=False)
    for device, compiled in (("cpu", False), ("none", True)):
        here = f"here is {device}, blocks {'' if compiled else 'not '}compiled"
        with pytest.raises(ConfigError, match=f"on none, blocks not compiled.*{here}"):
            measured.check_device(device, compiled=compiled)


def test_the_file_that_the_configuration_names_is_read(tmp_path: Path) -> None:
    made_up().save(tmp_path / "c.json")
    plan = make_plan(group(9, 3, 2), SHAPE, Config(calibration=tmp_path / "c.json"))
    assert plan.cost_unit == "ms" and plan.rests_on == made_up().describe()
    with pytest.raises(ConfigError, match="cannot be read"):
        make_plan(group(9, 3, 2), SHAPE, Config(calibration=tmp_path / "none.json"))
    with pytest.raises(PlanError, match="without a model shape plans are priced in tokens"):
        make_plan(group(9, 3, 2), None, Config(calibration=str(tmp_path / "c.json")))


def test_calibrations_are_found_by_device_and_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    made_up().save(calibration_path("none", SHAPE, compiled=False))
    deeper = replace(SHAPE, layers=9, windows=(0,) * 9)
    assert find_calibration("none", deeper, compiled=False) == made_up()
    wider = replace(SHAPE, hidden=128)
    for asked in (("none", SHAPE, True), ("another", SHAPE, False), ("none", wider, False)):
        assert find_calibration(*asked[:2], compiled=asked[2]) is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / ("long" * 100)))  # stat raises an error
    assert find_calibration("none", SHAPE, compiled=False) is None
    monkeypatch.delenv(FOLDER_VARIABLE)
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)  # a user without a home
    assert find_calibration("none", SHAPE, compiled=False) is None
    assert calibration_path("none", SHAPE, compiled=False).is_absolute()
