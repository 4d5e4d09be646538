"""The gated delta rule over packed microbatches of segments, with a choice of kernels."""

from forkpoint.ops.delta_rule.kernel import DeltaKernel
from forkpoint.ops.delta_rule.operator import DELTA_KERNELS, gated_delta_rule, select_delta_kernel

__all__ = ["DELTA_KERNELS", "DeltaKernel", "gated_delta_rule", "select_delta_kernel"]
