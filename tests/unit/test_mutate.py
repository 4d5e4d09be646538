"""The runner of seeded changes finds lines that have moved, and its areas have tests."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
assert SPEC and SPEC.loader
mutate = sys.modules["mutate"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutate)

TEXT = """\
def f(x):
    if x:
        return x + 1
    return x + 1


def g(x):
    return x + 1
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "from" / "src" / "forkpoint" / "ops").mkdir(parents=True)
    (tmp_path / "from" / "src" / "forkpoint" / "ops" / "one.py").write_text(TEXT)
    return mutate.Tree(tmp_path / "from", tmp_path / "to")


@pytest.mark.parametrize("file", ["ops/one.py", "before_it_moved.py"])
def test_a_change_is_made_within_its_function(tree, file: str) -> None:
    changed = tree.make(mutate.Change(file, "g", "return x + 1", "return x - 1"))
    assert changed.read_text() == TEXT.removesuffix("x + 1\n") + "x - 1\n"


def test_changes_that_no_longer_apply(tree) -> None:
    assert tree.make(mutate.Change("ops/one.py", "f", "return x + 1", "pass", nth=2)) is None
    assert tree.make(mutate.Change("ops/one.py", "h", "return x + 1", "pass")) is None


def test_a_drawn_change_can_be_made(tree) -> None:
    for change in mutate.draw(tree.source, 4, 0):
        path = tree.make(change)
        assert path and change.new in path.read_text() != TEXT
        tree.write(path, TEXT)


def test_areas_have_files_and_tests() -> None:
    for area, patterns in mutate.AREAS.items():
        for pattern in (f"src/forkpoint/{area}*", *patterns):
            assert any(ROOT.glob(pattern)), f"{area}: {pattern}"


def test_every_kept_change_names_lines_that_occur_once() -> None:
    kept = json.loads((ROOT / "scripts" / "mutations.json").read_text(encoding="utf-8"))
    for entry in kept:
        change = mutate.Change(**entry)
        path = ROOT / "src" / "forkpoint" / change.file
        assert path.exists(), change
        anywhere = dataclasses.replace(change, scope="")
        places = list(mutate._places(path, change))
        assert len(places) == 1 == len(list(mutate._places(path, anywhere))), change
