"""The stack of host memory: what is handed out does not overlap, and limits hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forkpoint.engine.staging import (
    ALIGNMENT_BYTES,
    Frame,
    PlainTransfers,
    Staging,
    StreamTransfers,
)

CHUNK = 4 * ALIGNMENT_BYTES


class PowersOfTwo(PlainTransfers):
    """Host memory as CUDA pins it."""

    def taken_bytes(self, nbytes: int) -> int:
        return StreamTransfers.taken_bytes(nbytes)


def staging(limit: int | None = None, *, chunk: int = CHUNK) -> Staging:
    return Staging(PowersOfTwo(torch.device("cpu"), chunk_bytes=chunk), limit_bytes=limit)


def test_a_storage_as_large_as_a_chunk_after_one_that_is_larger() -> None:
    stack = staging()
    large, full = stack.take(CHUNK + 1), stack.take(CHUNK)
    assert large is not None and full is not None
    assert (len(large), len(full)) == (CHUNK + 1, CHUNK)


def test_a_limit_below_a_chunk_is_used() -> None:
    stack = staging(CHUNK - 1)
    found = stack.take(ALIGNMENT_BYTES)
    assert found is not None and len(found) == ALIGNMENT_BYTES
    assert stack.held_bytes == CHUNK // 2
    assert stack.take(2 * ALIGNMENT_BYTES) is None


def test_pinned_memory_counts_as_it_is_taken() -> None:
    stack = staging(2 * CHUNK)
    assert stack.take(CHUNK + 1) is not None
    assert stack.held_bytes == 2 * CHUNK
    assert stack.take(CHUNK + 1) is None and stack.take(1) is None
    sizes = (1, 2, 3, 1 << 30, (1 << 30) + 1)
    assert [StreamTransfers.taken_bytes(n) for n in sizes] == [1, 2, 4, 1 << 30, 1 << 31]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(1, 3 * CHUNK), st.just("begin"), st.tuples(st.just("end"), st.integers(0))
        )
    ),
    st.none() | st.integers(1, 8 * CHUNK),
)
def test_what_is_alive_keeps_its_bytes(
    steps: list[int | str | tuple[str, int]], limit: int | None
) -> None:
    """Microbatches end in any order."""
    stack = staging(limit)
    open_: list[tuple[Frame, list[tuple[Tensor, int]]]] = [(stack.begin(), [])]
    for number, step in enumerate(steps):
        if step == "begin":
            open_.append((stack.begin(), []))
        elif isinstance(step, tuple):
            frame, _ = open_.pop(step[1] % len(open_))
            stack.end(frame)
            # Only a forward that runs takes memory.
            open_.append((stack.begin(), []))
        elif isinstance(step, int):
            found = stack.take(step)
            assert found is not None or limit is not None
            if found is not None:
                assert len(found) == step
                open_[-1][1].append((found.fill_(number % 251), number % 251))
        assert limit is None or stack.held_bytes <= limit
        for _, taken in open_:
            assert all(bool((buffer == value).all()) for buffer, value in taken)
    for frame, _ in open_:
        stack.end(frame)
    assert stack.mark() == (0, 0)
