"""FlashAttention-2 as torch ships it: variable lengths on Ampere and newer GPUs.

Source: `aten::_flash_attention_forward` and `aten::_flash_attention_backward`, found by experiment
in torch 2.11:
- q [Tq, H, D], k [Tk, K, D], v [Tk, K, D] with int32 cumulative lengths; lse float32 [H, Tq].
- float16 and bfloat16; D up to 256 in multiples of 8, E equal to D. On compute capability 8.6 to
  8.9 and 12, its backward does not support D from 200 to 224. torch's own attention refuses these
  too.
- Causal masks and windows align to the end (bottom-right). No softcap.
- Its backward adds dq with atomics, so the order varies, unless torch's deterministic algorithms
  are enabled.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Gradients, Kernel, Options
from forkpoint.ops.attention.table import Launch

_flash = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    o_THE, lse_HT, *_ = _flash(
        q_THD,
        k_TKD,
        v_TKE,
        launch.cu_q,
        launch.cu_k,
        launch.max_q,
        launch.max_k,
        0.0,
        launch.causal,
        False,
        scale=options.scale,
        **_window(options.window),
    )
    return o_THE, lse_HT


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    # The random state of dropout: there is no dropout.
    unused = inputs.q.new_empty(2, dtype=torch.uint64)
    with _deterministic() if options.deterministic else nullcontext():
        return _flash_backward(
            *inputs[:5],
            inputs.lse.contiguous(),
            launch.cu_q,
            launch.cu_k,
            launch.max_q,
            launch.max_k,
            0.0,
            launch.causal,
            unused,
            unused,
            scale=options.scale,
            **_window(options.window),
        )


def _window(window: int) -> dict[str, Any]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _refuses(asked: Asked) -> str | None:
    dim, other = asked.head_dim, asked.value_dim
    if dim != other:
        return f"it needs equal head dims of keys and values, not {dim} and {other}"
    if dim % 8 or dim > 256:
        return f"it needs a head dim of at most 256 in steps of 8, not {dim}"
    capability = torch.cuda.get_device_capability(asked.device)
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if small and 192 < dim <= 224:
        major, minor = capability
        return (
            f"on compute capability {major}.{minor} its backward needs a head dim of at most 192, "
            f"or over 224, not {dim}"
        )
    return None


KERNEL = Kernel(
    name="fa2",
    repeats_keys=True,
    forward=forward,
    backward=backward,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    capability=8,
    refuses=_refuses,
    window=True,
    causal_offset=True,
    ragged=True,
    deterministic=True,
)
