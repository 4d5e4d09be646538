"""Interface of a kernel: two functions and a record of what they can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.attention.table import Launch
from forkpoint.ops.choice import no_refusal


class Options(NamedTuple):
    """Options of an attention, as in `shared_attention`."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    deterministic: bool = False


Forward = Callable[[Tensor, Tensor, Tensor, Launch, Options], tuple[Tensor, Tensor]]
"""q [Tq, H, D], k [Tk, K, D], v [Tk, K, E] of one launch -> o [Tq, H, E], lse [H, Tq].

o in the inputs' dtype or in `accumulate_dtype`, lse in the latter, natural logarithm, both freshly
allocated. Inputs are contiguous in their last dimension and may be strided in others.
"""
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Options],
    tuple[Tensor, Tensor, Tensor],
]
"""do, q, k, v, o, lse of one launch -> dq, dk, dv, in the inputs' dtype or in `accumulate_dtype`.

o and lse are those of the merged result, not of this launch: P = exp(s - lse) and the row sums of
do * o are all that a flash backward takes from them, so its gradients are this launch's part of the
true ones. All three are freshly allocated, shaped as q, k and v.
"""


class Asked(NamedTuple):
    """Request to a kernel, but for its launches."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: float
    window: int
    deterministic: bool
    grouped: bool = False
    """Whether query heads share key-value heads."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel by name, its pair of functions, and what has been shown of it; the rest is False."""

    name: str
    forward: Forward
    backward: Backward
    device_types: tuple[str, ...] | None
    """Types of device it runs on; None is any."""
    dtypes: tuple[torch.dtype, ...]
    refuses_device: Callable[[torch.device], str | None] = no_refusal
    """Why a device of the right type cannot be served (package missing, old chip), or None."""
    refuses: Callable[[Asked], str | None] = no_refusal
    """Why it cannot serve, beyond what is below ("it needs ..."), or None."""
    refuses_launch: Callable[[Launch], str | None] = no_refusal
    """Why a launch cannot be served, beyond what is below ("it needs ..."), or None."""
    softcap: bool = False
    window: bool = False
    causal_offset: bool = False
    """Causal launches whose sequences have more keys than queries; windowed layers need it."""
    ragged: bool = False
    """Sequences of different lengths in one launch."""
    deterministic: bool = False
    """Its backward can be made to give the same bits each time."""
    auto_pairs: int = 0
    """Launches of fewer (query, key) pairs are left to the next kernel by "auto"."""

    def refusal(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        value_dim: int,
        softcap: float,
        window: int,
        deterministic: bool,
        grouped: bool = False,
    ) -> str | None:
        """Why it cannot serve such attention, worded to follow its name; None if it can.

        `grouped` says whether query heads share key-value heads.
        """
        if self.device_types is not None and device.type not in self.device_types:
            return f"it runs on {', '.join(self.device_types)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if softcap and not self.softcap:
            return f"it has no softcap (asked for {softcap})"
        if window and not (self.window and self.causal_offset):
            return f"it has no sliding window (asked for {window})"
        if deterministic and not self.deterministic:
            return "its backward is not deterministic"
        asked = (device, dtype, head_dim, value_dim, softcap, window, deterministic, grouped)
        return self.refuses_device(device) or self.refuses(Asked(*asked))

    def launch_refusal(self, launch: Launch) -> str | None:
        """Why it cannot serve this launch of an attention that it serves; None if it can."""
        if launch.ragged and not self.ragged:
            return "it takes sequences of equal length, and a launch has others"
        longer = launch.k_end - launch.k_begin != launch.q_end - launch.q_begin
        if launch.causal and longer and not self.causal_offset:
            return "it has no causal mask for more keys than queries, and a launch needs it"
        return self.refuses_launch(launch)
