"""Long causal sequences on cuDNN, each extended to one of few lengths; shorter ones on FA2.

cuDNN's attention is about 1.7 times as fast as FlashAttention-2 on Hopper, but builds a plan for
each new shape (140 to 170 ms forward and backward, once in a process). Lengths of segments differ
between groups. So a sequence takes rows of the next segments with it, or zeros after the last one.
Then there are at most 16 shapes between two powers of two, and little is copied.

Added rows change no value: a causal query does not attend to later keys, and for added queries the
backward gets a log-sum-exp at which all their probabilities are 0, so they add 0 to the gradients
of keys.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.attention import cudnn, fa2
from forkpoint.ops.attention.kernel import (
    Asked,
    BackwardInputs,
    Gradients,
    Kernel,
    Options,
    refuses_elements,
)
from forkpoint.ops.attention.table import Launch
from forkpoint.tree import LONG_TOKENS, padded_length

FAR = 1e30
"""A log-sum-exp at which exp(score - lse) is 0. Not infinite, because kernels scale it."""


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    found = []
    for part in launch.parts:
        if not _is_long(part):
            q, k, v = (x[part.q_begin : part.q_end] for x in (q_THD, k_TKD, v_TKE))
            found.append(fa2.forward(q, k, v, part, options))
            continue
        tokens, length = part.max_q, padded_length(part.max_q)
        q, k, v = (_extended(x, part.q_begin, length) for x in (q_THD, k_TKD, v_TKE))
        o, lse = cudnn.forward(q, k, v, replace(part, max_q=length, max_k=length), options)
        found.append((o[:tokens], lse[:, :tokens]))
    o, lse = zip(*found, strict=True)
    return _joined(o, 0), _joined(lse, 1)


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    found = []
    for part in launch.parts:
        its = slice(part.q_begin, part.q_end)
        lse = inputs.lse[:, its]
        if not _is_long(part):
            own = BackwardInputs(*(x[its] for x in inputs[:5]), lse=lse)
            found.append(fa2.backward(own, part, options))
            continue
        tokens, length = part.max_q, padded_length(part.max_q)
        lse = F.pad(lse, (0, length - tokens), value=FAR)
        own = BackwardInputs(*(_extended(x, part.q_begin, length) for x in inputs[:5]), lse=lse)
        grads = cudnn.backward(own, replace(part, max_q=length, max_k=length), options)
        found.append(tuple(x[:tokens] for x in grads))
    dq, dk, dv = (_joined(x, 0) for x in zip(*found, strict=True))
    return dq, dk, dv


def _is_long(part: Launch) -> bool:
    return part.count == 1 and part.max_q >= LONG_TOKENS


def _extended(x_THD: Tensor, begin: int, length: int) -> Tensor:
    """`length` rows from `begin` on: a view, or a copy with zeros after the last row."""
    rows = x_THD[begin : begin + length]
    return rows if len(rows) == length else F.pad(rows, (0, 0, 0, 0, 0, length - len(rows)))


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _refuses(asked: Asked) -> str | None:
    return cudnn.KERNEL.refuses(asked) or fa2.KERNEL.refuses(asked)


def _refuses_launch(launch: Launch, asked: Asked) -> str | None:
    if not launch.parts:
        return f"it needs a causal sequence of {LONG_TOKENS:,} tokens, and a launch has none"
    longest = padded_length(max(part.max_q for part in launch.parts))
    return refuses_elements(longest, longest, asked)


KERNEL = Kernel(
    name="padded",
    repeats_keys=True,
    forward=forward,
    backward=backward,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    capability=9,
    refuses_device=cudnn.KERNEL.refuses_device,
    refuses=_refuses,
    refuses_launch=_refuses_launch,
    ragged=True,
)
