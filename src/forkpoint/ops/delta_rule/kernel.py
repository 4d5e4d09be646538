"""Interface of a kernel of the gated delta rule: one differentiable function and a record of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forkpoint.ops.choice import no_refusal
from forkpoint.ops.recurrence import Sequences

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by its root."""


DeltaScan = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Sequences, bool],
    tuple[Tensor, Tensor | None],
]
"""q, k [T, H, D], v [T, G, E], g, beta [T, G], initial, sequences, final -> o, states.

Sequences lie back to back. o is [T, G, E] in v's dtype; states are those at the end of each
sequence if `final`, [S, G, D, E] in float32 (float64 for float64), which is also the dtype of
`initial`; None is zeros. Differentiable by autograd in all of them.
"""


@dataclass(frozen=True, kw_only=True)
class DeltaKernel:
    """A kernel by name, its function, and what has been shown of it; the rest is refused."""

    name: str
    scan: DeltaScan
    device_types: tuple[str, ...] | None
    """Types of device it runs on; None is any."""
    dtypes: tuple[torch.dtype, ...]
    scan_levels: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    """(inputs, table, initial) -> what `over_levels` gives with `scan`, in fewer launches."""
    refuses_head_dims: Callable[[int, int], str | None] = no_refusal
    """Why a key dim D with value dim E cannot be served ("it needs ..."), or None."""
    refuses_device: Callable[[torch.device], str | None] = no_refusal
    """Why a device of the right type cannot be served (package missing, old chip), or None."""
    deterministic: bool = False
    """Its backward gives the same bits each time."""

    def refusal(
        self,
        device: torch.device,
        dtype: torch.dtype,
        key_dim: int,
        value_dim: int,
        deterministic: bool,
    ) -> str | None:
        """Why it cannot serve, worded to follow its name; None if it can."""
        if self.device_types is not None and device.type not in self.device_types:
            return f"it runs on {', '.join(self.device_types)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if deterministic and not self.deterministic:
            return "its backward is not deterministic"
        return self.refuses_head_dims(key_dim, value_dim) or self.refuses_device(device)


def normalized(x_THD: Tensor) -> Tensor:
    """Vectors of length one, as queries and keys are before they meet the state."""
    return x_THD * torch.rsqrt((x_THD * x_THD).sum(-1, keepdim=True) + NORM_EPS)


def by_value_head(x_THD: Tensor, heads: int) -> Tensor:
    """[..., H, D] -> [..., G, D]: each query or key head serves G / H neighbouring value heads."""
    return x_THD.repeat_interleave(heads // x_THD.shape[-2], dim=-2)


def decay_gate(a_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor) -> Tensor:
    """g = -exp(log_rate) softplus(a + bias): the logarithm of what a token leaves of the state."""
    return -log_rate_G.exp() * F.softplus(a_TG + bias_G)
