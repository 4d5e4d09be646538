"""Measurement of the link between ranks: an all-gather, and sending to the next rank in a ring.

Two sizes are timed. Their difference gives the rate, and the rest of the smaller one the latency.
The times of the slowest rank are used, so all ranks get the same results.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from forkpoint.plan.pricing.calibration import Link

MIB = 1 << 20
SIZES = (MIB, 64 * MIB)
"""Number of bytes that each rank receives."""
REPEATS = 7


def measure_link(
    device: torch.device, *, sizes: tuple[int, int] = SIZES, repeats: int = REPEATS
) -> Link:
    """Measure the link of the default group, of at least two ranks. Collective.

    Args:
        sizes: bytes that each rank receives, the smaller first.
        repeats: how often each size is timed, after one round to warm up. The median counts.

    Returns the same on all ranks.
    """
    size = dist.get_world_size()
    assert size > 1 and sizes[0] < sizes[1]
    times = []
    for nbytes in sizes:
        for make in (_gathers, _sends):
            run = make(device, nbytes)
            _timed(run, device)
            times.append(median(_timed(run, device) for _ in range(repeats)))
    # The slowest rank's time, the same on all ranks.
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    gather_small, send_small, gather_large, send_large = found.tolist()
    gather_rate, gather_latency = _line(sizes, (gather_small, gather_large))
    send_rate, send_latency = _line(sizes, (send_small, send_large))
    backend = str(dist.get_backend())
    return Link(
        ranks=size,
        backend="nccl" if device.type == "cuda" else "gloo" if "gloo" in backend else backend,
        gather_bytes_per_ms=gather_rate,
        gather_latency_ms=gather_latency,
        send_bytes_per_ms=send_rate,
        send_latency_ms=send_latency,
    )


def _gathers(device: torch.device, nbytes: int) -> Callable[[], None]:
    size = dist.get_world_size()
    own = torch.zeros(max(1, nbytes // (size - 1)), dtype=torch.uint8, device=device)
    every = list(torch.empty((size, len(own)), dtype=torch.uint8, device=device))

    def run() -> None:
        dist.all_gather(every, own)

    return run


def _sends(device: torch.device, nbytes: int) -> Callable[[], None]:
    here, size = dist.get_rank(), dist.get_world_size()
    out, back = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, out, (here + 1) % size),
            dist.P2POp(dist.irecv, back, (here - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one call. All ranks begin it together."""
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(sizes: tuple[int, int], times_ms: tuple[float, float]) -> tuple[float, float]:
    """Rate in bytes per ms, and latency in ms, of the line through two points.

    The latency is at most half of the larger transfer's time. If the smaller transfer took longer
    than that, it was disturbed, and the difference of the two times is noise, perhaps 0 or
    negative.
    """
    large = max(times_ms[1], 1e-6)
    small = min(times_ms[0], large / 2)
    rate = (sizes[1] - sizes[0]) / (large - small)
    return rate, max(0.0, small - sizes[0] / rate)
