"""Answers at the top of a report say what the numbers say, and no more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports import CONFIGS, FIXED, SHAPE, made_up, record, steps, write_run

from forkpoint import Config, RolloutBatch
from forkpoint.apps.report import groups
from forkpoint.apps.report.chapters import replay_chapter, rollouts_chapter
from forkpoint.apps.report.figure import Chapter, Tile
from forkpoint.apps.report.forests import draw_forest
from forkpoint.apps.report.groups import groups_figure
from forkpoint.apps.report.runs import read_run
from forkpoint.apps.report.verdict import (
    Peak,
    faster,
    gradients_tile,
    measured_speed_tile,
    norm_bar,
    predicted_speed_tile,
)
from forkpoint.plan import Totals, make_plan
from forkpoint.units import GIB

# Gradients ----------------------------------------------------------------------------------------


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
    ("dtype", "apart", "said", "state"),
    [
        ("float64", 0.0, "yes", "good"),
        ("float64", 1e-8, "yes", "good"),
        ("float64", 1e-5, "no", "bad"),
        ("float32", 1e-8, "yes", "good"),
        ("float32", 1e-3, "no", "bad"),
        ("bfloat16", 1e-3, "yes", "good"),
        ("bfloat16", 5e-2, "no", "bad"),
        ("int7", 1e-3, "yes", "good"),
        ("float64", float("nan"), "no", "bad"),
        ("float64", float("inf"), "no", "bad"),
    ],
)
def test_gradients_match_within_a_bar(dtype: str, apart: float, said: str, state: str) -> None:
    tile = answer(2.0 * (1 + apart), dtype)
    assert (tile.value, tile.state) == (f"gradients match: {said}", state)
    if 0 < apart < 1:
        assert f"differ by {apart:.1e} of the norm; the bar is" in tile.remark
    assert ("not known" in tile.remark) == (dtype == "int7")


def test_only_equal_weights_are_compared() -> None:
    """After the first update norms differ by what training makes of rounding."""
    made = steps([0.0] * 3)
    later = [made[0], *(replace(s, shared=record(gradient_norm=9.0)) for s in made[1:])]
    assert gradients_tile(later, manifest("float64")).value == "gradients match: yes"


def test_what_says_nothing_about_gradients() -> None:
    alone = [replace(step, dense=None, difference=None) for step in steps([0.0])]
    tile = gradients_tile(alone, manifest("float32"))
    assert tile.value == "gradients not compared" and tile.state == "plain"
    made = steps([0.0], gradient_norm=0.0)
    zero = [replace(step, dense=record(gradient_norm=0.0)) for step in made]
    assert gradients_tile(zero, manifest("float32")).value == "gradients match: not shown"
    one = [replace(step, dense=record(gradient_norm=0.0)) for step in steps([0.0])]
    assert gradients_tile(one, manifest("float32")).value == "gradients match: no"


def test_a_trend_puts_gradients_in_doubt() -> None:
    drifting = answer(2.0, means=[1e-6 * n for n in range(1, 31)])
    assert (drifting.value, drifting.state) == ("gradients match: in doubt", "bad")
    walking = answer(2.0, means=[1e-6 * (-1) ** n for n in range(30)])
    assert walking.value == "gradients match: yes" and "without a trend" in walking.remark


def test_the_dtype_is_that_of_the_command() -> None:
    assert norm_bar(manifest("float32", {"dtype": "bfloat16"})) == ("bfloat16", 2e-2)
    assert norm_bar(manifest("float32", {})) == ("float32", 1e-4)
    assert norm_bar(manifest(None, {"dtype": ["x"]}))[1] == 2e-2
    without = {"fixed": {**FIXED, "model": {**FIXED["model"], "config": None}}, "about": {}}
    assert norm_bar(without)[1] == 2e-2


# Speed --------------------------------------------------------------------------------------------


def test_speeds_in_words() -> None:
    assert [faster(value) for value in (1.43, 1.0, 1.004, 0.8)] == [
        *("1.43x faster", "as fast", "as fast", "1.25x slower")
    ]
    for speedup, bound, value, label, state in (
        (1.43, 1.5, "1.43x faster", "than dense, of at most 1.50x", "good"),
        (1.6, 1.5, "1.60x faster", "than dense; counted bound 1.50x", "good"),
        (0.5, 1.5, "2.00x slower", "than dense, of at most 1.50x", "bad"),
        (1.0, 1.0, "as fast", "as dense, of at most 1.00x", "plain"),
        (None, 1.5, "at most 1.50x", "faster than dense", "plain"),
    ):
        tile = measured_speed_tile(speedup, bound)
        assert (tile.value, tile.label, tile.state) == (value, label, state)


@pytest.mark.parametrize("shape", [SHAPE, None], ids=["FLOPs", "tokens"])
def test_predicted_speeds_are_those_of_the_plan(shape: Any) -> None:
    totals = Totals()
    totals.add(make_plan(made_up(), shape))
    tile = predicted_speed_tile(totals)
    assert totals.predicted_speedup is not None and totals.predicted_speedup > 1.1
    assert tile.value == f"predicted {totals.predicted_speedup:.2f}x faster"
    assert f"{totals.bound:.2f}x" in tile.label
    assert f"counted in {'tokens' if shape is None else 'FLOPs'}" in tile.remark
    alone = Totals()
    alone.add(make_plan(made_up(), shape, CONFIGS["group-in"]))
    assert predicted_speed_tile(alone).value == f"at most {alone.bound:.2f}x"


# Memory -------------------------------------------------------------------------------------------


def chapter_of(device: int | None, **changes: Any) -> Chapter:
    batch = made_up()
    plan = replace(make_plan(batch, SHAPE, CONFIGS["group-in"]), **changes)
    dense = make_plan(batch, SHAPE, CONFIGS["dense"])
    return rollouts_chapter("x", [(batch, plan, dense)], device_memory_bytes=device)


def memory_tile(chapter: Chapter) -> Tile:
    (tile,) = [tile for tile in chapter.tiles if "memory" in tile.label]
    return tile


def test_memory_beside_that_of_the_device() -> None:
    fits = chapter_of(80 * GIB, predicted_peak_bytes=30 * GIB)
    tile = memory_tile(fits)
    assert (tile.value, tile.label) == ("30.0 GiB", "of memory at the peak, of 80.0 GiB")
    assert "50.0 GiB is left for weights" in tile.remark
    assert not fits.warnings and tile.state == "plain"
    large = chapter_of(80 * GIB, predicted_peak_bytes=193 * GIB)
    assert memory_tile(large).state == "bad"
    (warning,) = large.warnings
    assert warning.startswith(
        "This plan does not fit: activations and prefix cache need 193.0 GiB,"
    )
    assert "the device has 80.0 GiB. Set --memory-budget" in warning
    unknown = chapter_of(None, predicted_peak_bytes=193 * GIB)
    assert memory_tile(unknown).label == "of memory at the peak" and not unknown.warnings


def test_a_plan_beyond_its_budget_is_warned_of() -> None:
    beyond = chapter_of(80 * GIB, predicted_peak_bytes=30 * GIB, memory_budget_bytes=20 * GIB)
    (warning,) = beyond.warnings
    assert "need 30.0 GiB, and the budget is 20.0 GiB. It is about the least" in warning
    within = chapter_of(None, predicted_peak_bytes=9 * GIB, memory_budget_bytes=20 * GIB)
    assert memory_tile(within).label.endswith("of a budget of 20.0 GiB") and not within.warnings


def test_several_batches_that_do_not_fit_are_counted() -> None:
    peak = Peak()
    for size in (30, 10, 50):
        peak.add(size * GIB, None, 20 * GIB)
    peak.add(None, None, 20 * GIB)
    (warning,) = peak.warnings()
    assert warning.startswith("The plans of 2 of 4 batches do not fit")
    assert "need 50.0 GiB, and the device has 20.0 GiB" in warning
    assert Peak().tile(None) is None and Peak().warnings() == ()


def test_without_a_model_no_memory_is_shown() -> None:
    batch = made_up()
    plans = make_plan(batch), make_plan(batch, config=Config(sharing="none"))
    chapter = rollouts_chapter("x", [(batch, *plans)], device_memory_bytes=GIB)
    assert not [tile for tile in chapter.tiles if "memory" in tile.label]


def test_the_answers_of_a_replay(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", made_up(), 3, baseline=True))
    chapter = replay_chapter(run, device_memory_bytes=GIB)
    gradients, speed, tokens, memory = chapter.tiles
    assert gradients.value == "gradients match: yes"
    assert speed.value == f"{90 / 36:.2f}x faster", "30 ms thrice over 11, 12 and 13"
    run_tokens = sum(step.shared.computed_tokens for step in run.steps)
    given = sum(step.logical_tokens for step in run.steps)
    assert tokens.value == f"{run_tokens / given:.1%}"
    assert f"{run_tokens:,} of {given:,} given" in tokens.remark
    assert memory.label == "of memory at the peak, of 1.0 GiB" and "Predicted" in memory.remark
    measured = [
        replace(step, shared=replace(step.shared, peak_memory_bytes=3 * GIB)) for step in run.steps
    ]
    tile = replay_chapter(replace(run, steps=tuple(measured))).tiles[3]
    assert tile.value == "3.0 GiB" and tile.remark.startswith("Measured")


# Groups -------------------------------------------------------------------------------------------


def test_groups_are_named_with_sizes_and_prompts() -> None:
    batch = made_up(groups=3, rollouts_per_group=4)
    plan = make_plan(batch, SHAPE, CONFIGS["tree-mixed"])
    prompts = [int(rollout.loss_mask.argmax()) for rollout in batch]
    drawn = draw_forest(plan, batch.rollout_ids, batch.group_ids, prompts)
    assert [g["name"] for g in drawn["groups"]] == list(dict.fromkeys(batch.group_ids))
    assert [g["rollouts"] for g in drawn["groups"]] == [4, 4, 4]
    for group in drawn["groups"]:
        of = [n for n, name in enumerate(batch.group_ids) if name == group["name"]]
        assert group["prompt"] == [min(prompts[n] for n in of), max(prompts[n] for n in of)]
        paths = [batch[n].token_ids.tolist() for n in of]
        columns = enumerate(zip(*paths, strict=False))
        common = next(k for k, column in columns if len(set(column)) > 1)
        assert group["shared"] == common - 1, "the edge to where they part is each one's own"
    lanes = [group for begin, end, group in drawn["runs"] for _ in range(begin, end)]
    names = [batch.rollout_ids[n] for n in plan.forest.order]
    assert drawn["names"] == names
    of_rollout = dict(zip(batch.rollout_ids, batch.group_ids, strict=True))
    assert [drawn["groups"][g]["name"] for g in lanes] == [of_rollout[name] for name in names]
    figure = groups_figure([("all", drawn)], 0)
    assert figure.table.columns[0] == "group" and len(figure.table.rows) == 3
    several = groups_figure([("one", drawn), ("two", drawn)], 5)
    assert several.table.columns[0] == "batch" and len(several.table.rows) == 6
    assert several.notes == ("Not listed: groups of 5 more batches.",)


def test_many_groups_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-mixed"])
    monkeypatch.setattr(groups, "MOST_GROUPS", 2)
    drawn = draw_forest(plan, batch.rollout_ids, batch.group_ids)
    assert len(drawn["groups"]) == 2 and drawn["runs"] == []
    figure = groups_figure([("all", drawn)], 0)
    assert figure.notes == ("all: the first 2 groups are listed.",)
    monkeypatch.setattr(groups, "MOST_GROUPS", 3)
    monkeypatch.setattr(groups, "MOST_RUNS", 2)
    drawn = draw_forest(plan, batch.rollout_ids, batch.group_ids)
    assert len(drawn["groups"]) == 3 and drawn["runs"] == []
    assert groups_figure([("all", drawn)], 0).notes == ()


def test_nothing_is_shared_where_the_plan_shares_nothing() -> None:
    batch = made_up()
    dense = make_plan(batch, SHAPE, CONFIGS["dense"])
    drawn = draw_forest(dense, batch.rollout_ids, batch.group_ids)
    assert {group["shared"] for group in drawn["groups"]} == {0}
    assert "prompt (tokens)" not in groups_figure([("all", drawn)], 0).table.columns


def test_rollouts_without_a_group() -> None:
    batch = RolloutBatch([replace(rollout, group_id=None) for rollout in made_up()])
    plan, dense = (make_plan(batch, None, CONFIGS[name]) for name in ("tree-mixed", "dense"))
    chapter = rollouts_chapter("x", [(batch, plan, dense)])
    figure = next(figure for figure in chapter.figures if figure.name == "groups")
    assert [row[0] for row in figure.table.rows] == ["prompt 0", "prompt 1", "prompt 2"]
    drawn = draw_forest(plan, batch.rollout_ids, batch.group_ids)
    assert [group["name"] for group in drawn["groups"]] == ["no group"]
