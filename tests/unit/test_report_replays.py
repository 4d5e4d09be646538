"""Reports of replays agree with their rows, in whatever state the folders are."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from reports import FINGERPRINT, SHAPE, made_up, steps, write_run

from forkpoint import ConfigError
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report.chapters import replay_chapter, typical_step
from forkpoint.apps.report.curves import drift_figure, drift_trend, loss_figure, speed_figure
from forkpoint.apps.report.runs import read_run
from forkpoint.plan import make_plan

# Curves -------------------------------------------------------------------------------------------


def test_rows_come_back_from_json() -> None:
    for step in steps([1e-9, 2e-9], event_memory_bytes=(4, 5)):
        again = ReplayStep.from_dict(json.loads(json.dumps(step.to_dict())))
        assert again == step


def test_drift_says_whether_there_is_a_trend() -> None:
    random = np.random.default_rng(0)
    noise = np.cumsum(random.normal(size=60)) * 1e-9
    for means, said in ((noise, "no trend"), (noise + 5e-9 * np.arange(1, 61), "a trend")):
        figure = drift_figure(steps(means.tolist()))
        assert figure is not None and f": {said} (" in figure.caption
        low, high = figure.charts[0].band or ((), ())
        inside = low[-1] <= means[-1] <= high[-1]
        assert inside == (said == "no trend"), "the band is the test that the caption tells of"
    few = drift_figure(steps([1e-9] * 5))
    assert few is not None and "nothing can be said" in few.caption
    assert drift_trend(steps([math.nan] * 30)) is None


def test_what_has_no_baseline() -> None:
    alone = [
        ReplayStep.from_dict({**step.to_dict(), "dense": None, "difference": None})
        for step in steps([1e-9] * 3)
    ]
    assert drift_figure(alone) is None
    assert speed_figure(alone).charts[0].series[0].name == "counted bound"
    assert len(loss_figure(alone).charts) == 2


def test_speed_is_dense_over_shared() -> None:
    figure = speed_figure(steps([0.0] * 3))
    bound, speed = figure.charts[0].series
    assert list(bound.values) == [2.5] * 3
    assert list(speed.values) == pytest.approx([30 / 11, 30 / 12, 30 / 13])
    assert "2.50x" in figure.caption


def test_a_step_with_compilation_does_not_hide_the_others() -> None:
    made = [step.to_dict() for step in steps([0.0] * 5)]
    made[0]["shared"]["ms"] = 9_000.0
    figure = speed_figure([ReplayStep.from_dict(step) for step in made])
    times = {series.name: list(series.values) for series in figure.charts[1].series}
    assert times["shared"] == [None, *[step["shared"]["ms"] for step in made[1:]]]
    assert None not in times["dense"]
    assert figure.notes and figure.notes[0].startswith("Not drawn: 1 time of a step above 4")
    assert figure.table.rows[0][3] == 9_000.0, "it is among the numbers"
    assert not speed_figure(steps([0.0] * 5)).notes


def test_numbers_that_are_none_are_gaps() -> None:
    figure = loss_figure(steps([0.0] * 3, loss=math.nan))
    assert list(figure.charts[0].series[1].values) == [None] * 3
    drift = drift_figure(steps([0.0, 1e-9, 0.0]))
    assert drift is not None
    assert list(drift.charts[1].series[2].values) == [None, 1e-9, None], "no logarithm of 0"


def test_the_typical_step_is_a_warm_one() -> None:
    found = typical_step(steps([0.0] * 4), FINGERPRINT)
    assert found is not None and found.step == 3
    assert typical_step(steps([0.0]), FINGERPRINT) is not None
    assert typical_step(steps([0.0]), "other") is None


# Folders of replays -------------------------------------------------------------------------------


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
        ("rows.jsonl", b"{\n", "rows.jsonl, line 1: this is not JSON"),
        ("rows.jsonl", b'{"step": 1}\n', "rows.jsonl, line 1: fingerprint is missing"),
        ("rows.jsonl", b"[]\n", "rows.jsonl, line 1: it is .*; it takes an object with step"),
        ("rows.jsonl", b"", "has no step yet"),
        (
            "plans.jsonl",
            b'{"fingerprint": "0123456789abcdef"}\n',
            "plans.jsonl, line 1: rollout_ids is missing",
        ),
        ("plans.jsonl", b"", "has no plan of the batch .* of step 1"),
        ("plans.jsonl", None, "plans.jsonl is missing"),
    ],
    ids=["broken", "foreign", "list", "empty", "plan", "no plan", "missing"],
)
def test_damaged_folders(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_up(), 2)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_run(folder)


def test_many_batches_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_up(), 2)
    other, more = made_up(groups=2), ReplayFolder(folder, resume=True)
    plan = make_plan(other, SHAPE)
    more.add_plans(plan.fingerprint, other, {"shared": plan})
    run = read_run(folder, most_batches=1)
    assert (len(run.planned), run.batches) == (1, 2)
    figures = {figure.name: figure for figure in replay_chapter(run).figures}
    assert figures["forest"].notes == ("Not drawn: 1 more of the batches.",)
    assert "Not drawn: 1 more of the batches." in figures["schedule"].notes
