"""Files that inflate, declare what is not there, or take time: every command ends with exit code 0
or 2, within 40 seconds and 1 GiB, under a limit on its address space.

`make test` tries a file or two of each class, `make test-slow` all of them.
"""

import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from commands import write_config

import contained
from bombs import CLASSES, Bomb
from lanes import slow_besides
from pairwise import FULL

GIB = 1 << 30
MOST_CPU_SECONDS = 40
Key = tuple[str, str]
NAMES: list[Key] = [(kind, name) for kind, bombs in CLASSES.items() for name in bombs]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


def bomb(kind: str, name: str) -> Bomb:
    return CLASSES[kind][name]


def first(kind: str, *, read: bool) -> list[Key]:
    """The first file of a class that is read, or that is refused, if there is one."""
    return [key for key in NAMES if key[0] == kind and bomb(*key).read == read][:1]


INFLATING = [("compressed", "zeros in zstd"), ("compressed", "a rollout of 6 million tokens")]
FEW = [key for kind in CLASSES for read in (True, False) for key in first(kind, read=read)]
FEW += [key for key in INFLATING if key not in FEW]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Key], Path]:
    """Writes a file, once."""
    return cache(lambda key: bomb(*key).write(tmp_path_factory.mktemp("bomb")))


@pytest.fixture(scope="module")
def outcome(files: Callable[[Key], Path]) -> Callable[[Key], contained.Outcome]:
    """Outcome of the plan of a file, with which those of all files of its lane are made."""

    @cache
    def outcomes(few: bool) -> dict[Key, contained.Outcome]:
        keys = FEW if few else [key for key in NAMES if key not in FEW]
        commands = [["plan", str(files(key)), *bomb(*key).options] for key in keys]
        return dict(zip(keys, contained.run(commands, address_bytes=GIB), strict=True))

    return lambda key: outcomes(key in FEW)[key]


@pytest.mark.parametrize(("kind", "name"), slow_besides(FEW, NAMES))
def test_a_plan_ends(kind: str, name: str, outcome: Callable[[Key], contained.Outcome]) -> None:
    check(outcome((kind, name)), 0 if bomb(kind, name).read else 2)


def test_an_inflating_file_names_the_limit(outcome: Callable[[Key], contained.Outcome]) -> None:
    zeros, tokens = (outcome(key).err for key in INFLATING)
    assert "inflates" in zeros and "128 times" in zeros and "--memory-limit" in zeros
    assert "memory_limit is 640.0 MiB, the default for a file of" in tokens


COMMANDS = {
    "report": ("report", "FILE", "--output", "OUT.html"),
    "plan of a model": ("plan", "FILE", "--model", "CONFIG"),
}


@pytest.mark.parametrize(
    ("command", "few"),
    slow_besides([], [("report", True), *product(COMMANDS, [False])]),
    ids=lambda given: given if isinstance(given, str) else "few" if given else "every",
)
def test_other_commands_end(
    command: str, few: bool, files: Callable[[Key], Path], tmp_path: Path
) -> None:
    """One file of each class that is refused, and small ones that are read."""
    config = write_config(tmp_path / "config.json")
    keys = [key for key in (FEW if few else NAMES) if bomb(*key).read and not bomb(*key).slow]
    keys = [key for key in keys if files(key).stat().st_size < 1 << 20]
    if not FULL and not few:  # each file by one of the commands
        keys = keys[list(COMMANDS).index(command) :: len(COMMANDS)]
    keys += [key for kind in CLASSES for key in first(kind, read=False)]
    named = {"FILE": None, "OUT.html": tmp_path / "out.html", "CONFIG": config}
    jobs = [
        [str(files(key)) if word == "FILE" else str(named.get(word, word))
         for word in COMMANDS[command]] + list(bomb(*key).options)
        for key in keys
    ]  # fmt: skip
    for key, outcome in zip(keys, contained.run(jobs, address_bytes=GIB), strict=True):
        check(outcome, 0 if bomb(*key).read else 2)


def test_a_model_is_not_run_on_what_inflates(files: Callable[[Key], Path], tmp_path: Path) -> None:
    """No model is made: the address space would not do for torch."""
    config = str(write_config(tmp_path / "config.json"))
    path = str(files(("compressed", "a rollout of 2 million tokens")))
    jobs = [[command, path, "--model", config] for command in ("verify", "replay")]
    for outcome in contained.run(jobs, address_bytes=GIB):
        check(outcome, 2)
        assert "inflates" in outcome.err and "2,000,000 tokens" in outcome.err


def check(outcome: contained.Outcome, code: int) -> None:
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    # A slow machine may show progress before.
    said = [line for line in outcome.err.splitlines() if not line.startswith("planning: ")]
    assert code == 0 or said[0].startswith("error: ")
    assert len(outcome.err) < 2000
    assert outcome.cpu_seconds < MOST_CPU_SECONDS
    assert outcome.peak_bytes < GIB
