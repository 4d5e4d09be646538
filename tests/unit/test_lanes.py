"""Lanes of steps on stages of a pipeline: their times, their file, and how they are drawn."""

import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from forkpoint import Config, ConfigError, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.apps.cli.text import visible
from forkpoint.apps.report import draw_lanes
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.lanes import Lane, Lanes, lanes_of, measured_lane, read_lanes
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


def drawn_groups(lanes: Lanes, path: Path) -> dict[str, int]:
    """Bars of each group of the picture of lanes that has a name."""
    draw_lanes(path, lanes)
    tree = ElementTree.fromstring(path.read_bytes())
    found = {}
    for group in tree.iter("{http://www.w3.org/2000/svg}g"):
        name = group.get("id", "")
        if "stage-" in name:
            found[name] = len(group.findall(".//{http://www.w3.org/2000/svg}path")) or len(
                group.findall(".//{http://www.w3.org/2000/svg}use")
            )
    return found


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_predicted_lanes(activations: str, tmp_path: Path) -> None:
    found = made(activations)
    found.save(tmp_path / "lanes.json")
    assert read_lanes(tmp_path / "lanes.json") == found


@pytest.mark.parametrize("scores", [True, False])
def test_measured_lanes_of_images(scores: bool, tmp_path: Path) -> None:
    """Features that scores have read belong to their pass, and a file of lanes has encoders."""
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
    Lanes(unit="FLOPs", predicted=(lane, frozen)).save(tmp_path / "lanes.json")
    assert read_lanes(tmp_path / "lanes.json").predicted == (lane, frozen)
    drawn = drawn_groups(Lanes(unit="ms", predicted=(lane, frozen)), tmp_path / "lanes.svg")
    assert drawn["predicted-stage-0-encode"] == drawn["predicted-stage-1-encode"] == 2


def test_a_lane_a_stage_is_drawn(tmp_path: Path) -> None:
    bars = {
        "stage-0-forward": 1,
        "stage-0-backward": 2,
        "stage-0-recompute": 1,
        "stage-0-idle": 2,
        "stage-1-forward": 1,
        "stage-1-idle": 2,
    }
    lanes, path = Lanes(unit="ms", predicted=(ONE, TWO)), tmp_path / "lanes.svg"
    assert drawn_groups(lanes, path) == {f"predicted-{name}": n for name, n in bars.items()}
    both = replace(lanes, measured=(ONE, TWO))
    assert drawn_groups(both, path) == {
        f"{how}-{name}": n for how in ("predicted", "measured") for name, n in bars.items()
    }


def test_the_command_draws_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "lanes.json", tmp_path / "lanes.png"
    lanes = Lanes(unit="FLOPs", predicted=(ONE, TWO), measured=(ONE, TWO), peak_bytes=(1e9, 2e9))
    lanes.save(file)
    arguments = ["report", str(file), "--output", str(picture)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    # Stage 0 runs 7 of 10, stage 1 runs 3.
    assert "measured: 50.0% of the stages' time idle; by stage 30%, 70%" in said
    assert "953.7 MiB, 1.9 GiB" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    replace(lanes, measured=()).save(file)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle"] == {"predicted": pytest.approx([0.3, 0.7])}
    for wrong in (["report", str(tmp_path / "none.json")], [*arguments[:-1], "page.html"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forkpoint.apps.cli.options.find_spec", lambda name: None)
    assert main(["report", "lanes.json"]) == 2
    assert "pip install 'forkpoint[report]'" in capsys.readouterr().err


def test_text_is_shown_as_it_is_but_for_invisible_characters() -> None:
    plain = "größe 组 \U0001f468\u200d\U0001f469 עברית a\tb\nc $x^2$ \\"
    assert visible(plain) == plain
    assert visible("a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff") == (
        r"a\x1b[2J\u202eb\r\ud800\u2028\x9b\ufeff"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unit": "miles"}, "lanes.unit is 'miles'"),
        ({"predicted": []}, "lanes has 0 predicted lanes"),
        ({"peak_bytes": [1.0]}, "and 1 peaks"),
        ({"more": 1}, "more"),
        (
            {"predicted": [{"events": ["forward x"], "begins": [], "ready": [], "ends": []}]},
            "lists",
        ),
        ({"predicted": [{"events": ["x"], "begins": [0], "ready": [0], "ends": [1]}]}, "event 'x'"),
        (
            {"predicted": [{"events": ["forward x"], "begins": [2], "ready": [1], "ends": [3]}]},
            "not in order at 2",
        ),
        (
            {
                "predicted": [
                    {"events": ["forward x"], "begins": [0], "ready": [0], "ends": [1e308]}
                ]
            },
            r"the time 1e\+308; times are at most 1e\+30",
        ),
    ],
)
def test_files_that_are_no_lanes(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    Lanes(unit="ms", predicted=(ONE, TWO)).save(path)
    values = json.loads(path.read_text())
    values["lanes"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"{path.name} is not a file of lanes: .*{said}"):
        read_lanes(path)


def test_paths_of_lanes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lanes(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="is not a file of lanes: a pipe or a device"):
        read_lanes(Path(os.devnull))
    with pytest.raises(ConfigError, match="cannot be written"):
        Lanes(unit="ms", predicted=(ONE,)).save(tmp_path)
