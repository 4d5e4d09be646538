"""How far apart two models are, over all of their parameters."""

import math

from torch import Tensor, nn

from forkpoint.apps.replay.records import ParameterDifference

CHUNK_ELEMENTS = 1 << 24
"""How many elements are held in float64 at a time."""


def parameter_difference(
    shared: nn.Module, dense: nn.Module, start: list[Tensor]
) -> ParameterDifference:
    """Compare two models of one architecture; `start` is where both began, on any device."""
    largest = signed = absolute = squares = change = 0.0
    count = 0
    for a, b, before in zip(shared.parameters(), dense.parameters(), start, strict=True):
        parts = (x.detach().reshape(-1).split(CHUNK_ELEMENTS) for x in (a, b, before))
        for one, other, old in zip(*parts, strict=True):
            apart = one.double() - other.double()
            moved = other.double() - old.to(other.device).double()
            worst = float(apart.abs().max())
            # Python's max would let a NaN pass.
            largest = worst if worst > largest or math.isnan(worst) else largest
            signed += float(apart.sum())
            absolute += float(apart.abs().sum())
            squares += float(apart.square().sum())
            change += float(moved.square().sum())
        count += a.numel()
    return ParameterDifference(
        max=largest,
        mean=signed / count,
        mean_absolute=absolute / count,
        rms=math.sqrt(squares / count),
        rms_change=math.sqrt(change / count),
    )
