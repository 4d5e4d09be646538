"""The recurrence of Mamba-2 over packed microbatches of segments."""

from forkpoint.ops.selective_scan.operator import SCAN_KERNELS, selective_scan

__all__ = ["SCAN_KERNELS", "selective_scan"]
