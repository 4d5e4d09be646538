"""Drawings of forests and schedules say what the plans say; what they leave out, they count."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reports import CONFIGS, SHAPE, made_up

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.apps.report import forests, schedules
from forkpoint.apps.report.forests import draw_forest, forest_figure
from forkpoint.apps.report.schedules import counted_lane, timeline_figure
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.align import align
from forkpoint.plan.program import IDLE
from forkpoint.tree.forest import build_forest, sort_rollouts

AWAY = {
    activations: Config(
        sharing="tree", boundary="across", max_microbatch_tokens=24, activations=activations
    )
    for activations in ("offload", "recompute")
}


def picture(plan: Plan, batch: RolloutBatch) -> dict[str, Any]:
    return draw_forest(plan, batch.rollout_ids, batch.group_ids)


# Forests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rollout_is_a_path(name: str) -> None:
    """Bands over a rollout's lane, one after another, are all of its edges."""
    batch = made_up()
    drawn = picture(make_plan(batch, SHAPE, CONFIGS[name]), batch)
    assert drawn["drawn"] == drawn["segments"] == len(drawn["nodes"])
    for lane, rollout_id in enumerate(drawn["names"]):
        path = [node for node in drawn["nodes"] if node["begin"] <= lane < node["end"]]
        at = 0
        for node in sorted(path, key=lambda node: node["start"]):
            assert node["start"] == at
            at += node["length"]
        assert at == batch.lengths[batch.rollout_ids.index(rollout_id)] - 1
    area = sum(node["length"] * (node["end"] - node["begin"]) for node in drawn["nodes"])
    assert area == batch.logical_tokens - len(batch), "the area is what dense would compute"
    assert sum(node["length"] for node in drawn["nodes"]) == drawn["tokens"]["run"]


def test_cuts_that_only_fit_rows_are_not_drawn() -> None:
    batch = made_up()
    plan = make_plan(
        batch, SHAPE, Config(sharing="tree", boundary="across", max_microbatch_tokens=7)
    )
    order = sort_rollouts(batch.token_ids, batch.offsets, np.zeros(len(batch), np.int64))
    drawn = picture(plan, batch)
    assert drawn["segments"] == len(build_forest(order, len(batch))) < len(plan.forest)
    assert any("," in node["microbatches"] for node in drawn["nodes"]), (
        "a segment cut into several rows"
    )


@pytest.mark.parametrize("most", [1, 5, 9])
def test_what_is_not_drawn_is_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, Config(sharing="tree", boundary="within"))
    whole = picture(plan, batch)
    monkeypatch.setattr(forests, "MOST_SEGMENTS", most)
    drawn = picture(plan, batch)
    ends = [node for node in drawn["nodes"] if "segments" in node]
    bands = [node for node in drawn["nodes"] if "segments" not in node]
    assert len(bands) == drawn["drawn"] == most
    assert most + sum(end["segments"] for end in ends) == whole["segments"]
    tokens = sum(band["length"] for band in bands) + sum(end["tokens"] for end in ends)
    assert tokens == plan.computed_tokens
    for node in drawn["nodes"]:
        above = drawn["nodes"][node["parent"]] if node["parent"] >= 0 else None
        assert above is None or "segments" not in above
        assert above is None or above["begin"] <= node["begin"] < node["end"] <= above["end"]
    figure = forest_figure([("all", drawn)], left_out=7)
    assert f"{most} of {whole['segments']} segments are drawn" in figure.notes[0]
    assert figure.notes[1] == "Not drawn: 7 more of the batches."
    assert len(figure.table.rows) == most


def test_many_rollouts_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forests, "MOST_NAMES", 3)
    batch = made_up()
    assert picture(make_plan(batch), batch)["names"] is None


def test_rollouts_of_one_token() -> None:
    batch = RolloutBatch([Rollout([5], [0], 1.0), Rollout([5, 6], [0, 1], 1.0)])
    assert picture(make_plan(batch), batch)["rollouts"] == 1
    nothing = RolloutBatch([Rollout([5], [0], 1.0)])
    assert picture(make_plan(nothing), nothing)["nodes"] == []


# Schedules ----------------------------------------------------------------------------------------


def lane(plan: Plan) -> dict[str, Any]:
    return counted_lane("shared", plan)


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_lengths_add_up_to_the_step(name: str) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS[name])
    made = lane(plan)
    assert [event["name"] for event in made["events"]] == list(plan.events())
    assert made["total"] == pytest.approx(plan.shared.step_flops(SHAPE) / 1e9)
    assert made["unit"] == "GFLOP" and not made["measured"]


def test_what_is_computed_again_is_counted_again() -> None:
    batch = made_up()
    kept = lane(make_plan(batch, SHAPE, CONFIGS["tree-across"]))
    plan = make_plan(batch, SHAPE, AWAY["recompute"])
    again = lane(plan)
    assert [event["name"] for event in again["events"]] == list(plan.events())
    second = [event for event in again["events"] if event["operation"] == "recompute"]
    assert second and {event["phase"] for event in second} == {"prefix backward"}
    # The head is left to the second forward, so what is added is what the first ones cost.
    names = {event["index"] for event in second}
    first = [
        e["size"] for e in again["events"] if e["operation"] == "forward" and e["index"] in names
    ]
    assert again["total"] == pytest.approx(kept["total"] + sum(first))


@pytest.mark.parametrize("name", [*CONFIGS, *AWAY])
def test_what_is_held_reaches_the_predicted_peak(name: str) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, {**CONFIGS, **AWAY}[name])
    held = [event["held"] for event in lane(plan)["events"]]
    assert max(held) == plan.predicted_peak_bytes
    assert min(held) > 0


def test_phases_by_hand() -> None:
    """One prompt of three responses, across microbatches."""
    batch = made_up(groups=1, rollouts_per_group=3)
    plan = make_plan(
        batch, SHAPE, Config(sharing="group", boundary="across", max_microbatch_tokens=30)
    )
    events = lane(plan)["events"]
    assert [(e["name"], e["phase"]) for e in events if e["index"] == 0] == [
        ("forward prefix 0", "prefix forward"),
        ("backward prefix 0", "prefix backward"),
    ]
    children = [e for e in events if e["index"] != 0]
    assert {e["phase"] for e in children} == {"leaf"} and len(children) >= 2
    parent = events[0]["held"]
    assert all(e["held"] > parent for e in children) and events[-1]["held"] == parent
    away = make_plan(
        batch,
        SHAPE,
        Config(
            sharing="group", boundary="across", max_microbatch_tokens=30, activations="recompute"
        ),
    )
    again = lane(away)["events"]
    assert [e["name"] for e in again[-2:]] == ["recompute prefix 0", "backward prefix 0"]
    assert again[-1]["held"] == again[-2]["held"] == again[0]["held"] == parent
    assert all(e["held"] < k["held"] for e, k in zip(again[1:-2], events[1:-1], strict=True))


@pytest.mark.parametrize("name", ["tree-across", "recompute"])
def test_instructions_that_idle(name: str) -> None:
    """Two ranks with one shape: the one with less to do idles, and is drawn so."""
    large, small = made_up(), made_up(groups=1, rollouts_per_group=2)
    config = {**CONFIGS, **AWAY}[name]
    plans = [make_plan(batch, SHAPE, config) for batch in (large, small)]
    programs = align([plan.program for plan in plans])
    plan = replace(plans[1], program=programs[1])
    alone, made = lane(plans[1]), lane(plan)
    assert [event["name"] for event in made["events"]] == list(plan.events())
    idle = [event for event in made["events"] if event["key"] == "idle"]
    assert len(idle) == sum(instruction.idle for instruction in programs[1].instructions) > 4
    assert {event["name"] for event in idle} >= {"forward idle", "backward idle"}
    assert {(event["phase"], event["index"], event["tokens"]) for event in idle} == {
        ("idle", IDLE, 0)
    }
    one = max(event["size"] for event in idle)
    assert 0 < one < min(event["size"] for event in alone["events"]), "one token runs"
    own = [(e["name"], e["size"]) for e in made["events"] if e["key"] != "idle"]
    if name == "tree-across":
        assert own == [(e["name"], e["size"]) for e in alone["events"]]
    assert max(event["held"] for event in made["events"]) == plans[1].predicted_peak_bytes
    figure = timeline_figure([("all", [made])], left_out=0)
    assert any(note.startswith("Idle: other ranks") for note in figure.notes)
    assert not any("Idle" in note for note in timeline_figure([("all", [alone])], 0).notes)
    tokens = make_plan(small, config=CONFIGS["tree-across"])
    without_shape = replace(
        tokens,
        program=align([make_plan(large, config=CONFIGS["tree-across"]).program, tokens.program])[1],
    )
    sizes = [e["size"] for e in lane(without_shape)["events"] if e["key"] == "idle"]
    assert sizes and set(sizes) == {1.0}


def test_without_a_model_tokens_are_shown() -> None:
    batch = made_up()
    made = lane(make_plan(batch))
    assert made["unit"] == made["memory"]["unit"] == "tokens"
    figure = timeline_figure([("all", [made])], left_out=0)
    assert any("not times" in note for note in figure.notes)


def test_much_work_is_counted_in_a_larger_unit() -> None:
    batch = made_up()
    for hidden, unit, flops in ((8192, "TFLOP", 1e12), (65536, "PFLOP", 1e15)):
        large = replace(SHAPE, hidden=hidden, intermediate=4 * hidden, layers=80, windows=())
        plan = make_plan(batch, large)
        made = lane(plan)
        assert made["unit"] == unit
        assert made["total"] == pytest.approx(plan.shared.step_flops(large) / flops)


def test_long_schedules_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-across"])
    whole = lane(plan)
    monkeypatch.setattr(schedules, "MOST_EVENTS", 4)
    cut = lane(plan)
    assert len(cut["events"]) == 4 and cut["total"] == pytest.approx(whole["total"])
    assert cut["events_left_out"] == len(whole["events"]) - 4
    sizes = sum(event["size"] for event in cut["events"]) + cut["size_left_out"]
    assert sizes == pytest.approx(cut["total"])
