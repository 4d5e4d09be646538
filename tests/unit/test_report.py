"""What a report says is what the plans and rows say; what it leaves out, it counts."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forkpoint
from forkpoint import Config, ConfigError, ModelShape, Rollout, RolloutBatch
from forkpoint.cli import main
from forkpoint.forest import build_forest, sort_rollouts
from forkpoint.plan import Plan, make_plan
from forkpoint.replay.folder import ReplayFolder
from forkpoint.replay.records import ParameterDifference, ReplayStep, StepRecord
from forkpoint.report import chapters, forests, schedules
from forkpoint.report.chapters import replay_chapter, rollouts_chapter, typical_step
from forkpoint.report.curves import drift_figure, drift_trend, loss_figure, speed_figure
from forkpoint.report.figure import Chapter, Figure, Table, Tile
from forkpoint.report.forests import draw_forest, forest_figure
from forkpoint.report.page import MOST_TABLE_ROWS, embedded, render_page
from forkpoint.report.plots import write_plots
from forkpoint.report.runs import read_run
from forkpoint.report.schedules import counted_lane, labelled_of_segments, timeline_figure
from forkpoint.rollout_files import save_rollouts
from forkpoint.synthetic import synthetic_rollouts

SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, value_dim=8, intermediate=64, vocab=61
)
CONFIGS = {
    "tree-across": Config(sharing="tree", boundary="across_rows", max_row_tokens=24),
    "group-in": Config(sharing="group", boundary="in_row"),
    "tree-mixed": Config(sharing="tree", boundary="mixed", max_row_tokens=48),
    "dense": Config(sharing="none"),
}
AWAY = {
    residency: Config(
        sharing="tree", boundary="across_rows", max_row_tokens=24, residency=residency
    )
    for residency in ("offload", "recompute")
}


def made_up(groups: int = 3, rollouts_per_group: int = 4) -> RolloutBatch:
    return RolloutBatch(
        synthetic_rollouts(
            groups=groups,
            rollouts_per_group=rollouts_per_group,
            prompt_tokens=30,
            system_tokens=10,
            response_tokens=8,
            vocab_size=61,
        )
    )


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
    plan = make_plan(batch, SHAPE, Config(sharing="tree", boundary="across_rows", max_row_tokens=7))
    order = sort_rollouts(batch.token_ids, batch.offsets, np.zeros(len(batch), np.int64))
    drawn = picture(plan, batch)
    assert drawn["segments"] == len(build_forest(order, len(batch))) < len(plan.forest)
    assert any("," in node["rows"] for node in drawn["nodes"]), "a segment cut into several rows"


@pytest.mark.parametrize("most", [1, 5, 9])
def test_what_is_not_drawn_is_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, Config(sharing="tree", boundary="in_row"))
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


def lane(plan: Plan, batch: RolloutBatch) -> dict[str, Any]:
    labelled = labelled_of_segments(plan, batch.loss_mask, batch.offsets)
    assert labelled.sum() == plan.labelled
    return counted_lane("shared", plan, labelled)


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_lengths_add_up_to_the_step(name: str) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS[name])
    made = lane(plan, batch)
    assert [event["name"] for event in made["events"]] == list(plan.events())
    assert made["total"] == pytest.approx(plan.shared.step_flops(SHAPE) / 1e9)
    assert made["unit"] == "GFLOP" and not made["measured"]


def test_what_is_computed_again_is_counted_again() -> None:
    batch = made_up()
    kept = lane(make_plan(batch, SHAPE, CONFIGS["tree-across"]), batch)
    plan = make_plan(batch, SHAPE, AWAY["recompute"])
    again = lane(plan, batch)
    assert [event["name"] for event in again["events"]] == list(plan.events())
    second = [event for event in again["events"] if event["kind"] == "R"]
    assert second and {event["phase"] for event in second} == {"C"}
    # The head is left to the second forward, so what is added is what the first ones cost.
    names = {event["name"][2:] for event in second}
    first = [e["size"] for e in again["events"] if e["kind"] == "F" and e["name"][2:] in names]
    assert again["total"] == pytest.approx(kept["total"] + sum(first))


@pytest.mark.parametrize("name", [*CONFIGS, *AWAY])
def test_what_is_held_reaches_the_predicted_peak(name: str) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, {**CONFIGS, **AWAY}[name])
    held = [event["held"] for event in lane(plan, batch)["events"]]
    assert max(held) == plan.predicted_peak_bytes
    assert min(held) > 0


def test_phases_by_hand() -> None:
    """One prompt of three responses, across rows: A, then B twice each, then C."""
    batch = made_up(groups=1, rollouts_per_group=3)
    plan = make_plan(
        batch, SHAPE, Config(sharing="group", boundary="across_rows", max_row_tokens=30)
    )
    events = lane(plan, batch)["events"]
    assert [(e["name"], e["phase"]) for e in events if e["name"][2] == "A"] == [
        ("F A0", "A"),
        ("B A0", "C"),
    ]
    children = [e for e in events if e["name"][2] != "A"]
    assert {e["phase"] for e in children} == {"B"} and len(children) >= 2
    parent = events[0]["held"]
    assert all(e["held"] > parent for e in children) and events[-1]["held"] == parent
    away = make_plan(
        batch,
        SHAPE,
        Config(sharing="group", boundary="across_rows", max_row_tokens=30, residency="recompute"),
    )
    again = lane(away, batch)["events"]
    assert [e["name"] for e in again[-2:]] == ["R A0", "B A0"]
    assert again[-1]["held"] == again[-2]["held"] == again[0]["held"] == parent
    assert all(e["held"] < k["held"] for e, k in zip(again[1:-2], events[1:-1], strict=True))


def test_without_a_model_tokens_are_shown() -> None:
    batch = made_up()
    made = lane(make_plan(batch), batch)
    assert made["unit"] == made["memory"]["unit"] == "tokens"
    figure = timeline_figure([("all", [made])], left_out=0)
    assert any("not times" in note for note in figure.notes)


def test_much_work_is_counted_in_a_larger_unit() -> None:
    batch = made_up()
    large = replace(SHAPE, vocab=61, hidden=8192, intermediate=32768, layers=80, windows=())
    plan = make_plan(batch, large)
    made = lane(plan, batch)
    assert made["unit"] == "TFLOP"
    assert made["total"] == pytest.approx(plan.shared.step_flops(large) / 1e12)


def test_long_schedules_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made_up()
    plan = make_plan(batch, SHAPE, CONFIGS["tree-across"])
    whole = lane(plan, batch)
    monkeypatch.setattr(schedules, "MOST_EVENTS", 4)
    cut = lane(plan, batch)
    assert len(cut["events"]) == 4 and cut["total"] == pytest.approx(whole["total"])
    assert cut["events_left_out"] == len(whole["events"]) - 4
    sizes = sum(event["size"] for event in cut["events"]) + cut["size_left_out"]
    assert sizes == pytest.approx(cut["total"])


# Curves -------------------------------------------------------------------------------------------


def record(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "loss": 1.0,
        "gradient_norm": 2.0,
        "ms": 10.0,
        "phase_ms": {"A": 0.0, "B": 8.0, "C": 0.0},
        "events": ("F A0", "B A0"),
        "event_ms": (3.0, 5.0),
        "event_memory_bytes": None,
        "sharing": "group",
        "boundary": "in_row",
        "rows": 1,
        "computed_tokens": 40,
        "flops": 100.0,
        "peak_memory_bytes": None,
        "predicted_peak_bytes": 1000,
    }
    return StepRecord(**{**values, **changes})


def steps(means: Sequence[float], **changes: Any) -> list[ReplayStep]:
    return [
        ReplayStep(
            step=n,
            fingerprint="f",
            lr=0.1,
            rollouts=4,
            logical_tokens=90,
            unique_tokens=41,
            dense_flops=250.0,
            shared=record(ms=10.0 + n, **changes),
            dense=record(ms=30.0),
            difference=ParameterDifference(
                max=abs(mean) * 9, mean=mean, mean_absolute=abs(mean), rms=abs(mean), rms_change=0.1
            ),
        )
        for n, mean in enumerate(means, start=1)
    ]


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


def test_numbers_that_are_none_are_gaps() -> None:
    figure = loss_figure(steps([0.0] * 3, loss=math.nan))
    assert list(figure.charts[0].series[1].values) == [None] * 3
    drift = drift_figure(steps([0.0, 1e-9, 0.0]))
    assert drift is not None
    assert list(drift.charts[1].series[2].values) == [None, 1e-9, None], "no logarithm of 0"


def test_the_typical_step_is_a_warm_one() -> None:
    found = typical_step(steps([0.0] * 4), "f")
    assert found is not None and found.step == 3
    assert typical_step(steps([0.0]), "f") is not None
    assert typical_step(steps([0.0]), "other") is None


# The page -----------------------------------------------------------------------------------------


def page_of(rows: Sequence[Sequence[Any]], text: str = "plain") -> str:
    table = Table(columns=("what", text), rows=rows)
    figure = Figure(name="t", title=text, caption=text, kind="table", table=table, notes=(text,))
    tile = Tile(value=text, label=text, remark=text)
    chapter = Chapter(title=text, subtitle=text, tiles=(tile,), figures=(figure,))
    return render_page(text, [chapter])


@pytest.mark.parametrize(
    "hostile",
    ["</script><script>alert(1)</script>", '"><img src=x onerror=y>', "@@data@@ @@body@@ \u2028"],
)
def test_text_from_outside_is_escaped_everywhere(hostile: str) -> None:
    page, plain = page_of([(hostile, hostile)], hostile), page_of([("plain", "plain")])
    for tag in ("<script", "</script", "<img", "onerror=y>", "<style"):
        assert page.count(tag) == plain.count(tag), tag
    assert page.count("<section") == 1, "a marker in a text is not filled in"


def test_embedded_json_cannot_end_its_element() -> None:
    value = {"<b>&</script>\u2028": ["<!--", math.nan, math.inf]}
    text = embedded(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"<b>&</script>\u2028": ["<!--", None, None]}


def test_nothing_is_asked_for() -> None:
    page = page_of([("a", 1)])
    assert "default-src 'none'" in page
    for tag in ("<link", "src=", "@import", "url("):
        for found in range(page.count(tag)):
            at = [n for n in range(len(page)) if page.startswith(tag, n)][found]
            assert page[at : at + 40].startswith(('<link rel="icon" href="data:,"', "url(#")), page[
                at : at + 60
            ]


def test_long_tables_say_what_they_leave_out() -> None:
    page = page_of([(n, n / 3) for n in range(MOST_TABLE_ROWS + 5)])
    assert f"The first {MOST_TABLE_ROWS:,} rows; 5 more are left out." in page
    assert page.count("<tr>") == MOST_TABLE_ROWS + 1
    assert f'data-value="{1 / 3!r}"' in page, "numbers are copied whole"


# Folders of replays -------------------------------------------------------------------------------


def write_run(folder: Path, batch: RolloutBatch, count: int) -> Path:
    """The folder of a replay of 30 steps that has come to step `count`."""
    plan = make_plan(batch, SHAPE, CONFIGS["group-in"])
    fixed = {
        "steps": 30,
        "model": {"kind": "Model", "config": {"model_type": "llama", "num_hidden_layers": 2}},
        "runs_on": {"device": "cpu"},
        "loss": "GRPO()",
        "max_grad_norm": None,
        **{name: {} for name in ("optimizer", "rate", "config", "batches")},
    }
    run = ReplayFolder(folder)
    run.open(fixed, {"file": "some.jsonl"})
    run.add_plans("f", batch, {"shared": plan})
    for step in steps([1e-9] * count):
        row = step.to_dict()
        events = plan.events()
        row["shared"] |= {"events": events, "event_ms": [1.0] * len(events)}
        run.add_row({**row, "dense": None})
    return folder


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
        ("rows.jsonl", b"{\n", "rows.jsonl, line 1 is not JSON"),
        ("rows.jsonl", b'{"step": 1}\n', "rows.jsonl, line 1 is no row"),
        ("rows.jsonl", b"[]\n", "rows.jsonl, line 1 is no JSON object"),
        ("rows.jsonl", b"", "has no step yet"),
        ("plans.jsonl", b'{"fingerprint": "f"}\n', "plans.jsonl, line 1 is no plan"),
        ("plans.jsonl", None, "plans.jsonl is missing"),
    ],
    ids=["broken", "foreign", "list", "empty", "plan", "missing"],
)
def test_damaged_folders(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_up(), 2)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_run(folder)


def test_many_batches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapters, "MOST_BATCHES", 1)
    batch = made_up()
    folder = write_run(tmp_path / "run", batch, 2)
    other = ReplayFolder(folder, resume=True)
    other.add_plans("g", batch, {"shared": make_plan(batch, SHAPE)})
    figures = {figure.name: figure for figure in replay_chapter(read_run(folder)).figures}
    assert figures["forest"].notes == ("Not drawn: 1 more of the batches.",)
    assert "Not drawn: 1 more of the batches." in figures["schedule"].notes


# Plots and the command ----------------------------------------------------------------------------


def test_plots(tmp_path: Path) -> None:
    batch = made_up()
    plan, dense = (make_plan(batch, SHAPE, CONFIGS[n]) for n in ("tree-across", "dense"))
    chapter = rollouts_chapter("a $x_ b.jsonl", [(batch, plan, dense)])
    drift = drift_figure(steps(np.linspace(0, 1e-9, 30).tolist()))
    assert drift is not None
    both = [chapter, Chapter(title="b", subtitle="", tiles=(), figures=(drift,))]
    written = write_plots(both, tmp_path / "plots")
    names = {path.name for path in written}
    assert {"0-a-x-b-forest.png", "0-a-x-b-schedule.svg", "1-b-drift-0.png"} <= names
    for path in written:
        begin = path.read_bytes()[:200]
        assert begin.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in begin
    before = {path: path.read_bytes() for path in written if path.suffix == ".svg"}
    write_plots(both, tmp_path / "plots")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_command_without_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "rollouts.jsonl"), "--output", str(page)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["figures"] == [["forest", "schedule", "counts"]]
    assert result["bytes"] == len(page.read_bytes())
    assert "bound on the speed-up" in out


def test_the_command_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of a trace share nothing with each other; the first of many are drawn."""
    made, trace, page = list(made_up()), str(tmp_path / "trace"), tmp_path / "page.html"
    given = ["report", trace, "--output", str(page), "--sharing", "tree"]
    with forkpoint.record(trace) as recorder:
        assert main(given) == 2
        assert "has no whole batch yet" in capsys.readouterr().err
        assert main(["plan", trace]) == 2
        assert "has no whole batch yet" in capsys.readouterr().err
        for _ in range(14):
            recorder.add(made)
    assert main(given) == 0
    out = capsys.readouterr().out
    plan = make_plan(RolloutBatch(made), None, Config(sharing="tree"))
    assert "on these 14 recorded batches, each on its own. Nothing was run." in out
    run, logical = 14 * plan.computed_tokens, 14 * plan.logical_tokens
    assert f"({run:,} of {logical:,} given)" in out
    text = page.read_text()
    assert (
        "batch 11: " in text
        and "batch 12: " not in text
        and "Not drawn: 2 more of the batches." in text
    )
    assert main([*given, "--limit", "1"]) == 0, "a part of a trace is one batch"
    assert "taken as one batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "does not exist"),
        ((".",), "holds no replay"),
        (("rollouts.jsonl", "--output", "no/page.html"), "does not exist"),
    ],
    ids=["file", "folder", "output"],
)
def test_what_cannot_be_reported(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_rollouts(tmp_path / "rollouts.jsonl", list(made_up()))
    assert main(["report", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
