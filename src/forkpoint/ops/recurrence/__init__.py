"""Parts shared by recurrent layers: levels, chunks, convolution."""

from forkpoint.ops.recurrence.convolution import (
    ConvolutionTable,
    gathered_inputs,
    short_convolution,
)
from forkpoint.ops.recurrence.levels import StateTable, over_levels
from forkpoint.ops.recurrence.sequences import Chunks, Sequences, pairwise_decay

__all__ = [
    "Chunks",
    "ConvolutionTable",
    "Sequences",
    "StateTable",
    "gathered_inputs",
    "over_levels",
    "pairwise_decay",
    "short_convolution",
]
