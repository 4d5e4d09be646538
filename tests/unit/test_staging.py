"""Host memory for offloading: parts do not overlap, are used again, and keep to the limit."""

import gc
import os
from pathlib import Path

import pytest
import torch

from forkpoint.engine.staging import (
    ALIGNMENT_BYTES,
    BLOCKS,
    Frame,
    OffloadStats,
    PlainTransfers,
    Staging,
)
from forkpoint.errors import ConfigError
from open_files import open_files

BLOCK = 4 * ALIGNMENT_BYTES
CHUNK = BLOCKS * BLOCK


def staging(limit: int | None = None, folder: Path | None = None) -> Staging:
    transfers = PlainTransfers(torch.device("cpu"), chunk_bytes=CHUNK)
    return Staging(transfers, limit_bytes=limit, folder=folder)


def sizes(frame: Frame, nbytes: int, unit: int = 1) -> list[int] | None:
    """Takes memory: sizes of its parts."""
    parts = frame.take(nbytes, unit)
    return None if parts is None else [len(part) for part in parts]


def test_parts_fill_blocks() -> None:
    memory = staging()
    frame = memory.begin()
    assert sizes(frame, ALIGNMENT_BYTES + 1) == [ALIGNMENT_BYTES + 1]
    assert sizes(frame, BLOCK) == [BLOCK // 2, BLOCK // 2]
    assert sizes(frame, 3 * BLOCK) == [BLOCK // 2, BLOCK, BLOCK, BLOCK // 2]
    # Rows are not divided.
    assert sizes(frame, 5 * 500, unit=500) == [2 * 500, 3 * 500]
    assert (memory.held_bytes, memory.used_bytes) == (CHUNK, 6 * BLOCK)
    other = memory.begin()
    assert sizes(other, CHUNK) == [BLOCK] * BLOCKS and memory.held_bytes == 2 * CHUNK
    memory.end(frame)
    frame = memory.begin()
    assert sizes(frame, CHUNK) == [BLOCK] * BLOCKS and memory.held_bytes == 2 * CHUNK


def test_parts_do_not_overlap() -> None:
    frame, taken = staging().begin(), []
    for number, nbytes in enumerate((1, ALIGNMENT_BYTES, CHUNK, 700, 3 * BLOCK + 5)):
        parts = frame.take(nbytes)
        assert parts is not None
        taken.append(parts)
        for part in parts:
            part.fill_(number)
    found = [torch.cat(parts) for parts in taken]
    assert [x.unique().tolist() for x in found] == [[0], [1], [2], [3], [4]]


def test_the_limit_is_used_up_and_kept() -> None:
    limit = CHUNK + 3 * BLOCK + 2 * ALIGNMENT_BYTES + 1
    memory = staging(limit)
    frame = memory.begin()
    assert frame.take(BLOCK) is not None
    # What does not fit takes nothing.
    assert frame.take(CHUNK + 3 * BLOCK) is None and memory.used_bytes == BLOCK
    assert sizes(frame, CHUNK + 2 * BLOCK - ALIGNMENT_BYTES) is not None
    assert sizes(frame, 3 * ALIGNMENT_BYTES) is not None
    assert frame.take(1) is None
    assert memory.held_bytes == memory.used_bytes == limit - 1
    assert staging(ALIGNMENT_BYTES).begin().take(ALIGNMENT_BYTES) is not None
    assert staging(1).begin().take(1) is None


def test_a_step_with_larger_storages_uses_the_memory_of_an_earlier_one() -> None:
    memory = staging(2 * CHUNK)
    for nbytes in (ALIGNMENT_BYTES, BLOCK + 1, CHUNK + 1):
        frame, taken = memory.begin(), 0
        while frame.take(nbytes) is not None:
            taken += nbytes
        assert 2 * CHUNK - taken < nbytes + taken // nbytes * ALIGNMENT_BYTES
        memory.end(frame)


def test_beyond_the_limit_there_are_files(tmp_path: Path) -> None:
    memory = staging(CHUNK, tmp_path)
    frame, stats = memory.begin(), OffloadStats()
    taken = [frame.take(size) for size in (CHUNK - BLOCK, 2 * BLOCK, CHUNK)]
    for number, parts in enumerate(taken):
        assert parts is not None
        for part in parts:
            part.fill_(number)
    assert [x is not None and torch.cat(x).unique().tolist() for x in taken] == [[0], [1], [2]]
    assert (memory.held_bytes, memory.file_bytes) == (CHUNK, 2 * CHUNK)
    assert memory.used_bytes == 2 * CHUNK + BLOCK
    assert len(open_files(tmp_path)) == 2 and not list(tmp_path.iterdir())
    memory.finish(stats)
    assert (stats.host_bytes, stats.file_bytes, memory.used_bytes) == (CHUNK, 2 * CHUNK, 0)
    # Memory is used again before files.
    frame = memory.begin()
    assert frame.take(CHUNK) is not None and not any(block.in_file for block in frame.blocks)
    assert frame.take(BLOCK) is not None and frame.blocks[-1].in_file
    assert memory.file_bytes == 2 * CHUNK
    del memory, frame, taken, parts, part
    gc.collect()
    assert not open_files(tmp_path)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"offload_folder is .*missing.* No such file"):
        staging(1, tmp_path / "missing").begin().take(CHUNK)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"file of 32\.0 KiB cannot be made there, beside 0 b"):
        staging(1, tmp_path).begin().take(CHUNK)
    assert not open_files(tmp_path)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_memory_that_the_machine_lacks(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = staging()
    frame = memory.begin()
    assert frame.take(CHUNK) is not None

    def none_left(nbytes: int) -> torch.Tensor:
        raise kind("out of memory")

    monkeypatch.setattr(memory.transfers, "host_buffer", none_left)
    with pytest.raises(kind, match="out of memory") as raised:
        frame.take(1)
    assert raised.value.__notes__ == [
        "forkpoint: 32.0 KiB of host memory cannot be allocated beside 32.0 KiB of others. Set "
        "Config(host_memory=...) to at most that, and offload_folder for data beyond it."
    ]
