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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forkpoint.device import usable_bytes
from forkpoint.errors import ConfigError
from forkpoint.units import format_bytes

ALIGNMENT_BYTES = 512
# Torch allocates pinned memory in powers of two. Chunks of that size waste none of it, and pinning
# one takes a fraction of a second, once.
CHUNK_BYTES = 1 << 30
BLOCKS = 16
"""Blocks in a chunk. Frames take blocks, so a frame leaves less than one block unused."""
# Not used by prefetches: the allocator's rounding, and workspaces of the running backward.
MARGIN_BYTES = 1 << 30


@dataclass(eq=False)
class OffloadStats:
    """Copies of a pass or step to and from host memory: bytes of the storages of offloaded
    activations, and of prefix caches."""

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
    """Bytes of allocated host memory at the end. They are kept for the next pass."""
    file_bytes: int = 0
    """Bytes of files beyond the limit of host memory, which are kept as well."""
    allocation_ms: float = 0.0
    """Milliseconds of the pass in which host memory was allocated (on CUDA: pinned)."""

    def after(self, earlier: "OffloadStats") -> "OffloadStats":
        """The counts of this pass and an earlier one of the step together."""
        sums = {name: value + vars(earlier)[name] for name, value in vars(self).items()}
        return OffloadStats(
            **(sums | {"host_bytes": self.host_bytes, "file_bytes": self.file_bytes})
        )


class PlainTransfers:
    """Synchronous copies, for a CPU or any device without streams."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = 1 << 24) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        """Bytes of one allocation of host memory, a power of two; `BLOCKS` blocks."""
        self.least_bytes = 0
        """Storages with fewer bytes stay on the device."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory that the device can copy to and from."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def begin_microbatch(self) -> None:
        """Order later copies to the host after earlier copies back, which may read the same host
        memory."""

    def out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start copying pairs of (device memory, host memory). The device memory may be freed at
        once. Returns an event for `bring`."""
        for source, host in pairs:
            host.copy_(source)

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

    def out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.Event:
        if self.headroom_bytes() < 0:
            # The computation is further ahead of its copies than memory allows.
            self._out.synchronize()
        self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._out):
            for source, host in pairs:
                host.copy_(source, non_blocking=True)
        if not all(host.is_pinned() for _, host in pairs):
            # CUDA may read pageable memory when a copy back is enqueued, so this copy
            # must have ended.
            self._out.synchronize()
        for source, _ in pairs:
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
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        # Memory that copies still read counts: it was freed, and cannot be used until they end.
        active = stats["active_bytes"]["all"]["current"]
        return usable_bytes(self.device) - active - self.margin_bytes

    def drain(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a chunk of host memory, or of a file that is mapped into it."""

    data: Tensor
    """uint8 [bytes]."""
    in_file: bool


@dataclass(eq=False)
class Staging:
    """Host memory in chunks that are kept from step to step, because pinning memory is slow."""

    transfers: PlainTransfers
    limit_bytes: int | None = None
    folder: Path | None = None
    """Folder of files beyond the limit; None: no files."""
    _allocation_ms: float = field(default=0.0, init=False)
    _free: list[Block] = field(default_factory=list, init=False)
    _free_in_files: list[Block] = field(default_factory=list, init=False)
    _frames: "list[Frame]" = field(default_factory=list, init=False)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.transfers.chunk_bytes // BLOCKS

    @property
    def held_bytes(self) -> int:
        """Bytes of allocated host memory, in use or not."""
        return self._held(in_file=False)

    @property
    def file_bytes(self) -> int:
        """Bytes of files, in use or not."""
        return self._held(in_file=True)

    def _held(self, *, in_file: bool) -> int:
        used = (block for frame in self._frames for block in frame.blocks)
        every = (*self._free, *self._free_in_files, *used)
        return sum(len(block.data) for block in every if block.in_file == in_file)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks of open microbatches, in memory and in files."""
        return sum(len(block.data) for frame in self._frames for block in frame.blocks)

    def begin(self) -> "Frame":
        """Make the frame of a microbatch, before its forward."""
        self._frames.append(Frame(self))
        return self._frames[-1]

    def end(self, frame: "Frame") -> None:
        """Free a microbatch's memory, after its backward."""
        self._frames.remove(frame)
        self.free(frame.blocks)

    def free(self, blocks: Sequence[Block]) -> None:
        """Free blocks that no frame holds any more."""
        for block in blocks:
            (self._free_in_files if block.in_file else self._free).append(block)

    def finish(self, stats: OffloadStats) -> None:
        """End a pass, also after a failure: wait for copies of frames that are in use, free these,
        and write `stats`."""
        if self._frames:
            # A device that has failed ends copies as well; its error is raised already.
            with suppress(RuntimeError):
                self.transfers.drain()
        while self._frames:
            self.end(self._frames[-1])
        stats.host_bytes, stats.file_bytes = self.held_bytes, self.file_bytes
        stats.allocation_ms += self._allocation_ms
        self._allocation_ms = 0.0

    def block(self) -> Block | None:
        """A free block of host memory, or one of a new chunk. Beyond the limit, one of a file; None
        without a folder."""
        if not self._free:
            self._free += self._blocks(self._new_chunk(), in_file=False)
        if self._free:
            return self._free.pop()
        if not self._free_in_files and self.folder is not None:
            self._free_in_files += self._blocks(self._new_file(self.folder), in_file=True)
        return self._free_in_files.pop() if self._free_in_files else None

    def _blocks(self, chunk: Tensor | None, *, in_file: bool) -> list[Block]:
        parts = () if chunk is None else chunk.split(self.block_bytes)
        return [Block(part, in_file) for part in parts]

    def _new_chunk(self) -> Tensor | None:
        """uint8 [bytes] of new host memory: a chunk, or a part of one at the limit; None beyond
        it."""
        size = self.transfers.chunk_bytes
        if self.limit_bytes is not None:
            room = self.limit_bytes - self.held_bytes
            while size > room:
                size //= 2
                if size < ALIGNMENT_BYTES:
                    return None
        begin = time.perf_counter()
        try:
            chunk = self.transfers.host_buffer(size)
        except (RuntimeError, MemoryError) as error:
            error.add_note(
                f"forkpoint: {format_bytes(size)} of host memory cannot be allocated beside "
                f"{format_bytes(self.held_bytes)} of others. Set Config(host_memory=...) to at "
                "most that, and offload_folder for data beyond it."
            )
            raise
        self._allocation_ms += (time.perf_counter() - begin) * 1e3
        return chunk

    def _new_file(self, folder: Path) -> Tensor:
        nbytes = self.transfers.chunk_bytes
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
        return data


class Frame:
    """The host memory of one microbatch: blocks that are filled one after the other."""

    def __init__(self, staging: Staging) -> None:
        self.blocks: list[Block] = []
        self._staging = staging
        self._offset = 0
        """Where the free part of the last block begins."""

    def take(self, nbytes: int, unit: int = 1) -> list[Tensor] | None:
        """Parts of host memory, uint8, that together have `nbytes`; None beyond the limit.

        `unit`: bytes that stay together. The size of each part is a multiple of it.
        """
        assert unit <= self._staging.block_bytes, (unit, self._staging.block_bytes)
        before, begins = len(self.blocks), self._offset
        parts: list[Tensor] = []
        while nbytes:
            size = len(self.blocks[-1].data) if self.blocks else 0
            room = (size - self._offset) // unit * unit
            if room <= 0:
                block = self._staging.block()
                if block is None:
                    beyond = self.blocks[before:]
                    del self.blocks[before:]
                    self._offset = begins
                    self._staging.free(beyond)
                    return None
                self.blocks.append(block)
                self._offset = 0
                continue
            count = min(nbytes, room)
            parts.append(self.blocks[-1].data[self._offset : self._offset + count])
            self._offset += -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            nbytes -= count
        return parts


def staging_for(device: torch.device) -> Staging:
    """Streams and pinned memory on CUDA, plain copies elsewhere."""
    kind = StreamTransfers if device.type == "cuda" else PlainTransfers
    return Staging(kind(device))
