"""Attention of packed microbatches over shared prefixes, composed of stock kernels."""

from forkpoint.ops.attention.kernel import Kernel
from forkpoint.ops.attention.operator import shared_attention
from forkpoint.ops.attention.registry import KERNELS, select_kernel
from forkpoint.ops.attention.table import AttentionTable, CacheSlice, Launch
from forkpoint.tree import FROM_CACHE, FROM_GATHER, FROM_OWN

__all__ = [
    "FROM_CACHE",
    "FROM_GATHER",
    "FROM_OWN",
    "KERNELS",
    "AttentionTable",
    "CacheSlice",
    "Kernel",
    "Launch",
    "select_kernel",
    "shared_attention",
]
