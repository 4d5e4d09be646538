"""Lanes of steps on stages of a pipeline: their times, and their file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from forkpoint import Config, ConfigError, RolloutBatch
from forkpoint.apps.cli.text import visible
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.lanes import Lane, Lanes, lanes_of, measured_lane
from forkpoint.plan.stage_sizes import choose_size, offers_of
from forkpoint.plan.stages import stage_plan, stages_of_shape
from forkpoint.rollouts.synthetic import synthetic_rollouts

SHAPE = ModelShape.from_config(MODELS["qwen3-0.6b"])
STAGES = stages_of_shape(SHAPE, 3)
# A stage that waits for 2 of the 4 ms of its second event, and idles before the fourth.
ONE = Lane(
    events=("forward leaf 0", "backward leaf 0", "recompute prefix 1", "backward prefix 1"),
    begins=(0.0, 1.0, 5.0, 8.0),
    ready=(0.0, 3.0, 5.0, 8.0),
    ends=(1.0, 5.0, 7.0, 10.0),
)
TWO = Lane(events=("forward leaf 0",), begins=(1.0,), ready=(1.0,), ends=(4.0,))


def made(activations: Literal["keep", "recompute"] = "recompute") -> Lanes:
    rollouts = synthetic_rollouts(
        groups=2, rollouts_per_group=3, prompt_tokens=900, response_tokens=300
    )
    config = Config(
        sharing="group", boundary="across", max_microbatch_tokens=512, activations=activations
    )
    plan = make_plan(RolloutBatch(rollouts), SHAPE, config)
    staged = choose_size([offers_of([plan])], STAGES)
    found = lanes_of(staged.predicted(plan))
    # The same from the plan of any stage.
    for stage in STAGES:
        assert lanes_of(stage_plan(plan, staged.schedule, stage)) == found
    for lane, busy, order in zip(
        found.predicted, staged.schedule.busy, staged.schedule.orders, strict=True
    ):
        assert lane.busy == pytest.approx(busy)
        again = sum(event.startswith("recompute") for event in lane.events)
        assert len(lane.events) == len(order) + again
        assert (again > 0) == (activations == "recompute")
        times = zip(lane.events, lane.begins, lane.ends, strict=True)
        took = {event: end - begin for event, begin, end in times}
        for event, time in took.items():
            operation, _, name = event.partition(" ")
            assert operation != "recompute" or time == pytest.approx(took[f"forward {name}"])
            assert operation != "backward" or time > 0
    assert max(lane.ends[-1] for lane in found.predicted) == staged.schedule.time
    return found


def saved_events(lanes: Lanes, path: Path) -> list[dict[str, Any]]:
    """Trace events with a duration in the file of lanes."""
    lanes.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert all(event["ph"] in ("M", "X") for event in events)
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_predicted_lanes(activations: Literal["keep", "recompute"], tmp_path: Path) -> None:
    found = made(activations)
    events = saved_events(found, tmp_path / "lanes.json")
    assert [e["name"] for e in events] == [x for lane in found.predicted for x in lane.events]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(1e6)


def test_measured_lanes_without_scores() -> None:
    events = ("score leaf 0", "forward leaf 0", "backward leaf 0")
    assert measured_lane(events, (5.0, 1.0, 4.0), (0.0, 0.5, 9.0)) == Lane(
        events=events[1:], begins=(0.0, 1.0), ready=(0.5, 5.0), ends=(1.0, 5.0)
    )


@pytest.mark.parametrize("scores", [True, False])
def test_measured_lanes_of_images(scores: bool) -> None:
    """Features that scores have read belong to their pass."""
    before = ("encode image 0", "score leaf 0", "release image 0") * scores
    events = ("encode image 0", "forward leaf 0", "backward leaf 0", "encode backward image 0")
    took = (1.0,) * len(before) + (2.0, 1.0, 4.0, 3.0)
    lane = measured_lane(before + events, took, (0.0,) * len(took))
    assert lane.events == events and lane.ends == (2.0, 3.0, 7.0, 10.0)
    times = len(before) + 2
    frozen = measured_lane(
        (*before, "encode image 0", "release image 0"), (1.0,) * times, (0.0,) * times
    )
    assert frozen.events == ("encode image 0", "release image 0")


def test_a_file_of_lanes(tmp_path: Path) -> None:
    lanes, path = Lanes(predicted=(ONE, TWO)), tmp_path / "lanes.json"
    events = saved_events(lanes, path)
    # The predicted step lasts a second, and waits are no events.
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, "forward leaf 0", 0.0, 1e5),
        (0, "backward leaf 0", 3e5, 2e5),
        (0, "recompute prefix 1", 5e5, 2e5),
        (0, "backward prefix 1", 8e5, 2e5),
        (1, "forward leaf 0", 1e5, 3e5),
    ]
    both = saved_events(replace(lanes, measured=(ONE, TWO)), path)
    assert both[: len(events)] == events and both[len(events)]["pid"] == 1
    assert both[-1] == {**events[-1], "pid": 1, "ts": 1000.0, "dur": 3000.0}
    assert saved_events(Lanes(predicted=(replace(ONE, events=(), ready=(), ends=()),)), path) == []
    with pytest.raises(ConfigError, match="cannot be written"):
        lanes.save(tmp_path)


def test_text_is_shown_as_it_is_but_for_invisible_characters() -> None:
    plain = "größe 组 \U0001f468\u200d\U0001f469 עברית a\tb\nc $x^2$ \\"
    assert visible(plain) == plain
    assert visible("a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff") == (
        r"a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff"
    )
