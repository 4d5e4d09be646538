"""Replays' folders that somebody has changed: a report, and a replay that resumes, read or refuse.

The long run is `python tests/fuzz/run_folders.py --cases 5000`.
"""

import json
from pathlib import Path

import fuzz_folders
import pytest
from fuzz_folders import Base, Tally, faults_of_page, make_bases, try_one

REPORTS, REPLAYS = 60, 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def bases(place: Path) -> list[Base]:
    return make_bases(place, "recompute")


def said(tally: Tally) -> str:
    return json.dumps(tally.failures[:3], indent=1)


def test_reports_of_changed_folders(bases: list[Base], place: Path) -> None:
    tally = Tally()
    for seed in range(REPORTS):
        try_one(bases, seed, place, tally, resume=False)
    assert not tally.failures, said(tally)
    assert min(tally.codes["report 0"], tally.codes["report 2"]) > REPORTS / 5, tally.codes


def test_replays_that_resume_changed_folders(bases: list[Base], place: Path) -> None:
    tally = Tally()
    for seed in range(2_000, 2_000 + REPLAYS):
        try_one(bases, seed, place, tally)
    assert not tally.failures, said(tally)
    assert tally.codes["replay 0"] > 0 and tally.codes["replay 2"] > REPLAYS / 3, tally.codes


# The fuzzer can fail -----------------------------------------------------------------------------


def test_defects_are_found(bases: list[Base], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.apps.replay.reading.PLANNED", lambda value, _: dict(value))
    tally = Tally()
    for seed in range(25):
        try_one(bases, seed, place, tally, resume=False)
    assert tally.codes["report 70"] > 1
    assert any("exit code 70" in failure["what"] for failure in tally.failures)


def test_refusals_that_change_a_folder_are_found(
    bases: list[Base], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fuzz_folders.call

    def careless(*arguments: str) -> fuzz_folders.Outcome:
        (bases[0].folder / "rows.jsonl").unlink(missing_ok=True)
        return real(*arguments)

    monkeypatch.setattr(fuzz_folders, "call", careless)
    tally = Tally()
    try_one(bases, 0, place, tally, resume=False)
    assert any("changed the folder" in failure["what"] for failure in tally.failures)


def test_pages_with_other_elements_are_found() -> None:
    good = '<!doctype html><p class="x">a</p>'
    assert faults_of_page(good) == []
    for bad in ("<iframe>", '<p onclick="x">', "<script></script>", '<p style="x">', "<a>"):
        assert faults_of_page(good + bad)
