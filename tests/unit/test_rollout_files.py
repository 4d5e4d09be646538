"""Reading and writing rollout files: the round trip is exact, and every damage is named."""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from made_traces import rollout_lists

from forkpoint import load_rollouts, save_rollouts
from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from lanes import slow_besides

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
GOOD = '{"token_ids":[1,2,3],"loss_mask":[0,1,1],"advantage":0.5,"rollout_id":"a"}'


def refusal(*parts: str) -> str:
    """A pattern for a message that holds all the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "r.jsonl"
    path.write_bytes("\n".join(lines).encode())
    return path


def many(count: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [
        Rollout(rng.integers(0, 50_000, 500), [0] + [1] * 499, -rng.random(500), rollout_id=i)
        for i in range(count)
    ]


@pytest.mark.parametrize("suffix", slow_besides([".jsonl.gz"], SUFFIXES))
@given(rollouts=rollout_lists())
@settings(max_examples=15, deadline=None)
def test_round_trip_is_exact(suffix, rollouts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"r{suffix}"
        save_rollouts(path, rollouts)
        assert load_rollouts(path) == rollouts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_over_many_blocks(tmp_path, suffix):
    rollouts = many(120)  # more than one block of the reader, compressed too
    path = tmp_path / f"r{suffix}"
    save_rollouts(path, RolloutBatch(rollouts))
    assert path.stat().st_size > 2**18
    assert load_rollouts(path) == rollouts
    assert load_rollouts(path, limit=3) == rollouts[:3]
    assert load_rollouts(str(path), limit=1000) == rollouts


def test_unknown_keys_go_into_extras(tmp_path):
    path = write(
        tmp_path, GOOD[:-1] + ',"reward":1.5,"extras":{"turns":[2]}}', GOOD.replace('"a"', '"b"')
    )
    first, second = load_rollouts(path)
    assert first.extras == {"reward": 1.5, "turns": [2]}
    assert second.extras is None
    save_rollouts(path, [first])
    record = json.loads(path.read_text())
    assert record["extras"] == {"reward": 1.5, "turns": [2]}
    assert '"loss_mask":[0,1,1]' in path.read_text()  # false and true would be longer
    assert "reward" not in record
    assert "weights" not in record


LINES = [
    ("3", ["is 3", "one JSON object"]),
    ("[" * 200_000, ["nested too deep"]),
]


@pytest.mark.parametrize(("line", "parts"), LINES, ids=[str(i) for i in range(len(LINES))])
def test_refusals_name_file_line_and_field(tmp_path, line, parts):
    path = write(tmp_path, GOOD.replace('"a"', '"first"'), "", line, GOOD)
    with pytest.raises(RolloutError, match=refusal(f"{path}, line 3", *parts)) as caught:
        load_rollouts(path)
    assert len(str(caught.value)) < 500
    assert str(caught.value).count(str(path)) == 1
    assert len(load_rollouts(path, limit=1)) == 1  # what lies beyond the limit is not read


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_refuses_archives_that_are_cut_short_or_damaged(tmp_path, suffix):
    path = tmp_path / f"r{suffix}"
    save_rollouts(path, many(3))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for content in (whole[:-1], whole[:-6], whole[: len(whole) // 2], whole[:6], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(RolloutError, match=re.escape(str(path))):
            load_rollouts(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(RolloutError, match=refusal(f"{path} is truncated or damaged", "again")):
        load_rollouts(path)
    path.write_bytes(whole + b"rubbish")
    with pytest.raises(RolloutError, match="truncated or damaged"):
        load_rollouts(path)


class Unknown:
    def __repr__(self):
        return "Unknown()"


@pytest.mark.parametrize(
    ("extras", "parts"),
    [
        ({"x": float("nan")}, ["extras {'x': nan} cannot be written as JSON", "finite"]),
        ({"x": Unknown()}, ["extras {'x': Unknown()} cannot be written as JSON", "text"]),
        ({1: 2}, ["extras {1: 2} would come back from JSON changed", "text keys"]),
        ({"x": (1, 2)}, ["extras {'x': (1, 2)} would come back", "no tuples"]),
    ],
)
def test_save_refuses_extras_that_json_cannot_give_back(tmp_path, extras, parts):
    path = write(tmp_path, GOOD)
    rollouts = [Rollout([1], [0], 1.0), Rollout([1], [0], 1.0, rollout_id="b", extras=extras)]
    with pytest.raises(RolloutError, match=refusal("Rollout 'b' (position 1)", *parts)):
        save_rollouts(path, rollouts)
    assert path.read_text() == GOOD  # as before
    assert list(tmp_path.iterdir()) == [path]  # and no temporary file is left


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_rollouts_make_equal_files(tmp_path, suffix):
    save_rollouts(tmp_path / f"a{suffix}", many(2))
    save_rollouts(tmp_path / f"b{suffix}", many(2))
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.slow
def test_a_long_line_takes_time_in_proportion(suffix: str, tmp_path: Path) -> None:
    long = Rollout(range(1, 300_000), [0] + [1] * 299_998, 0.5)
    path = tmp_path / f"x{suffix}"
    save_rollouts(path, [long])
    began = time.process_time()
    assert load_rollouts(path) == [long]
    # Copying what there is of the line with each block would take ten times as long, and more.
    assert time.process_time() - began < 4


@pytest.mark.parametrize("package", ["zstandard", "pyarrow"])
def test_a_missing_extra_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.zst"
    save_rollouts(path, many(1))
    if package == "pyarrow":
        path.write_bytes(b"PAR1" + path.read_bytes())
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"zstandard": "zstd", "pyarrow": "parquet"}[package]
    with pytest.raises(ConfigError, match=rf"x\.zst is .*{package}.*'forkpoint\[{extra}\]'"):
        load_rollouts(path)
    if package == "zstandard":
        with pytest.raises(ConfigError, match=r"ends in \.zst takes zstandard.*forkpoint\[zstd\]"):
            save_rollouts(path, many(1))
