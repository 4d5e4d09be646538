"""Runs the segments of one microbatch level by level, parents before children."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.ops.recurrence.sequences import Sequences
from forkpoint.tree import Level, StateLayout

Scan = Callable[..., tuple[Tensor, Tensor | None]]
"""(*inputs_T, initial_S or None, sequences, final) -> (output_T, final_S or None)"""


class LevelTable:
    """One level as tensors. A plain object: see `ops.attention.table`."""

    def __init__(self, level: Level, first: bool, device: torch.device | str) -> None:
        self.positions: np.ndarray = np.concatenate(
            [np.arange(b, b + n) for b, n in zip(level.begin, level.length, strict=True)]
        )
        self.sequences: Sequences = Sequences(level.length, device)
        self.parents: Tensor | None = None if first else on_device(level.parent, device)
        self.kept: Tensor | None = on_device(level.kept, device) if len(level.kept) else None
        self.final: bool = level.final


class StateTable:
    """A microbatch's levels, and the cache slots of its initial and kept states. Built once a
    microbatch."""

    def __init__(self, layout: StateLayout, *, device: torch.device | str = "cpu") -> None:
        self.levels: list[LevelTable] = [
            LevelTable(level, i == 0, device) for i, level in enumerate(layout.levels)
        ]
        first = layout.levels[0].parent
        (reading,) = np.nonzero(first >= 0)
        self.starts: int = len(first)
        """Number of segments of the first level."""
        self.reading: Tensor | None = on_device(reading, device) if len(reading) else None
        """Segments of the first level that start from a state of another microbatch; None if none
        does."""
        self.read_index: Tensor = on_device(first[reading], device)
        """Cache slots of these states."""
        self.kept_index: Tensor = on_device(layout.kept_index, device)
        """[K] cache slots of the states that other microbatches start from."""
        order = np.concatenate([level.positions for level in self.levels])
        self._tokens: list[int] = [len(level.positions) for level in self.levels]
        self._order: Tensor | None = None
        self._inverse: Tensor | None = None
        if not (order == np.arange(len(order))).all():
            inverse = np.argsort(order, kind="stable")
            self._order = on_device(order, device)
            self._inverse = on_device(inverse, device)

    def ordered(self, x_T: Tensor) -> Tensor:
        """The microbatch's tokens in the order of its levels."""
        return x_T if self._order is None else x_T.index_select(0, self._order)

    def as_within(self, x_T: Tensor) -> Tensor:
        """The inverse of `ordered`."""
        return x_T if self._inverse is None else x_T.index_select(0, self._inverse)

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        """The tokens of each level, by one gather, so that gradients are summed once."""
        return (x_T,) if len(self.levels) == 1 else self.ordered(x_T).split(self._tokens)

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Outputs of the levels, in the order of the microbatch's places."""
        return outputs[0] if len(outputs) == 1 else self.as_within(torch.cat(outputs))


def over_levels(
    scan: Scan, inputs: tuple[Tensor, ...], table: StateTable, initial_S: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run a scan over all segments of a microbatch, each from the state at the end of its parent.

    Args:
        scan: a recurrence over adjacent sequences.
        inputs: each [T, ...], the microbatch's tokens.
        initial_S: initial states of the first level; None for zeros.

    Returns:
        The scan's outputs [T, ...], and the final states [K, ...] that other microbatches start
        from, in the order of `table.kept_index`, or None. Gradients of children are summed in the
        dtype of the states.
    """
    outputs, kept = [], []
    state = initial_S
    given = zip(*(table.split(x) for x in inputs), strict=True)
    for level, here in zip(table.levels, given, strict=True):
        if level.parents is not None:
            assert state is not None
            state = state.index_select(0, level.parents)
        output, state = scan(*here, state, level.sequences, level.final)
        outputs.append(output)
        if level.kept is not None:
            assert state is not None
            kept.append(state.index_select(0, level.kept))
    return table.join(outputs), torch.cat(kept) if kept else None
