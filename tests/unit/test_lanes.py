"""Lanes of tests: each test is run by one command, and CI runs those that need no GPU."""

import ast
import re
import tomllib
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import settings

from lanes import slow_besides
from pairwise import pairwise

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
MARKERS = {marker.partition(":")[0] for marker in OPTIONS["ini_options"]["markers"]}
GPU = {"gpu", "multi_gpu"}


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, f"there is no make {target}"
    no_gpu = re.search(r"^no_gpu := (.*)$", MAKEFILE, re.MULTILINE)
    assert no_gpu
    return found[1].replace("$(no_gpu)", no_gpu[1])


def runs(target: str, marks: set[str]) -> bool:
    """Whether the command runs a test with these marks."""
    expression = re.search(r'-m "?([a-z_ ]+)"?', recipe(target).partition("pytest")[2])
    assert expression
    return eval(expression[1].strip(), {name: name in marks for name in MARKERS})


def test_one_command_runs_a_test() -> None:
    every = [*MARKERS - {"examples"}]
    for marks in (set(x) for n in range(len(every)) for x in combinations(every, n)):
        if marks & GPU:
            assert not runs("test", marks) and not runs("test-slow", marks)
            assert runs("test-gpu", marks) == ("gpu" in marks)
        else:
            assert runs("test", marks) == ("slow" not in marks)
            assert runs("test-slow", marks) == ("slow" in marks and "ranks" not in marks)
            assert runs("test-ranks", marks) == ({"slow", "ranks"} <= marks)
        assert not runs("test-quick", marks) or runs("test", marks)


def test_make_check_runs_the_examples() -> None:
    assert not runs("test", {"examples"}) and not runs("test-slow", {"examples"})
    (line,) = [line for line in recipe("check").splitlines() if "tests/unit/test_docs.py" in line]
    assert "-m" not in line.partition("pytest")[2]
    marked = {path.name for path in (ROOT / "tests").rglob("*.py") if "examples" in marks_of(path)}
    assert marked == {"test_docs.py"}


def test_ci_runs_every_lane() -> None:
    script = (ROOT / ".ci/run").read_text()
    commands = re.findall(r"^make ([a-z-]+)", script, re.MULTILINE)
    lanes = re.findall(r"^for lane in (.*); do", script, re.MULTILINE)
    assert {"check", "test", "test-wheel"} == set(commands)
    assert [lane.split() for lane in lanes] == [["test-ranks", "test-slow"]]


@cache
def marks_of(path: Path) -> set[str]:
    """Names that a file takes of `pytest.mark`."""
    text = path.read_text(encoding="utf-8")
    if "mark" not in text:  # however it is spelt; most files need not be parsed
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and ast.unparse(node.value) == "pytest.mark"
    }


def test_examples_of_properties_are_drawn_from_a_fixed_seed() -> None:
    assert settings().derandomize


def test_marks_are_pytest_s_or_lanes() -> None:
    of_pytest = {"parametrize", "skipif", "usefixtures", "filterwarnings", "timeout", "xfail"}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert marks_of(path) <= of_pytest | MARKERS, path.name


def test_others_than_those_kept_are_marked() -> None:
    one, two, three = slow_besides([1, (2, 3)], [1, (2, 3), (4, 5)])
    assert (one, two) == (1, (2, 3))
    assert three == pytest.param(4, 5, marks=pytest.mark.slow)
    with pytest.raises(AssertionError, match=r"\[6\] are none of"):
        slow_besides([6], [1])


def test_every_pair_of_options_is_kept() -> None:
    options = ("ab", "xy", "123", [[], {}])
    rows = pairwise(*options)
    assert 6 <= len(rows) < 24
    for one, other in combinations(range(4), 2):
        pairs = {(repr(row[one]), repr(row[other])) for row in rows}
        assert len(pairs) == len(options[one]) * len(options[other])
