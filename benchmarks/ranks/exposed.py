"""Time in which a device communicates and computes nothing, from the record of a profiler."""

from collections.abc import Iterable, Sequence

from torch.profiler import profile

Interval = tuple[float, float]


def exposed_ms(record: profile) -> float:
    """Milliseconds in which kernels of NCCL run on the device and no others do."""
    own: list[Interval] = []
    others: list[Interval] = []
    for event in record.events() or ():
        if event.device_type.name == "CUDA":
            kind = own if "nccl" in event.name.lower() else others
            kind.append((event.time_range.start, event.time_range.end))
    return not_covered(own, others) / 1e3


def not_covered(own: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Length of what lies in any of `own` and in none of `others`."""
    a, b = _joined(own), _joined(others)
    return sum(end - begin for begin, end in a) - _common(a, b)


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, ascending."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
