"""Files that inflate, declare what is not there, or take time: every command ends with exit code 0
or 2, within 40 seconds and 1 GiB, under a limit on its address space.

What takes longer to try is in tests/fuzz/readers.py.
"""

import sys
from pathlib import Path

import pytest
from commands import write_config

import contained
from bombs import CLASSES, Bomb
from pairwise import FULL

GIB = 1 << 30
MOST_CPU_SECONDS = 40
NAMES = [(kind, name) for kind, bombs in CLASSES.items() for name, b in bombs.items() if not b.slow]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


def bomb(kind: str, name: str) -> Bomb:
    return CLASSES[kind][name]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    made = {}
    for key in NAMES:
        made[key] = bomb(*key).write(tmp_path_factory.mktemp("bomb"))
    return made


@pytest.fixture(scope="module")
def outcomes(
    files: dict[tuple[str, str], Path],
) -> dict[tuple[str, str], contained.Outcome]:
    commands = [["plan", str(path), *bomb(*key).options] for key, path in files.items()]
    return dict(zip(files, contained.run(commands, address_bytes=GIB), strict=True))


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_plan_ends(
    kind: str, name: str, outcomes: dict[tuple[str, str], contained.Outcome]
) -> None:
    check(outcomes[kind, name], 0 if bomb(kind, name).read else 2)


def test_an_inflating_file_names_the_limit(
    outcomes: dict[tuple[str, str], contained.Outcome],
) -> None:
    said = outcomes["compressed", "zeros in zstd"].err
    assert "inflates" in said and "128 times" in said and "--memory-limit" in said
    said = outcomes["compressed", "a rollout of 6 million tokens"].err
    assert "memory_limit is 640.0 MiB, the default for a file of" in said


COMMANDS = {
    "report": ("report", "FILE", "--output", "OUT.html"),
    "plan of a model": ("plan", "FILE", "--model", "CONFIG"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_end(
    command: str, files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """One file of each class that is refused, and small ones that are read."""
    config = write_config(tmp_path / "config.json")
    keys = [key for key in NAMES if bomb(*key).read and files[key].stat().st_size < 1 << 20]
    if not FULL:  # each file by one of the commands
        keys = keys[list(COMMANDS).index(command) :: len(COMMANDS)]
    keys += [next(key for key in NAMES if key[0] == kind and not bomb(*key).read)
             for kind in CLASSES]  # fmt: skip
    named = {"FILE": None, "OUT.html": tmp_path / "out.html", "CONFIG": config}
    jobs = [
        [str(files[key]) if word == "FILE" else str(named.get(word, word))
         for word in COMMANDS[command]] + list(bomb(*key).options)
        for key in keys
    ]  # fmt: skip
    for key, outcome in zip(keys, contained.run(jobs, address_bytes=GIB), strict=True):
        check(outcome, 0 if bomb(*key).read else 2)


def test_a_model_is_not_run_on_what_inflates(
    files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """No model is made: the address space would not do for torch."""
    config = str(write_config(tmp_path / "config.json"))
    path = str(files["compressed", "a rollout of 2 million tokens"])
    jobs = [[command, path, "--model", config] for command in ("verify", "replay")]
    for outcome in contained.run(jobs, address_bytes=GIB):
        check(outcome, 2)
        assert "inflates" in outcome.err and "2,000,000 tokens" in outcome.err


def check(outcome: contained.Outcome, code: int) -> None:
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert code == 0 or outcome.err.startswith("error: ")
    assert len(outcome.err) < 2000
    assert outcome.cpu_seconds < MOST_CPU_SECONDS
    assert outcome.peak_bytes < GIB
