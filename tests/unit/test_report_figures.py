"""Figures and answers of a report say what plans and rows say; what they leave out, they count."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import CONFIGS, FINGERPRINT, FIXED, SHAPE, made_up, record, steps, write_run

from forkpoint import Config, ConfigError, Rollout, RolloutBatch
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report import batches, chapters
from forkpoint.apps.report.batches import (
    Batch,
    counted_schedule,
    forest_figure,
    forest_picture,
    groups_figure,
    schedule_figure,
)
from forkpoint.apps.report.chapters import read_run, replay_chapter, rollouts_chapter, typical_step
from forkpoint.apps.report.figure import Chart, Event, Figure, Tile
from forkpoint.apps.report.steps import drift_figure, drift_trend, loss_figure, speed_figure
from forkpoint.apps.report.verdict import (
    faster,
    gradients_tile,
    measured_speed_tile,
    memory_answer,
    norm_bar,
    predicted_speed_tile,
)
from forkpoint.plan import Plan, Totals, make_plan
from forkpoint.plan.align import align
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.units import GIB

RECOMPUTED = Config(
    sharing="tree", boundary="across", max_microbatch_tokens=24, activations="recompute"
)
OFFLOADED = replace(RECOMPUTED, activations="offload")


def drawn(plan: Plan, batch: RolloutBatch) -> Batch:
    return Batch(
        label="all",
        plan=plan,
        group_ids=batch.group_ids,
        prompt_tokens=[int(rollout.loss_mask.argmax()) for rollout in batch],
        schedule=counted_schedule("all", [("shared", plan)]),
    )


# Forests and groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rollout_is_a_path(name: str) -> None:
    """Bands over a rollout's lane, one after another, are all of its edges."""
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS[name])
    picture = forest_picture(drawn(plan, batch))
    for lane, rollout in enumerate(plan.forest.order):
        path = (picture.begin <= lane) & (lane < picture.end)
        order = np.argsort(picture.start[path])
        ends = picture.start[path][order] + picture.length[path][order]
        assert [0, *ends[:-1]] == picture.start[path][order].tolist()
        assert ends[-1] == batch.lengths[rollout] - 1
    area = picture.length * (picture.end - picture.begin)
    assert area.sum() == batch.logical_tokens - len(batch), "what dense would compute"
    assert picture.length.sum() == plan.computed_tokens
    table = forest_figure([drawn(plan, batch)], 0).table
    assert sum(int(row[2] or 0) for row in table.rows) == plan.computed_tokens


def test_what_is_not_drawn_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-across"])
    monkeypatch.setattr(batches, "MAX_SEGMENTS", 5)
    picture = forest_picture(drawn(plan, batch))
    area = plan.forest.length * (plan.forest.owner_end - plan.forest.owner_begin)
    largest = np.sort(area)[-5:].sum()
    assert (picture.length * (picture.end - picture.begin)).sum() == largest
    notes = forest_figure([drawn(plan, batch)], left_out=7).notes
    assert len(notes) == 2 and f"of {len(plan.forest)} segments the 5" in notes[0]
    assert notes[1] == "Not drawn: 7 more of the batches."


def test_rollouts_of_one_token() -> None:
    """They have no edge, so no lane."""
    batch = RolloutBatch([Rollout([5], [0], 1.0), Rollout([5, 6], [0, 1], 1.0, group_id="g")])
    one = drawn(make_plan(batch), batch)
    assert len(forest_picture(one).start) == 1
    assert [row[1] for row in groups_figure([one], 0).table.rows] == ["g"]
    nothing = RolloutBatch([Rollout([5], [0], 1.0)])
    assert not len(forest_picture(drawn(make_plan(nothing), nothing)).start)


def test_groups_are_named_with_sizes_and_prompts() -> None:
    batch = made_up(groups=3, rollouts_per_group=4)
    plan = make_plan(batch, SHAPE, CONFIGS["tree-mixed"])
    one = drawn(plan, batch)
    rows = groups_figure([one], 0).table.rows
    assert [row[1] for row in rows] == list(dict.fromkeys(batch.group_ids))
    assert one.prompt_tokens is not None
    for _, name, size, prompt, shared in rows:
        of = [n for n, group in enumerate(batch.group_ids) if group == name]
        lengths = sorted({one.prompt_tokens[n] for n in of})
        assert size == 4 and str(prompt).startswith(str(lengths[0]))
        columns = enumerate(zip(*(batch[n].token_ids.tolist() for n in of), strict=False))
        common = next(k for k, column in columns if len(set(column)) > 1)
        assert shared == common - 1, "the edge to where they part is each one's own"
    picture = forest_picture(one)
    assert sorted(name for name, _ in picture.groups) == sorted(row[1] for row in rows)
    dense = drawn(make_plan(batch, SHAPE, CONFIGS["dense"]), batch)
    assert {row[4] for row in groups_figure([dense], 0).table.rows} == {0}


def test_rollouts_without_a_group() -> None:
    batch = RolloutBatch([replace(rollout, group_id=None) for rollout in made_up()])
    plan, dense = (make_plan(batch, None, CONFIGS[name]) for name in ("tree-mixed", "dense"))
    figures = figures_of(rollouts_chapter("x", [(batch, plan, dense)]).figures)
    assert [row[1] for row in figures["groups"].table.rows] == ["prompt 0", "prompt 1", "prompt 2"]


def figures_of(figures: tuple[Figure, ...]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


# Schedules ----------------------------------------------------------------------------------------


def events_of(plan: Plan) -> tuple[Event, ...]:
    (lane,) = counted_schedule("all", [("shared", plan)]).lanes
    return lane.events


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_lengths_add_up_to_the_step(name: str) -> None:
    plan = make_plan(made_up(), SHAPE, CONFIGS[name])
    picture = counted_schedule("all", [("shared", plan)])
    (lane,) = picture.lanes
    assert [event.name for event in lane.events] == list(plan.events())
    total = sum(event.size for event in lane.events)
    assert total == pytest.approx(plan.shared.step_flops(SHAPE) / 1e9) and picture.unit == "GFLOP"


def test_what_is_computed_again_is_counted_again() -> None:
    batch = made_up()
    kept = events_of(make_plan(batch, SHAPE, CONFIGS["tree-across"]))
    again = events_of(make_plan(batch, SHAPE, RECOMPUTED))
    second = {e.name.removeprefix("recompute ") for e in again if e.phase == "prefix recompute"}
    first = [e.size for e in again if e.phase == "prefix forward" and e.name[8:] in second]
    # The head is left to the second forward, so what is added is what the first ones cost.
    assert second and len(first) == len(second)
    total = sum(e.size for e in kept) + sum(first)
    assert sum(e.size for e in again) == pytest.approx(total)


@pytest.mark.parametrize("config", [*CONFIGS.values(), RECOMPUTED, OFFLOADED])
def test_what_is_held_reaches_the_predicted_peak(config: Config) -> None:
    plan = make_plan(made_up(), SHAPE, config)
    picture = counted_schedule("all", [("shared", plan)])
    unit = {"KiB": 2**10, "MiB": 2**20}[picture.held_unit]
    assert max(e.held for e in picture.lanes[0].events) * unit == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes


def test_instructions_that_idle() -> None:
    """Two ranks with one shape: the one with less to do idles, and is drawn so."""
    large, small = made_up(), made_up(groups=1, rollouts_per_group=2)
    plans = [make_plan(batch, SHAPE, CONFIGS["tree-across"]) for batch in (large, small)]
    plan = replace(plans[1], program=align([plan.program for plan in plans])[1])
    alone, made = events_of(plans[1]), events_of(plan)
    idle = [event for event in made if event.phase == "idle"]
    assert len(idle) > 4 and {event.tokens for event in idle} == {0}
    assert 0 < max(e.size for e in idle) < min(e.size for e in alone), "one token runs"
    assert [(e.name, e.size) for e in made if e.phase != "idle"] == [
        (e.name, e.size) for e in alone
    ]
    notes = [len(schedule_figure([drawn(p, small)], 0).notes) for p in (plan, plans[1])]
    assert notes[0] == notes[1] + 1


def test_units() -> None:
    batch = made_up()
    tokens = counted_schedule("all", [("shared", make_plan(batch))])
    assert tokens.unit == tokens.held_unit == "tokens"
    for hidden, unit, flops in ((8192, "TFLOP", 1e12), (65536, "PFLOP", 1e15)):
        large = replace(SHAPE, hidden=hidden, intermediate=4 * hidden, layers=80, windows=())
        plan = make_plan(batch, large)
        picture = counted_schedule("all", [("shared", plan)])
        total = sum(event.size for event in picture.lanes[0].events)
        assert picture.unit == unit
        assert total == pytest.approx(plan.shared.step_flops(large) / flops)


def test_long_schedules_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-across"])
    total = sum(event.size for event in events_of(plan))
    monkeypatch.setattr(batches, "MAX_EVENTS", 4)
    (lane,) = counted_schedule("all", [("shared", plan)]).lanes
    assert len(lane.events) == 4
    assert sum(event.size for event in lane.events) + lane.rest == pytest.approx(total)
    assert "at most the first 4 events" in schedule_figure([drawn(plan, batch)], 0).notes[-1]


# Curves -------------------------------------------------------------------------------------------


def charts(figure: Figure | None) -> list[Chart]:
    assert figure is not None
    return [picture for picture in figure.pictures if isinstance(picture, Chart)]


def test_drift_says_whether_there_is_a_trend() -> None:
    random = np.random.default_rng(0)
    noise = np.cumsum(random.normal(size=60)) * 1e-9
    for means, said in ((noise, "no trend"), (noise + 5e-9 * np.arange(1, 61), "a trend")):
        figure = drift_figure(steps(means.tolist()))
        assert figure is not None and f": {said} (" in figure.caption
        low, high = charts(figure)[0].band or ((), ())
        inside = low[-1] <= means[-1] <= high[-1]
        assert inside == (said == "no trend"), "the band is the test that the caption tells of"
    assert charts(drift_figure(steps([1e-9] * 5)))[0].band is None
    assert drift_trend(steps([math.nan] * 30)) is None


def test_what_has_no_baseline() -> None:
    alone = [replace(step, dense=None, difference=None) for step in steps([1e-9] * 3)]
    assert drift_figure(alone) is None
    assert [series.name for series in charts(speed_figure(alone))[0].series] == ["counted bound"]
    assert len(charts(loss_figure(alone))) == 2


def test_speed_is_dense_over_shared() -> None:
    figure = speed_figure(steps([0.0] * 3))
    bound, speed = charts(figure)[0].series
    assert list(bound.values) == [2.5] * 3
    assert list(speed.values) == pytest.approx([30 / 11, 30 / 12, 30 / 13])
    assert "2.50x" in figure.caption


def test_a_step_with_compilation_does_not_hide_the_others() -> None:
    made = steps([0.0] * 5)
    made[0] = replace(made[0], shared=replace(made[0].shared, ms=9_000.0))
    figure = speed_figure(made)
    times = {series.name: list(series.values) for series in charts(figure)[1].series}
    assert times["shared"] == [None, *[step.shared.ms for step in made[1:]]]
    assert None not in times["dense"]
    assert figure.notes and figure.table.rows[0][3] == 9_000.0, "it is among the numbers"
    assert not speed_figure(steps([0.0] * 5)).notes


def test_numbers_that_are_none_are_gaps() -> None:
    figure = loss_figure(steps([0.0] * 3, loss=math.nan))
    assert list(charts(figure)[0].series[1].values) == [None] * 3
    sizes = charts(drift_figure(steps([0.0, 1e-9, 0.0])))[1]
    assert list(sizes.series[2].values) == [None, 1e-9, None], "no logarithm of 0"


def test_the_typical_step_is_a_warm_one() -> None:
    found = typical_step(steps([0.0] * 4), FINGERPRINT)
    assert found is not None and found.step == 3
    assert typical_step(steps([0.0]), FINGERPRINT) is not None
    assert typical_step(steps([0.0]), "other") is None


# Folders of replays -------------------------------------------------------------------------------


def test_rows_come_back_from_json() -> None:
    for step in steps([1e-9, 2e-9], event_memory_bytes=(4, 5)):
        assert ReplayStep.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_a_replay_that_still_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_up(), 4)
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "half": ')
    chapter = replay_chapter(read_run(folder))
    assert chapter.title == "some.jsonl" and "4 of 30 steps so far" in chapter.subtitle
    assert "a llama (2 layers)" in chapter.subtitle and "shared alone" in chapter.subtitle


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"step": 1}\n', "rows.jsonl, line 1"),
        ("rows.jsonl", b"", "has no step yet"),
        ("plans.jsonl", b'{"fingerprint": "0123456789abcdef"}\n', "plans.jsonl, line 1"),
        ("plans.jsonl", None, "plans.jsonl is missing"),
    ],
    ids=["row", "empty", "plan", "missing"],
)
def test_damaged_folders(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_up(), 2)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_run(folder)


def test_many_batches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", made_up(), 2)
    other, more = made_up(groups=2), ReplayFolder(folder, resume=True)
    plan = make_plan(other, SHAPE)
    more.add_plans(plan.fingerprint, other, {"shared": plan})
    monkeypatch.setattr(chapters, "MAX_BATCHES", 1)
    run = read_run(folder)
    assert (len(run.planned), run.batches) == (1, 2)
    for name, figure in figures_of(replay_chapter(run).figures).items():
        said = "Not drawn: 1 more of the batches." in figure.notes
        assert said == (name in ("forest", "groups", "schedule"))


# Answers ------------------------------------------------------------------------------------------


def manifest(dtype: str | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    model = {**FIXED["model"], "config": {"dtype": dtype}}
    about = {} if options is None else {"options": options}
    return {"fixed": {**FIXED, "model": model}, "about": about}


def answer(norm: float, dtype: str = "float32", means: list[float] | None = None) -> Tile:
    """Of a replay whose dense gradients have the norm 2."""
    made = steps(means or [0.0, 0.0], gradient_norm=norm)
    dense = [replace(step, dense=record(gradient_norm=2.0)) for step in made]
    return gradients_tile(dense, manifest(dtype))


@pytest.mark.parametrize(
    ("dtype", "difference", "said", "state"),
    [
        ("float64", 1e-8, "yes", "good"),
        ("float64", 1e-5, "no", "bad"),
        ("float32", 0.0, "yes", "good"),
        ("float32", 1e-3, "no", "bad"),
        ("bfloat16", 1e-3, "yes", "good"),
        ("bfloat16", 5e-2, "no", "bad"),
        ("int7", 1e-3, "yes", "good"),
        ("float64", math.nan, "no", "bad"),
    ],
)
def test_gradients_match_within_a_bar(dtype: str, difference: float, said: str, state: str) -> None:
    tile = answer(2.0 * (1 + difference), dtype)
    assert (tile.value, tile.state) == (f"gradients match: {said}", state)


def test_only_equal_weights_are_compared() -> None:
    """After the first update norms differ by what training makes of rounding."""
    made = steps([0.0] * 3)
    later = [made[0], *(replace(s, shared=record(gradient_norm=9.0)) for s in made[1:])]
    assert gradients_tile(later, manifest("float64")).value == "gradients match: yes"


def test_what_says_nothing_about_gradients() -> None:
    alone = [replace(step, dense=None, difference=None) for step in steps([0.0])]
    assert gradients_tile(alone, manifest("float32")).value == "gradients not compared"
    made = steps([0.0], gradient_norm=0.0)
    zero = [replace(step, dense=record(gradient_norm=0.0)) for step in made]
    assert gradients_tile(zero, manifest("float32")).value == "gradients match: not shown"
    one = [replace(step, dense=record(gradient_norm=0.0)) for step in steps([0.0])]
    assert gradients_tile(one, manifest("float32")).value == "gradients match: no"


def test_a_trend_puts_gradients_in_doubt() -> None:
    drifting = answer(2.0, means=[1e-6 * n for n in range(1, 31)])
    assert (drifting.value, drifting.state) == ("gradients match: in doubt", "bad")
    assert answer(2.0, means=[1e-6 * (-1) ** n for n in range(30)]).state == "good"


def test_the_dtype_is_that_of_the_command() -> None:
    assert norm_bar(manifest("float32", {"dtype": "bfloat16"})) == ("bfloat16", 2e-2)
    assert norm_bar(manifest("float32", {})) == ("float32", 1e-4)
    assert norm_bar(manifest(None, {"dtype": ["x"]}))[1] == 2e-2


def test_speeds_in_words() -> None:
    assert [faster(value) for value in (1.43, 1.004, 0.8)] == [
        *("1.43x faster", "as fast", "1.25x slower")
    ]
    for speedup, bound, label, state in (
        (1.43, 1.5, "than dense, of at most 1.50x", "good"),
        (1.6, 1.5, "than dense; counted bound 1.50x", "good"),
        (0.5, 1.5, "than dense, of at most 1.50x", "bad"),
        (1.0, 1.0, "as dense, of at most 1.00x", "plain"),
        (None, 1.5, "faster than dense", "plain"),
    ):
        tile = measured_speed_tile(speedup, bound)
        assert (tile.label, tile.state) == (label, state)


@pytest.mark.parametrize("shape", [SHAPE, None], ids=["FLOPs", "tokens"])
def test_predicted_speeds_are_those_of_the_plan(shape: Any) -> None:
    totals = Totals()
    totals.add(make_plan(made_up(), shape))
    tile = predicted_speed_tile(totals)
    assert tile.value == f"predicted {totals.predicted_speedup:.2f}x faster"
    assert f"{totals.bound:.2f}x" in tile.label
    asked = Totals()
    asked.add(make_plan(made_up(), shape, CONFIGS["group-in"]))
    assert predicted_speed_tile(asked).value == f"at most {asked.bound:.2f}x"


def test_memory_beside_that_of_the_device() -> None:
    device = DeviceMemory(80 * GIB, parameters=10**9, dtype_bytes=2)
    tile, warnings = memory_answer([(30 * GIB, None)], device=device)
    assert tile is not None and not warnings and tile.state == "plain"
    assert (tile.value, tile.label) == ("30.0 GiB", "of memory at the peak, of 80.0 GiB")
    tile, (warning,) = memory_answer([(193 * GIB, None), (1, None)], device=device)
    assert tile is not None and tile.state == "bad" and "1 of 2 batches do not fit" in warning
    tile, warnings = memory_answer([(193 * GIB, None)])
    assert tile is not None and tile.label == "of memory at the peak" and not warnings


def test_a_plan_beyond_its_budget_is_warned_of() -> None:
    tile, (warning,) = memory_answer([(30 * GIB, 20 * GIB)])
    assert tile is not None and tile.label.endswith("of a budget of 20.0 GiB")
    assert "need 30.0 GiB, and the budget is 20.0 GiB" in warning
    assert memory_answer([(9 * GIB, 20 * GIB)])[1] == ()
    assert memory_answer([]) == (None, ())


def test_the_answers_of_a_replay(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", made_up(), 3, baseline=True))
    gradients, speed, tokens, memory = replay_chapter(run).tiles
    assert gradients.value == "gradients match: yes"
    assert speed.value == f"{90 / 36:.2f}x faster", "30 ms thrice over 11, 12 and 13"
    padded_tokens = sum(step.shared.computed_tokens for step in run.steps)
    given = sum(step.logical_tokens for step in run.steps)
    assert tokens.value == f"{padded_tokens / given:.1%}"
    assert memory.remark.startswith("Predicted")
    measured = [
        replace(step, shared=replace(step.shared, peak_memory_bytes=3 * GIB)) for step in run.steps
    ]
    tile = replay_chapter(replace(run, steps=tuple(measured))).tiles[3]
    assert tile.value == "3.0 GiB" and tile.remark.startswith("Measured")
