"""Host memory for offloading: buffers do not overlap, are used again, and keep to the limit."""

import gc
import os
from pathlib import Path

import pytest
import torch

from forkpoint.engine.staging import ALIGNMENT_BYTES, OffloadStats, PlainTransfers, Staging
from forkpoint.errors import ConfigError
from open_files import open_files

CHUNK = 4 * ALIGNMENT_BYTES


def staging(limit: int | None = None, folder: Path | None = None) -> Staging:
    transfers = PlainTransfers(torch.device("cpu"), chunk_bytes=CHUNK)
    return Staging(transfers, limit_bytes=limit, folder=folder)


def test_large_storages_have_buffers_of_powers_of_two() -> None:
    memory = staging(3 * CHUNK)
    frame = memory.begin()
    sizes = (ALIGNMENT_BYTES, CHUNK + 1, ALIGNMENT_BYTES)
    taken = [found for size in sizes if (found := frame.take(size)) is not None]
    assert [len(found) for found in taken] == list(sizes)
    # The small ones share a chunk.
    assert memory.held_bytes == memory.used_bytes == 3 * CHUNK
    assert frame.take(CHUNK + 1) is None and frame.take(CHUNK) is None
    memory.end(frame)
    assert (memory.held_bytes, memory.used_bytes) == (3 * CHUNK, 0)
    frame = memory.begin()
    assert frame.take(2 * CHUNK) is not None and memory.held_bytes == 3 * CHUNK


def test_a_limit_below_a_chunk_is_used() -> None:
    memory = staging(CHUNK - 1)
    frame = memory.begin()
    assert frame.take(ALIGNMENT_BYTES) is not None and memory.held_bytes == CHUNK // 2
    assert frame.take(2 * ALIGNMENT_BYTES) is None


def test_beyond_the_limit_there_are_files(tmp_path: Path) -> None:
    memory = staging(CHUNK, tmp_path)
    frame, stats = memory.begin(), OffloadStats()
    taken = [frame.take(size) for size in (CHUNK, ALIGNMENT_BYTES, 3 * CHUNK, ALIGNMENT_BYTES)]
    for number, data in enumerate(taken):
        assert data is not None
        data.fill_(number)
    assert [x is not None and x.unique().tolist() for x in taken] == [[0], [1], [2], [3]]
    assert (memory.held_bytes, memory.file_bytes) == (CHUNK, 5 * CHUNK)
    assert memory.used_bytes == 6 * CHUNK
    assert len(open_files(tmp_path)) == 2 and not list(tmp_path.iterdir())
    memory.finish(stats)
    assert (stats.host_bytes, stats.file_bytes, memory.used_bytes) == (CHUNK, 5 * CHUNK, 0)
    # Memory is used again before files.
    frame = memory.begin()
    assert frame.take(CHUNK) is not None and not frame.buffers[0].in_file
    assert frame.take(CHUNK) is not None and frame.buffers[1].in_file
    assert memory.file_bytes == 5 * CHUNK
    del memory, frame, taken, data
    gc.collect()
    assert not open_files(tmp_path)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"offload_folder is .*missing.* No such file"):
        staging(1, tmp_path / "missing").begin().take(CHUNK)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"file of 2\.0 KiB cannot be made there, beside 0 bytes"):
        staging(1, tmp_path).begin().take(CHUNK)
    assert not open_files(tmp_path)


def test_memory_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = staging()
    frame = memory.begin()
    assert frame.take(CHUNK) is not None

    def none_left(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(memory.transfers, "host_buffer", none_left)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        frame.take(3 * CHUNK)
    assert raised.value.__notes__ == [
        "forkpoint: 8.0 KiB of host memory cannot be allocated beside 2.0 KiB of others. Set "
        "Config(host_memory=...) to at most that, and offload_folder for data beyond it."
    ]
