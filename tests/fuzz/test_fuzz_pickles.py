"""Mutations of trainers' pickles and torch files: some of a fixed seed, and none beyond it."""

import sys
from pathlib import Path

import fuzz_pickles
import pytest
from fuzz_pickles import corpus, fuzz, write_corpus
from mutate_pickles import Mutations

from lanes import slow_besides

SEED, COUNT = 20274, 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are Linux's")


def test_mutations_of_a_fixed_seed() -> None:
    tally = fuzz(1000, SEED, 2)
    assert not tally.faults
    assert tally.outcomes.total() == 1000
    assert tally.outcomes["read"] > 30, "hardly a mutation gets past the first bytes"
    assert tally.outcomes["refused, could run code"] > 100
    assert tally.outcomes["refused, its rollouts"] > 10


def test_mutations_are_the_same_every_time(tmp_path: Path) -> None:
    files = corpus()
    one, other = (Mutations(files, ["numpy.dtype"], [b"N"]) for _ in range(2))
    drawn = [one.draw(f"1/{n}") for n in range(60)]
    assert drawn == [other.draw(f"1/{n}") for n in range(60)]
    assert len({content for _, content in drawn}) > 50
    write_corpus(tmp_path)
    assert (tmp_path / "corpus.json").stat().st_size > 50_000


# The fuzzer can fail -----------------------------------------------------------------------------

BUGS = {
    "traceback": "1 / 0",
    "crash": "os.abort()",
    "too slow": "time.sleep(60)",
    "growth": "b'x' * (64 << 20)",
    "ran": "os.system('true')",
    "file not named": "pickles._File._refusal = lambda self, error: RolloutError('damaged')",
}
"""Action at an opcode that does not exist, which only mutations have."""
WORKER = """
import os, sys, time
sys.path.insert(0, {folder!r})
import fuzz_pickles
from forkpoint import RolloutError
from forkpoint.formats import pickle_machine
from forkpoint.formats import pickles
fuzz_pickles.MOST_SECONDS = 1
opcode = pickle_machine._opcode
def with_bug(code):
    {bug}
    return opcode(code)
pickle_machine._opcode = with_bug
fuzz_pickles.main()
"""


@pytest.mark.parametrize("outcome", slow_besides(("traceback", "ran"), BUGS))
def test_bugs_are_found(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_pickles, "MOST_GROWTH_BYTES", 32 << 20)
    program = WORKER.format(folder=str(Path(__file__).parent), bug=BUGS[outcome])
    tally = fuzz(COUNT, SEED, 1, ("-c", program))
    assert outcome in {fault["outcome"] for fault in tally.faults}
