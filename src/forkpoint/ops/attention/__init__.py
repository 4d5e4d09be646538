"""Attention of packed rows over shared prefixes: one composition over stock kernels."""

from forkpoint.ops.attention.kernel import Kernel, accumulate_dtype
from forkpoint.ops.attention.operator import shared_attention
from forkpoint.ops.attention.registry import KERNELS, select_kernel
from forkpoint.ops.attention.table import (
    FROM_ARENA,
    FROM_GATHER,
    FROM_ROW,
    LAUNCH_COLUMNS,
    ArenaSlice,
    AttentionTable,
    Launch,
)

__all__ = [
    "FROM_ARENA",
    "FROM_GATHER",
    "FROM_ROW",
    "KERNELS",
    "LAUNCH_COLUMNS",
    "ArenaSlice",
    "AttentionTable",
    "Kernel",
    "Launch",
    "accumulate_dtype",
    "select_kernel",
    "shared_attention",
]
