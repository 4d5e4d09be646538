"""The benchmark of other methods on a CPU: their gradients, and the tree that is packed."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.commands import main
from benchmarks.steps import packed
from benchmarks.steps.peers import PACKAGES, SIDES, installed

SMALL = ("--tiny", "--length", "4096", "--tokens", "128", "--responses", "4", "--repeats", "1")
HERE = {name for side, name in SIDES.items() if installed(side)}
"""Names in rows of the sides whose packages are there."""


def rows_of(path: Path) -> dict[str, dict]:
    return {row["metric"]: row for row in map(json.loads, path.read_text().splitlines())}


def run(folder: Path, *options: str) -> tuple[int, dict[str, dict]]:
    output = folder / "rows.jsonl"
    code = main(["peers", *SMALL, *options, "--json", "--output", str(output)])
    return code, rows_of(output)


def test_a_tree_is_packed_depth_first() -> None:
    rollouts = [np.array(ids) for ids in ([1, 2, 5], [1, 2, 3, 4], [1, 9], [1, 2, 3, 7])]
    row = packed.packed(rollouts)
    assert row.ids_T.tolist() == [1, 2, 3, 4, 7, 5, 9]
    assert row.depths_T.tolist() == [0, 1, 2, 3, 3, 2, 1]
    for ids, place in zip(rollouts, row.places, strict=True):
        assert row.ids_T[place].tolist() == ids.tolist()
        for q in place:  # a token sees its rollout up to itself, and nothing else
            seen = [k for k in range(len(row.ids_T)) if row.sees(q, k, row.ends_T)]
            assert seen == [k for k in place if k <= q]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gradients_and_times_of_every_side(tmp_path: Path) -> None:
    code, rows = run(tmp_path)
    assert code == 0
    compared = HERE - {"plain loop"}
    assert compared >= {"tree packing", "forkpoint", "forkpoint, sharing none"}
    for name in compared:
        assert rows[f"{name}: apart from the plain loop in float64"]["value"] < 1e-6
    for name in HERE:
        assert rows[f"{name}: update"]["value"] > 0
        if name != "forkpoint":
            ratio = rows[f"{name}: update"]["value"] / rows["forkpoint: update"]["value"]
            assert rows[f"faster than {name}"]["value"] == pytest.approx(ratio)
            assert rows[f"faster than {name}"]["bound"] > 1


def test_a_side_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PACKAGES, "trl", "no_such_package")
    assert main(["peers", *SMALL, "--sides", "trl", "--output", str(tmp_path / "rows")]) == 2
    assert "no_such_package, which is not installed" in capsys.readouterr().err
