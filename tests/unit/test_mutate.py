"""The runner of seeded changes finds lines that have moved, and its areas have tests."""

import dataclasses
import importlib.util
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


def test_a_change_is_made_within_its_function(tree) -> None:
    changed = tree.make(mutate.Change("ops/one.py", "g", "return x + 1", "return x - 1"))
    assert changed.read_text() == TEXT.removesuffix("x + 1\n") + "x - 1\n"


def test_areas_have_files_and_tests() -> None:
    for area, patterns in mutate.AREAS.items():
        for pattern in (f"src/forkpoint/{area}*", *patterns):
            assert any(ROOT.glob(pattern)), f"{area}: {pattern}"


def test_every_kept_change_names_lines_that_occur_once() -> None:
    for change in mutate.read_changes(ROOT / "scripts" / "mutations.json"):
        path = ROOT / "src" / "forkpoint" / change.file
        assert path.exists(), change
        anywhere = dataclasses.replace(change, scope="")
        assert len(list(mutate.places(path, change))) == 1, change
        assert len(list(mutate.places(path, anywhere))) == 1, change
