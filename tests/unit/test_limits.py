"""The limit on memory: what is estimated, what is kept, and what is refused before it is taken."""

import gzip
import json
import random
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import ConfigError, Rollout, RolloutError, load_rollouts
from forkpoint.rollouts.formats.json_lines import json_lines, parse_object
from forkpoint.rollouts.formats.limits import (
    LEAST_BYTES,
    TIMES_FILE,
    MemoryLimit,
    bytes_of,
    bytes_on_disk,
    tree_bytes,
)
from forkpoint.rollouts.traces import open_rollouts
from forkpoint.units import MIB, exactly, format_bytes, size_in_bytes


def line(ids: Iterable[int], **more: Any) -> bytes:
    """A rollout as a line of JSON, everything but the first token trained."""
    ids = list(ids)
    values = {"token_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1), "advantage": 1, **more}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


GOOD = line([1, 2, 3])
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def write(folder: Path, content: bytes, name: str = "x.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_sizes_are_read_and_shown(tmp_path: Path) -> None:
    sizes = {"8GB": 8 * 10**9, "8 GiB": 8 << 30, "1.5g": 15 * 10**8, " 7 ": 7, 1024: 1024}
    assert {size: size_in_bytes(size) for size in sizes} == sizes
    for wrong in ("", "-1", "8XB", "1e9", 0, 1.5, True, "9" * 100, b"8GB"):
        with pytest.raises(ConfigError, match=r"memory_limit is .*; it takes a number of bytes"):
            load_rollouts(write(tmp_path, GOOD), memory_limit=wrong)  # type: ignore[arg-type]
    shown = [format_bytes(n) for n in (0, 1023, 1024, 5 << 20, 3 << 29)]
    assert shown == ["0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "1.5 GiB"]
    assert (exactly(1000), exactly(1097856)) == ("1000 bytes", "1.0 MiB (1,097,856 bytes)")


TOTAL = "forkpoint.rollouts.formats.limits.host_memory_bytes"


def test_the_defaults_are_by_the_file_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = write(tmp_path, GOOD), write(tmp_path, bytes(50 * MIB), "large")
    of_large = TIMES_FILE * bytes_on_disk(large)
    assert of_large > LEAST_BYTES
    for total in (4 * LEAST_BYTES, 0):
        monkeypatch.setattr(TOTAL, lambda total=total: total)
        for path, piece in ((small, LEAST_BYTES), (large, of_large)):
            limit = MemoryLimit(path)
            assert (limit.piece_bytes, limit.limit_bytes) == (piece, max(piece, total // 2))
    limit = MemoryLimit(large, 5)
    assert limit.piece_bytes == limit.limit_bytes == 5


def test_rollouts_of_a_compressed_file_take_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.rollouts.formats.limits.LEAST_BYTES", 200_000)
    path = write(tmp_path, gzip.compress(line(range(1000)) * 100))
    monkeypatch.setattr(TOTAL, lambda: 4 * MIB)
    assert len(load_rollouts(path)) == 100
    monkeypatch.setattr(TOTAL, lambda: MIB)
    half = r"are held, but memory_limit is 512.0 KiB, the default, half of the memory of"
    with pytest.raises(RolloutError, match=half):
        load_rollouts(path)
    piece = r"line 1 takes .* memory_limit is 195.3 KiB, the default for a piece of this file"
    with pytest.raises(RolloutError, match=piece):
        load_rollouts(write(tmp_path, gzip.compress(line(range(5000)))))


@pytest.mark.skipif(sys.platform != "linux", reason="not every file system has files with holes")
def test_holes_are_not_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path, line(range(100)))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert bytes_on_disk(path) <= MIB
    assert len(load_rollouts(path, limit=1)) == 1
    with pytest.raises(RolloutError, match=r"line 2 takes .*memory_limit is 640.0 MiB"):
        load_rollouts(path)
    (tmp_path / "other").write_bytes(bytes(MIB))
    assert MIB <= bytes_on_disk(tmp_path) <= 2 * MIB


def test_rollouts_that_are_kept_count(tmp_path: Path) -> None:
    """And those that are streamed do not."""
    path = write(tmp_path, b"".join(line([1, 2, n]) for n in range(50)))
    own = bytes_of(Rollout([1, 2, 3], [0, 1, 1], 1.0))
    limit = 30 * own
    reader = open_rollouts(path, memory_limit=limit)
    assert len(list(reader)) == 50 and reader.memory.held_bytes == 0
    with pytest.raises(RolloutError, match=f"are held, but memory_limit is {limit / 1024:.1f} KiB"):
        reader.read()
    assert len(list(reader)) == 50, "it can be read again"
    assert len(load_rollouts(path, limit=10, memory_limit=limit)) == 10
    costs = [reader.memory.keep(rollout) for rollout in load_rollouts(path, limit=3)]
    assert reader.memory.held_bytes == sum(costs) == 3 * own
    reader.memory.release(sum(costs))
    assert reader.memory.held_bytes == 0


def test_a_line_is_as_long_as_there_is_room_for(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + line([1] * 200_000))
    for content in (path.read_bytes(), GOOD + b" " * 10**6):
        with pytest.raises(RolloutError, match=r"line 2 takes .* memory_limit is 4.8 MiB, as give"):
            load_rollouts(write(tmp_path, content), memory_limit="5MB")
    path = write(tmp_path, GOOD + line([1] * 200_000))
    assert len(load_rollouts(path, memory_limit="5MB", limit=1)) == 1
    assert len(load_rollouts(path, memory_limit="30MB")[1]) == 200_000


def test_a_row_group_is_as_large_as_there_is_room_for(tmp_path: Path) -> None:
    """Its metadata say how many values it has; the file has few bytes of them."""
    row = {"token_ids": [1] * 10**6, "loss_mask": [0] + [1] * (10**6 - 1), "advantage": 1.0}
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(RolloutError, match=r"row group 0 takes 30\.\d MiB, but memory_limit is"):
        load_rollouts(path, memory_limit="8MB")
    assert len(load_rollouts(path)[0]) == 10**6


def test_torch_files_take_room(tmp_path: Path) -> None:
    """Their objects, and a tensor that repeats its numbers: many rollouts in a small file."""
    path = tmp_path / "x.pt"
    samples = {"token_ids": [[1, 2]] * 10, "loss_mask": [[0, 1]] * 10, "advantage": [1.0] * 10}
    torch.save(samples | {"x": list(range(9999))}, path)
    with pytest.raises(RolloutError, match="the objects of the file takes"):
        load_rollouts(path, memory_limit="100kB")
    ids, mask = torch.ones(1, 2, dtype=torch.int64), torch.tensor([[0, 1]])
    table = {"token_ids": ids.expand(10**6, 2), "loss_mask": mask.expand(10**6, 2)}
    torch.save(table | {"advantage": torch.ones(1).expand(10**6)}, path)
    assert path.stat().st_size < 5000
    with pytest.raises(RolloutError, match=r"memory_limit is 976.6 KiB"):
        load_rollouts(path, memory_limit="1MB")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_lines_are_those_of_a_split(data: st.DataObject, tmp_path_factory: Any) -> None:
    content = data.draw(st.lists(st.sampled_from(list(b"\n\n ab\r\t\v")), max_size=60).map(bytes))
    pack = data.draw(st.sampled_from([bytes, gzip.compress, zstandard.compress]))
    path = write(tmp_path_factory.getbasetemp(), pack(content))
    found = list(json_lines(path, MemoryLimit(path)))
    split = enumerate(content.split(b"\n"), start=1)
    assert found == [(n, text) for n, text in split if text.strip()]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SKIPPABLE + zstandard.compress(GOOD), ""),
        (zstandard.compress(b"") * 3 + zstandard.compress(GOOD[:9]) + SKIPPABLE
         + zstandard.compress(GOOD[9:]), ""),
        (gzip.compress(b"") + gzip.compress(GOOD) + bytes(100), ""),
        (gzip.compress(GOOD) + b"\0\0x", "Not a gzipped file"),
        (zstandard.compress(gzip.compress(GOOD)), "compressed once with gzip"),
    ],
    ids=["skippable frame", "several frames", "two members", "gzip and rubbish", "gzip in zstd"],
)  # fmt: skip
def test_frames_and_members(content: bytes, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    if said:
        with pytest.raises(RolloutError, match=said):
            load_rollouts(path)
    else:
        assert load_rollouts(path)[0].token_ids.tolist() == [1, 2, 3]


def test_a_wide_window_takes_a_limit(tmp_path: Path) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=29, compression_level=1)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    path = write(tmp_path, frame.compress(GOOD) + frame.flush())
    with pytest.raises(RolloutError, match=r"too much memory .*larger memory_limit"):
        load_rollouts(path)
    assert len(load_rollouts(path, memory_limit="2GiB")) == 1


def test_a_line_takes_at_most_16_times_its_bytes() -> None:
    source = random.Random(0)
    ids = [source.randrange(10_000, 150_000) for _ in range(50_000)]
    content = line(ids, old_logprobs=[-source.random() for _ in ids])
    tracemalloc.start()
    try:
        parse_object(content, "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = bytes_of(Rollout(ids, [0] + [1] * (len(ids) - 1), 1.0, old_logprobs=[0.0] * len(ids)))
    assert peak + len(content) + kept < TIMES_FILE * len(content)


def test_trees() -> None:
    shared = ["x" * 1000] * 10
    for _ in range(40):
        shared = [shared, shared]
    assert tree_bytes(shared) < 20_000, "what is shared counts once"
    many = json.loads("[" + "[]," * 10_000 + "[]]")
    assert 10_000 * 56 < tree_bytes(many) < 10_000 * 80


def test_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ulimit, where less is left than the limit allows."""

    def without(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("forkpoint.rollouts.formats.containers.parse_object", without)
    with pytest.raises(RolloutError, match="takes more memory than this process can allocate"):
        load_rollouts(write(tmp_path, GOOD))
