"""cuDNN's attention as torch ships it: sequences of one length, on Ampere and newer.

Source: `aten::_scaled_dot_product_cudnn_attention` and its backward, found by experiment in torch
2.11:
- Tensors are [B, H, T, D] in any strides with a last dimension of stride 1, so equal packed
  sequences go in as views; K may be less than H. lse is float32 [B, H, T, 1].
- float16 and bfloat16; D and E up to 256 on Hopper and up to 128 on other chips, in multiples of 8.
  On compute capability 10 cuDNN 9.11 takes 192 and 128 as well. The operator does not check these
  limits. torch's attention checks them before it calls it (`check_cudnn_tensor_shapes`).
- is_causal aligns top-left, so it is used where there are as many keys as queries. No softcap; no
  window.
- cuDNN builds a plan for each new shape (tens of milliseconds) and keeps it. With torch's
  variable-length operator it builds one at every call, so that operator is not used.
- With 2^31 elements of queries or more its backward is wrong, without an error: dq was off by 0.4
  of its norm for 600,000 queries of 16 x 256 that see 4,096 keys (cuDNN 9.19, H200).
- A sequence of one query and one key raises an error.
- The backward takes the optional tensors that its schema declares required: None is passed.
"""

from typing import Any

import torch
from torch import Tensor

from forkpoint.ops.attention.kernel import (
    Asked,
    BackwardInputs,
    Gradients,
    Kernel,
    Options,
    refuses_elements,
)
from forkpoint.ops.attention.table import Launch

_LATENT_ON_BLACKWELL = 91_100
"""The first version of cuDNN with head dims of 192 and 128 on compute capability 10."""

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    o_BHTE, lse, *_ = _cudnn(
        *(_batch(x, launch.count) for x in (q_THD, k_TKD, v_TKE)),
        None,
        True,
        0.0,
        launch.causal,
        False,
        scale=options.scale,
    )
    heads = q_THD.shape[1]
    lse_HT = lse.view(launch.count, heads, -1).transpose(0, 1).reshape(heads, -1)
    return _packed(o_BHTE), lse_HT


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    lse_BHT = inputs.lse.reshape(len(inputs.lse), launch.count, -1).transpose(0, 1).contiguous()
    # The random state of dropout: there is no dropout.
    unused = torch.empty(0, dtype=torch.int64, device=inputs.q.device)
    grads = _cudnn_backward(
        *(_batch(x, launch.count) for x in inputs[:5]),
        lse_BHT[..., None],
        unused,
        unused,
        None,
        None,
        None,
        launch.max_q,
        launch.max_k,
        0.0,
        launch.causal,
        scale=options.scale,
    )
    dq_THD, dk_TKD, dv_TKE = (_packed(x) for x in grads)
    return dq_THD, dk_TKD, dv_TKE


def _batch(x_THD: Tensor, count: int) -> Tensor:
    return x_THD.unflatten(0, (count, -1)).transpose(1, 2)


def _packed(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _version() -> int:
    return torch.backends.cudnn.version() or 0


def _refuses(asked: Asked) -> str | None:
    capability = torch.cuda.get_device_capability(asked.device)
    most = 256 if capability == (9, 0) else 128
    dims = asked.head_dim, asked.value_dim
    if capability[0] == 10 and dims == (192, 128) and _version() >= _LATENT_ON_BLACKWELL:
        return None
    if max(dims) > most or any(dim % 8 for dim in dims):
        return f"it needs head dims of at most {most} in steps of 8, not {dims[0]} and {dims[1]}"
    return None


def _refuses_device(_: torch.device) -> str | None:
    return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def _refuses_launch(launch: Launch, asked: Asked) -> str | None:
    if launch.max_q == launch.max_k == 1:
        return "it needs more than one query or more than one key a sequence, and a launch has one"
    return refuses_elements(launch.max_q * launch.count, launch.max_k * launch.count, asked)


KERNEL = Kernel(
    name="cudnn",
    repeats_keys=True,
    forward=forward,
    backward=backward,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    capability=8,
    refuses_device=_refuses_device,
    refuses=_refuses,
    refuses_launch=_refuses_launch,
    # Least number of pairs for which its speed over FA2, summed over the layers of a model, repays
    # the plans of a new shape. A plan takes 30 ms on an H200, once forward and once backward.
    auto_pairs=1 << 26,
)
