"""Host memory that offloaded activations wait in, and the copies to it and back.

What is special about a device is in one small class (`Transfers`): streams, events, pinned memory
and how much is free. Everything else of offloading is the same everywhere, and is tested on a CPU,
where the copies are plain ones.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT_BYTES = 512
# Pinned memory is handed out in powers of two. Chunks of that size waste none of it, and pinning
# one takes a fraction of a second, once.
CHUNK_BYTES = 1 << 30
# Not to be used by prefetches: the allocator's rounding, and workspaces of the backward under way.
MARGIN_BYTES = 1 << 30


class Transfers(Protocol):
    """Copies between a device and its host."""

    device: torch.device
    chunk_bytes: int
    """How much host memory is taken at a time."""
    least_bytes: int
    """Smaller storages are not worth a copy."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory that the device can copy to and from."""
        ...

    def taken_bytes(self, nbytes: int) -> int:
        """Bytes of the host's memory that a buffer of `nbytes` takes."""
        ...

    def begin_microbatch(self) -> None:
        """From here on host memory may be written that earlier copies back have read."""
        ...

    def out(self, source: Tensor, host: Tensor) -> Any:
        """Start copying; the source may be freed at once. Returns what `back` has to wait for."""
        ...

    def back(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        """Start copying into new device memory; returns it and what its reader has to wait for."""
        ...

    def wait(self, arrived: Any) -> None:
        """Make everything that is computed from here on wait for that copy."""
        ...

    def headroom_bytes(self) -> int | None:
        """Device memory that a prefetch may take, a safety margin left; None is no limit."""
        ...

    def drain(self) -> None:
        """Wait until no copy is under way."""
        ...


class PlainTransfers:
    """Copies that are done when the call returns: on a CPU, or wherever there are no streams."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = 1 << 24) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.least_bytes = 0

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def taken_bytes(self, nbytes: int) -> int:
        return nbytes

    def begin_microbatch(self) -> None:
        pass

    def out(self, source: Tensor, host: Tensor) -> None:
        host.copy_(source)

    def back(self, host: Tensor, after: None) -> tuple[Tensor, None]:
        return torch.empty(len(host), dtype=torch.uint8, device=self.device).copy_(host), None

    def wait(self, arrived: None) -> None:
        pass

    def headroom_bytes(self) -> int | None:
        return None

    def drain(self) -> None:
        pass


class StreamTransfers:
    """CUDA: a side stream for each direction, ordered against the computation by events.

    Device memory of what comes back is allocated on the stream that computes, so that it is what
    activations of other microbatches have left; the copy into it therefore begins when the
    computation has got to where it was asked for, and whoever asks must ask a layer ahead.
    """

    def __init__(self, device: torch.device, *, margin_bytes: int = MARGIN_BYTES) -> None:
        self.device = device
        self.chunk_bytes = CHUNK_BYTES
        self.least_bytes = 1 << 16
        self.margin_bytes = margin_bytes
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    @staticmethod
    def taken_bytes(nbytes: int) -> int:
        return 1 << max(0, nbytes - 1).bit_length()  # the next power of two

    def begin_microbatch(self) -> None:
        self._out.wait_stream(self._in)

    def out(self, source: Tensor, host: Tensor) -> torch.Event:
        if self.headroom_bytes() < 0:
            # The computation is further ahead of its copies than memory allows.
            self._out.synchronize()
        self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        # Its memory is given to others once this stream has got past the copy.
        source.record_stream(self._out)
        return self._out.record_event()

    def back(self, host: Tensor, after: torch.Event) -> tuple[Tensor, torch.Event]:
        found = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        # That memory may still be in use by what was launched before it was freed.
        self._in.wait_event(torch.cuda.current_stream(self.device).record_event())
        self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            found.copy_(host, non_blocking=True)
        return found, self._in.record_event()

    def wait(self, arrived: torch.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(arrived)

    def headroom_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved = stats["reserved_bytes"]["all"]["current"]
        # What copies still read counts: it was given back, and is nobody's until they are done.
        active = stats["active_bytes"]["all"]["current"]
        # The device may have more than this process may take of it.
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        free = min(free, int(fraction * total) - reserved)
        return free + reserved - active - self.margin_bytes

    def drain(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


@dataclass(eq=False)
class Frame:
    """The host memory of one microbatch: it begins where the microbatch's forward did."""

    begin: tuple[int, int]
    ended: bool = False


class Staging:
    """A stack of host memory, kept from step to step, because pinning memory is slow.

    In the planner's order microbatches nest: what is offloaded last comes back first. In another
    order, memory that lies below that of a microbatch whose backward is to come waits for it.
    """

    def __init__(self, transfers: Transfers, *, limit_bytes: int | None = None) -> None:
        self.transfers = transfers
        self.limit_bytes = limit_bytes
        self._chunks: list[Tensor] = []
        self._top = (0, 0)
        self._alone: list[tuple[tuple[int, int], Tensor]] = []
        self._frames: list[Frame] = []

    @property
    def held_bytes(self) -> int:
        """Host memory taken, in use or not."""
        buffers = (*self._chunks, *(buffer for _, buffer in self._alone))
        return sum(self.transfers.taken_bytes(len(buffer)) for buffer in buffers)

    def mark(self) -> tuple[int, int]:
        return self._top

    def begin(self) -> Frame:
        """Begin the memory of a microbatch, before its forward."""
        self._frames.append(Frame(self._top))
        return self._frames[-1]

    def end(self, frame: Frame) -> None:
        """Give back a microbatch's memory, once all that was taken later is given back."""
        frame.ended = True
        top = self._top
        while self._frames and self._frames[-1].ended:
            top = self._frames.pop().begin
        self._give_back(top)

    def clear(self) -> None:
        """Give back everything, after a step or one that has failed."""
        self._frames.clear()
        self._give_back((0, 0))

    def _give_back(self, mark: tuple[int, int]) -> None:
        self._top = mark
        self._alone = [(at, buffer) for at, buffer in self._alone if at < mark]

    def take(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes], or None beyond the limit.

        A request larger than a chunk gets a separate buffer until its microbatch ends.
        """
        chunk, offset = self._top
        if nbytes > self.transfers.chunk_bytes:
            if not self._may_grow(nbytes):
                return None
            buffer = self.transfers.host_buffer(nbytes)
            # So that marks differ: what lies at a mark belongs to microbatches begun before it.
            self._top = (chunk, offset + ALIGNMENT_BYTES)
            self._alone.append(((chunk, offset), buffer))
            return buffer
        while chunk < len(self._chunks) and offset + nbytes > len(self._chunks[chunk]):
            chunk, offset = chunk + 1, 0
        begin = offset
        if chunk == len(self._chunks):
            size = self._next_chunk_bytes(nbytes)
            if size is None:
                return None
            self._chunks.append(self.transfers.host_buffer(size))
            # The offset is not 0 if all that was taken so far has memory of its own.
            begin = offset if offset + nbytes <= size else 0
        end = begin + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._top = (chunk, max(offset, end))
        return self._chunks[chunk][begin : begin + nbytes]

    def _next_chunk_bytes(self, nbytes: int) -> int | None:
        """Of a chunk that holds `nbytes`; under a limit the last ones are the largest that fit."""
        size = self.transfers.chunk_bytes
        while size >= nbytes and not self._may_grow(size):
            size //= 2
        return size if size >= max(1, nbytes) else None

    def _may_grow(self, nbytes: int) -> bool:
        if self.limit_bytes is None:
            return True
        return self.held_bytes + self.transfers.taken_bytes(nbytes) <= self.limit_bytes


def staging_for(device: torch.device, *, limit_bytes: int | None = None) -> Staging:
    """Streams and pinned memory on CUDA, plain copies elsewhere."""
    kind = StreamTransfers if device.type == "cuda" else PlainTransfers
    return Staging(kind(device), limit_bytes=limit_bytes)
