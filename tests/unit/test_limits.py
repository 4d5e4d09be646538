"""The account of memory: what is charged, what is given back, and what is refused before it is
allocated."""

import json
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombs import EMPTY_ZSTD, GOOD, SKIPPABLE, line, long_rollout, with_value
from bombs import _gzip as gzipped
from bombs import _zstd as zstded
from forkpoint import ConfigError, Rollout, RolloutError, load_rollouts
from forkpoint.byte_sizes import exactly, shown
from forkpoint.formats import compressed
from forkpoint.formats.json_lines import parse_object
from forkpoint.formats.limits import (
    LEAST_BYTES,
    MIB,
    TIMES_FILE,
    MemoryLimit,
    bytes_of,
    bytes_on_disk,
    json_bytes,
    size_in_bytes,
    tree_bytes,
)
from forkpoint.traces import open_rollouts


def write(folder: Path, content: bytes, name: str = "x.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("given", "count"),
    [
        *(("8GB", 8 * 10**9), ("8 GiB", 8 << 30), ("1.5g", 15 * 10**8), ("512MiB", 512 * MIB)),
        *(("40GB", 40 * 10**9), ("40GiB", 40 << 30), ("70 GB", 70 * 10**9), ("40gib", 40 << 30)),
        *(("3 kb", 3000), ("1TB", 10**12), ("1024", 1024), (1024, 1024), (" 7 ", 7), (None, None)),
    ],
)
def test_sizes(given: Any, count: int | None) -> None:
    assert size_in_bytes(given) == count


@pytest.mark.parametrize(
    "given", ["", "GB", "-1", "8XB", "1e9", "0", 0, -5, 1.5, True, [8], "9" * 100, b"8GB", "0.1"]
)
def test_what_is_no_size(given: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"memory_limit is .*; it takes a number of bytes"):
        load_rollouts(path, memory_limit=given)


def test_the_default_is_by_the_file(tmp_path: Path) -> None:
    assert MemoryLimit(write(tmp_path, GOOD)).limit_bytes == LEAST_BYTES
    path = write(tmp_path, bytes(50 * MIB))
    assert MemoryLimit(path).limit_bytes == TIMES_FILE * bytes_on_disk(path) > LEAST_BYTES
    assert MemoryLimit(path, 5).limit_bytes == 5


@pytest.mark.skipif(sys.platform != "linux", reason="not every file system has files with holes")
def test_holes_are_not_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert bytes_on_disk(path) <= MIB
    (tmp_path / "other").write_bytes(bytes(MIB))
    assert MIB <= bytes_on_disk(tmp_path) <= 2 * MIB


def test_the_account(tmp_path: Path) -> None:
    memory = MemoryLimit(write(tmp_path, GOOD), 1000)
    memory.hold(600, "this")
    with pytest.raises(RolloutError, match="that needs 401 bytes besides the 600 bytes held, and "):
        memory.hold(401, "that")
    with memory.holding(400, "all of it"):
        assert memory.left_bytes == 0
    with pytest.raises(KeyError), memory.holding(1, "a part"):
        raise KeyError
    memory.release(600)
    assert memory.held_bytes == 0
    with pytest.raises(AssertionError, match="more was given back"):
        memory.release(1)


def test_rollouts_that_are_kept_count(tmp_path: Path) -> None:
    """And those that are streamed do not."""
    path = write(tmp_path, b"".join(line([1, 2, n]) for n in range(50)))
    own = bytes_of(Rollout([1, 2, 3], [0, 1, 1], 1.0), 10**9)
    limit = 30 * own
    reader = open_rollouts(path, memory_limit=limit)
    assert len(list(reader)) == 50 and reader.memory.held_bytes == 0
    with pytest.raises(RolloutError, match=f"memory_limit is {limit / 1024:.1f} KiB"):
        reader.read()
    assert len(load_rollouts(path, limit=10, memory_limit=limit)) == 10
    assert len(load_rollouts(path, memory_limit="1MB")) == 50


def test_a_reader_can_be_left_and_begun_again(tmp_path: Path) -> None:
    reader = open_rollouts(write(tmp_path, GOOD * 3))
    first = iter(reader)
    next(first)
    assert len(list(reader)) == 3 and reader.memory.held_bytes == 0
    del first
    assert reader.memory.held_bytes == 0


def test_a_line_is_as_long_as_there_is_room_for(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + b"".join(long_rollout(200_000)))
    with pytest.raises(RolloutError, match="line 2, which has no end so far, needs"):
        load_rollouts(path, memory_limit=400_000)
    with pytest.raises(RolloutError, match="line 2 needs"):
        load_rollouts(path, memory_limit="5MB")
    assert len(load_rollouts(path, memory_limit="5MB", limit=1)) == 1
    assert len(load_rollouts(path, memory_limit="30MB")[1]) == 200_000


@pytest.mark.parametrize("pack", [gzipped, zstded], ids=["gzip", "zstd"])
def test_inflation(pack: Any, tmp_path: Path) -> None:
    """A limit that is given is one on memory alone."""
    content = [GOOD, *[b"\n" * MIB] * 100, GOOD]
    path = write(tmp_path, b"".join(pack(content)))
    with pytest.raises(
        RolloutError, match=r"x\.jsonl inflates: the first .* give .* MiB of content"
    ):
        load_rollouts(path)
    assert len(load_rollouts(path, limit=1)) == 1
    assert len(load_rollouts(path, memory_limit="600MB")) == 2


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_lines_are_those_of_a_split(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Wherever blocks end."""
    content = data.draw(st.lists(st.sampled_from(list(b"\n\n ab\r\t\v")), max_size=60).map(bytes))
    path = write(tmp_path_factory.getbasetemp(), content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "BLOCK_BYTES", data.draw(st.integers(2, 9)))
        memory = MemoryLimit(path)
        found = [(n, bytes(text)) for n, text in compressed.lines(path, memory, len)]
    split = enumerate(content.split(b"\n"), start=1)
    assert found == [(n, text) for n, text in split if text.strip()] and memory.held_bytes == 0


@pytest.mark.parametrize(
    "content",
    [
        SKIPPABLE + b"".join(zstded([GOOD])),
        EMPTY_ZSTD * 3 + b"".join(zstded([GOOD[:9]])) + SKIPPABLE + b"".join(zstded([GOOD[9:]])),
        b"".join(gzipped([b""])) + b"".join(gzipped([GOOD])) + bytes(100),
    ],
)
def test_frames_and_members(content: bytes, tmp_path: Path) -> None:
    assert load_rollouts(write(tmp_path, content))[0].token_ids.tolist() == [1, 2, 3]


def test_what_follows_compressed_content(tmp_path: Path) -> None:
    for content, said in (
        (b"".join(gzipped([GOOD])) + b"\0\0x", r"Not a gzipped file \(b'x'\)"),
        (b"".join(zstded([GOOD])) + b"x", "cut short or damaged"),
        (b"".join(zstded([GOOD])) + SKIPPABLE[:-1], "the last zstd frame has no end"),
    ):
        with pytest.raises(RolloutError, match=said):
            load_rollouts(write(tmp_path, content))


def test_a_wide_window_takes_a_limit(tmp_path: Path) -> None:
    import zstandard

    wide = zstandard.ZstdCompressionParameters(window_log=29, compression_level=1)
    path = write(tmp_path, b"".join(zstded([GOOD], compression_params=wide)))
    with pytest.raises(RolloutError, match=r"a zstd window of 512.0 MiB, and .* at most 160.0 MiB"):
        load_rollouts(path)
    assert len(load_rollouts(path, memory_limit="2GiB")) == 1


TEXTS = {
    "empty lists": "[],",
    "empty objects": "{},",
    "lists of one": "[1],",
    "objects of one": '{"a":1},',
    "objects of an empty key": '{"":0},',
    "small numbers": "1,",
    "numbers": "1000,",
    "large numbers": "10000000000000000000000,",
    "floats": "1e9,",
    "texts": '"ab",',
    "wide texts": '"é€",',
    "wider texts": '"😀",',
    "nulls": "null,",
    "lists of lists": "[[[[]]]],",
    "objects of objects": '{"":{"":{"":0}}},',
}


def counted(text: str) -> tuple[int, int]:
    """Bytes that a line takes to be parsed, as estimated and as measured."""
    content = text.encode()
    del text
    tracemalloc.start()
    try:
        parse_object(content, "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return json_bytes(content), peak + len(content)


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_line_takes_is_not_underestimated(name: str) -> None:
    item = TEXTS[name]
    estimated, measured = counted('{"a":[' + item * (100_000 // len(item)) + item[:-1] + "]}")
    assert measured <= estimated


@pytest.mark.parametrize(
    "text",
    [
        '{"a":"' + "x" * 100_000 + '"}',
        '{"a":"x😀' + "x" * 100_000 + '"}',
        '{"a":"' + "\\u20ac" * 20_000 + '"}',
        '{"a":"\\ud83d\\ude00' + "x" * 100_000 + '"}',
        "{" + ",".join(f'"k{n}":{n}' for n in range(10_000)) + "}",
        "{" + ",".join(f'"k{n}":[]' for n in range(10_000)) + "}",
        '{"a":' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_nor_that_of_texts_and_keys(text: str) -> None:
    estimated, measured = counted(text)
    assert measured <= estimated


def test_a_line_of_ids_is_not_overestimated() -> None:
    """Else lines that are whole batches would not be read within 16 times their file."""
    source = random.Random(0)
    ids = [source.randrange(10_000, 150_000) for _ in range(50_000)]
    content = line(ids, old_logprobs=[-source.random() for _ in ids])
    kept = bytes_of(Rollout(ids, [0] + [1] * (len(ids) - 1), 1.0, old_logprobs=[0.0] * len(ids)), 0)
    assert json_bytes(content) + kept < TIMES_FILE * len(content)


def test_trees() -> None:
    shared = ["x" * 1000] * 10
    for _ in range(40):
        shared = [shared, shared]
    assert tree_bytes(shared, 10**9) < 20_000, "what is shared counts once"
    many = json.loads("[" + "[]," * 10_000 + "[]]")
    assert 10_000 * 56 < tree_bytes(many, 10**9) < 10_000 * 80
    assert 500 < tree_bytes(many, 500) < 200_000, "counting goes on no further than it has to"


def test_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ulimit, where less is left than the limit allows."""

    def without(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("forkpoint.formats.containers.parse_object", without)
    with pytest.raises(RolloutError, match="takes more memory than there is for this process"):
        load_rollouts(write(tmp_path, with_value("1")))


def test_sizes_are_shown_alike() -> None:
    assert [shown(n) for n in (0, 1023, 1024, 5 << 20, 3 << 29)] == (
        ["0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "1.5 GiB"]
    )
    assert (exactly(1000), exactly(1097856)) == ("1000 bytes", "1.0 MiB (1,097,856 bytes)")
