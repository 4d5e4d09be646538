"""Host memory for activations and prefix caches, files beyond its limit, and copies to and from
both.

Only `PlainTransfers` and `StreamTransfers` depend on the device: streams, events, pinned memory and
the amount of free memory. The rest is tested on a CPU.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.units import format_bytes

ALIGNMENT_BYTES = 512
# Torch allocates pinned memory in powers of two. Chunks of that size waste none of it, and pinning
# one takes a fraction of a second, once.
CHUNK_BYTES = 1 << 30
# Not used by prefetches: the allocator's rounding, and workspaces of the running backward.
MARGIN_BYTES = 1 << 30


@dataclass(eq=False)
class OffloadStats:
    """Copies of a pass to and from host memory: bytes of the storages of offloaded activations, and
    of prefix caches."""

    out_bytes: int = 0
    back_bytes: int = 0
    cache_bytes: int = 0
    """The part of `out_bytes` and `back_bytes` for prefix caches and boundary gradients."""
    prefetched: int = 0
    """Number of storages, and layers of a prefix cache, whose fetch began before they were
    needed."""
    on_demand: int = 0
    """Number of those whose fetch began when they were needed."""
    held_back: int = 0
    """Number of prefetches that were postponed for lack of device memory."""
    left_bytes: int = 0
    """Bytes that stayed on the device because host memory was at its limit."""
    host_bytes: int = 0
    """Bytes of allocated host memory at the end of the pass. They are kept for the next pass."""
    file_bytes: int = 0
    """Bytes of files beyond the limit of host memory, which are kept as well."""
    allocation_ms: float = 0.0
    """Milliseconds of the pass in which host memory was allocated (on CUDA: pinned)."""


class PlainTransfers:
    """Synchronous copies, for a CPU or any device without streams."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = 1 << 24) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        """Bytes of one allocation of host memory, a power of two."""
        self.least_bytes = 0
        """Storages with fewer bytes stay on the device."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory that the device can copy to and from."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def begin_microbatch(self) -> None:
        """Order later copies to the host after earlier copies back, which may read the same host
        memory."""

    def out(self, source: Tensor, host: Tensor) -> Any:
        """Start copying to the host; the source may be freed at once. Returns an event for
        `back`."""
        host.copy_(source)

    def back(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        """Start copying into new device memory. Returns this memory and an event for `wait`."""
        found = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        return found, self.bring([(host, found)], after)

    def bring(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Start copying pairs of (host memory, existing device memory). Returns an event for
        `wait`."""
        for host, found in pairs:
            found.copy_(host)

    def wait(self, arrived: Any) -> None:
        """Make all further computation wait for that copy."""

    def headroom_bytes(self) -> int | None:
        """Bytes of device memory that a prefetch may take, minus a safety margin; None is no
        limit."""
        return None

    def drain(self) -> None:
        """Wait until no copy is running."""


class StreamTransfers(PlainTransfers):
    """Copies on CUDA, on one stream for each direction. Events order them relative to the
    computation.

    Device memory for a copy back is allocated on the computation's stream, so that it reuses memory
    of other microbatches' activations. The copy begins only when the computation has reached the
    request, so callers request a layer ahead.
    """

    def __init__(self, device: torch.device, *, margin_bytes: int = MARGIN_BYTES) -> None:
        super().__init__(device, chunk_bytes=CHUNK_BYTES)
        self.least_bytes = 1 << 16
        self.margin_bytes = margin_bytes
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin_microbatch(self) -> None:
        self._out.wait_stream(self._in)

    def out(self, source: Tensor, host: Tensor) -> torch.Event:
        if self.headroom_bytes() < 0:
            # The computation is further ahead of its copies than memory allows.
            self._out.synchronize()
        self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        if not host.is_pinned():
            # CUDA may read pageable memory when a copy back is enqueued, so this copy
            # must have ended.
            self._out.synchronize()
        # The allocator reuses its memory once this stream has got past the copy.
        source.record_stream(self._out)
        return self._out.record_event()

    def bring(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: torch.Event | None
    ) -> torch.Event:
        # Kernels that were launched before that memory was freed may still use it.
        self._in.wait_event(torch.cuda.current_stream(self.device).record_event())
        if after is not None:
            self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            for host, found in pairs:
                found.copy_(host, non_blocking=True)
        return self._in.record_event()

    def wait(self, arrived: torch.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(arrived)

    def headroom_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved = stats["reserved_bytes"]["all"]["current"]
        # Memory that copies still read counts: it was freed, and cannot be used until they end.
        active = stats["active_bytes"]["all"]["current"]
        # This process may be limited to a fraction of the device.
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        free = min(free, int(fraction * total) - reserved)
        return free + reserved - active - self.margin_bytes

    def drain(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


@dataclass(frozen=True, eq=False)
class Buffer:
    """Host memory, or a file that is mapped into it."""

    data: Tensor
    """uint8 [bytes]."""
    in_file: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(eq=False)
class Staging:
    """Host memory in buffers that are kept from step to step, because pinning memory is slow."""

    transfers: PlainTransfers
    limit_bytes: int | None = None
    folder: Path | None = None
    """Folder of files beyond the limit; None: no files."""
    _allocation_ms: float = field(default=0.0, init=False)
    _free: list[Buffer] = field(default_factory=list, init=False)
    _frames: "list[Frame]" = field(default_factory=list, init=False)

    @property
    def held_bytes(self) -> int:
        """Bytes of allocated host memory, in use or not."""
        return self._held(in_file=False)

    @property
    def file_bytes(self) -> int:
        """Bytes of files, in use or not."""
        return self._held(in_file=True)

    def _held(self, *, in_file: bool) -> int:
        used = (buffer for frame in self._frames for buffer in frame.buffers)
        return sum(b.nbytes for b in (*self._free, *used) if b.in_file == in_file)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers of open microbatches, in memory and in files."""
        return sum(buffer.nbytes for frame in self._frames for buffer in frame.buffers)

    def begin(self) -> "Frame":
        """Make the frame of a microbatch, before its forward."""
        self._frames.append(Frame(self))
        return self._frames[-1]

    def end(self, frame: "Frame") -> None:
        """Free a microbatch's memory, after its backward."""
        self._frames.remove(frame)
        self._free += frame.buffers

    def finish(self, stats: OffloadStats) -> None:
        """Free the frames of all microbatches, also after a failed pass, and write `stats`."""
        while self._frames:
            self.end(self._frames[-1])
        stats.host_bytes, stats.file_bytes = self.held_bytes, self.file_bytes
        stats.allocation_ms += self._allocation_ms
        self._allocation_ms = 0.0

    def buffer(self, nbytes: int) -> Buffer | None:
        """The smallest free buffer in host memory of at least `nbytes`, or a new one. Beyond the
        limit, a free or new buffer in a file; None without a folder."""
        if (found := self._free_buffer(nbytes, in_file=False)) is not None:
            return found
        size = whole = max(self.transfers.chunk_bytes, 1 << (nbytes - 1).bit_length())
        if self.limit_bytes is not None:
            room = self.limit_bytes - self.held_bytes
            while size > room and size // 2 >= nbytes:
                size //= 2
            if size > room:
                return None if self.folder is None else self._file_buffer(self.folder, whole)
        begin = time.perf_counter()
        try:
            buffer = Buffer(self.transfers.host_buffer(size))
        except (RuntimeError, MemoryError) as error:
            error.add_note(
                f"forkpoint: {format_bytes(size)} of host memory cannot be allocated beside "
                f"{format_bytes(self.held_bytes)} of others. Set Config(host_memory=...) to at "
                "most that, and offload_folder for data beyond it."
            )
            raise
        self._allocation_ms += (time.perf_counter() - begin) * 1e3
        return buffer

    def _free_buffer(self, nbytes: int, *, in_file: bool) -> Buffer | None:
        fitting = [
            at
            for at, buffer in enumerate(self._free)
            if buffer.in_file == in_file and buffer.nbytes >= nbytes
        ]
        if not fitting:
            return None
        return self._free.pop(min(fitting, key=lambda at: self._free[at].nbytes))

    def _file_buffer(self, folder: Path, nbytes: int) -> Buffer:
        if (found := self._free_buffer(nbytes, in_file=True)) is not None:
            return found
        begin = time.perf_counter()
        try:
            # The file has no name, so nothing is left of it if the process is killed.
            with tempfile.TemporaryFile(dir=folder) as file:
                # Without reserved space, a write to a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                data = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        except OSError as error:
            raise ConfigError(
                f"offload_folder is {str(folder)!r}, and a file of {format_bytes(nbytes)} cannot "
                f"be made there, beside {format_bytes(self.file_bytes)} of others: "
                f"{error.strerror}. Free space, name another folder, or raise host_memory."
            ) from error
        self._allocation_ms += (time.perf_counter() - begin) * 1e3
        return Buffer(data, in_file=True)


class Frame:
    """The host memory of one microbatch: buffers that are filled one after the other."""

    def __init__(self, staging: Staging) -> None:
        self.buffers: list[Buffer] = []
        self._staging = staging
        self._filling: Tensor | None = None
        self._offset = 0

    def take(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes], or None beyond the limit."""
        alone = nbytes > self._staging.transfers.chunk_bytes
        if alone or self._filling is None or self._offset + nbytes > len(self._filling):
            buffer = self._staging.buffer(nbytes)
            if buffer is None:
                return None
            self.buffers.append(buffer)
            if alone:
                return buffer.data[:nbytes]
            self._filling, self._offset = buffer.data, 0
        begin = self._offset
        self._offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._filling[begin : begin + nbytes]


def staging_for(device: torch.device) -> Staging:
    """Streams and pinned memory on CUDA, plain copies elsewhere."""
    kind = StreamTransfers if device.type == "cuda" else PlainTransfers
    return Staging(kind(device))
